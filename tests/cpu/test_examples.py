"""The examples run, and a planned model ends with the weights of an unplanned one."""

import importlib.util
from pathlib import Path

import pytest
import torch

from undertow.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["transformers_trainer", "lightning_module"])
def test_a_trainer_with_a_planned_model(name):
    with torch.random.fork_rng(devices=[]):
        example = load(name)
        planned, eager = example.main(is_planned=True), example.main(is_planned=False)
    assert planned.keys() == eager.keys()
    assert all(torch.equal(planned[key], eager[key]) for key in planned)


def test_the_plain_loop_learns():
    with torch.random.fork_rng(devices=[]):
        assert load("plain_loop").main() > 0.9


def test_callbacks_that_track_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "lenet5", "--epochs", "1", "--batch", "64", "--out", "a"]
    with torch.random.fork_rng(devices=[]):
        assert main([*words, "--callbacks", str(EXAMPLES / "callbacks.py")]) == 0
    rows = (tmp_path / "tracked.csv").read_text().splitlines()
    assert rows[0].startswith("step,kind,loss") and rows[-1].startswith("22,test,") and len(rows) == 1 + 22 + 1


def test_every_example_is_tested():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    in_ranks = {"several_workers"}  # tests/ranks
    assert names == {"transformers_trainer", "lightning_module", "plain_loop", "callbacks"} | in_ranks
