"""The config of a run: files mean the same as flags, and each mistake has one clear message."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from undertow.errors import CallError
from undertow.train.config import TrainConfig, check_resumed, make_config, read_config_file

TOML = 'model = "lenet5"\nlr = 0.1\nbatch = 8\nnesterov = true\nweight-decay = 5e-4\nbudget = "50MiB"\n'
YAML = "model: lenet5\nlr: 1e-1\nbatch: 8\nnesterov: true\nweight_decay: 5e-4\nbudget: 50MiB\n"
EXPECTED = TrainConfig("lenet5", lr=0.1, batch=8, nesterov=True, weight_decay=5e-4, budget="50MiB")


@pytest.mark.parametrize("name, text", [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML)])
def test_a_file_says_what_flags_say(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert make_config(read_config_file(path), str(path)) == EXPECTED


def test_a_config_survives_json():
    assert make_config(EXPECTED.to_dict(), "itself") == EXPECTED


WRONG = {
    "momentm": ({"momentm": 0.9}, "no option 'momentm'; did you mean momentum?"),
    "nothing near": ({"zzz": 1}, "there are model, data, columns"),
    "type": ({"lr": "fast"}, "lr must be a number"),
    "not finite": ({"lr": "nan"}, "lr must be a number"),
    "whole": ({"epochs": 2.5}, "epochs must be a whole number, got 2.5"),
    "truth": ({"nesterov": 1}, "nesterov must be true or false"),
    "least": ({"batch": 0}, "batch must be at least 1"),
    "choice": ({"schedule": "cosin"}, "schedule 'cosin' is not known; did you mean cosine?"),
    "numerics": ({"numerics": "quick"}, "numerics 'quick' is not known; can be exact, fast, bf16"),
    "loss": ({"loss": "softmax"}, "loss 'softmax' is not known"),
    "momentum of adam": ({"optimizer": "adam", "momentum": 0.9}, "are options of sgd"),
    "nesterov": ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum"),
    "no model": ({"model": ""}, "no model is named"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named(name):
    given, message = WRONG[name]
    with pytest.raises(CallError) as error:
        make_config({"model": "lenet5", **given}, "here")
    assert message in str(error.value) and "here" in str(error.value)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.toml", "lr = ", "cannot be read"),
        ("a.yaml", "lr: [", "cannot be read"),
        ("a.yaml", "- 1\n- 2", "must hold keys"),
        ("a.toml", "x" * (2 << 20), "larger than 1,048,576 bytes"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "cannot be read"),
    ],
)
def test_files_that_are_no_config(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(CallError, match=message):
        read_config_file(path)
    with pytest.raises(CallError, match="No such file"):
        read_config_file(tmp_path / "missing.toml")


def test_a_resumed_run_may_only_change_its_length():
    folder = Path("runs/a")
    assert check_resumed(EXPECTED, {"epochs": 20}, folder).epochs == 20
    assert check_resumed(EXPECTED, {"lr": 0.1, "out": "runs/a"}, folder).out == "runs/a"
    with pytest.raises(CallError, match="goes on in its own folder"):
        check_resumed(EXPECTED, {"out": "elsewhere"}, folder)
    with pytest.raises(CallError, match="started with lr 0.1, but now 0.2 is given"):
        check_resumed(EXPECTED, {"lr": 0.2}, folder)
    plain = make_config({"model": "a"}, "")
    with pytest.raises(CallError, match="started with lr 0.01, but now 0.1 is given"):
        check_resumed(plain, {"lr": 0.1}, folder)
    with pytest.raises(CallError, match="started without budget, but now '1GiB' is given"):
        check_resumed(plain, {"budget": "1GiB"}, folder)
    assert check_resumed(plain, {"lr": 0.01, "momentum": 0.9}, folder).learning_rate == 0.01
    with pytest.raises(CallError, match="depends on the run's length"):
        check_resumed(make_config({"model": "a", "schedule": "cosine"}, ""), {"epochs": 20}, folder)


def test_every_option_says_what_it_is():
    for item in fields(TrainConfig):
        assert item.metadata["help"].endswith(".")


def test_the_config_needs_no_torch():
    program = "import sys, undertow.train.config; assert 'torch' not in sys.modules and 'yaml' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
