"""`undertow --version`, `models` and `doctor`: what they print, as text and as JSON."""

import json
import os
import subprocess
import sys

import pytest
import torch

import undertow
from undertow.cli import main
from undertow.free_memory import FreeMemory
from undertow.models import ZOO


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "undertow"


def run(capsys, *words):
    code = main(words)
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


def test_version_needs_no_torch():
    program = "import sys; from undertow.cli import main; sys.exit(main(['--version']) or 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"undertow {undertow.__version__}\n", "")


def test_models_are_listed_with_their_sizes(capsys):
    code, text = run(capsys, "models", "--json")
    found = {item["name"]: item for item in json.loads(text)}
    assert code == 0 and list(found) == list(ZOO)
    model = ZOO["lenet5"].build()
    assert found["lenet5"]["num_parameters"] == sum(item.numel() for item in model.parameters())
    assert found["lenet5"]["parameter_bytes"] == 4 * found["lenet5"]["num_parameters"]
    # Published: He et al., CVPR 2016, and Simonyan and Zisserman, ICLR 2015, as torchvision counts them.
    assert found["resnet50"]["num_parameters"] == 25_557_032 and found["vgg16"]["num_parameters"] == 138_357_544
    assert found["gpt"]["example_input"] == "int64[1,256]"


def test_models_as_text_fit_a_terminal(capsys):
    code, text = run(capsys, "models")
    lines = text.splitlines()
    assert code == 0 and len(lines) == len(ZOO) + 1 and max(map(len, lines)) <= 80
    assert lines[0].split() == ["model", "parameters", "size", "input"]
    assert "138,357,544  527.8 MiB  float32[1,3,224,224]" in text


def test_doctor_says_what_is_here(capsys, cache):
    cache.mkdir()
    (cache / "costs.json").write_bytes(b"x" * 3000)
    code, text = run(capsys, "doctor", "--json")
    found = json.loads(text)
    assert code == 0
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["versions"]["undertow"] == undertow.__version__ and found["is_torch_tested"]
    assert found["num_threads"] == torch.get_num_threads() and found["devices"][0] == "cpu"
    assert found["cache"] == {"folder": str(cache), "num_bytes": 3000, "is_writable": True, "problem": ""}
    assert list(cache.iterdir()) == [cache / "costs.json"], "nothing is left there"
    abilities = {item["name"]: item["is_fast"] for item in found["abilities"]}
    assert abilities["GPU"] == torch.cuda.is_available()
    assert abilities['numerics="bf16" on the CPU'] == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_doctor_as_text_fits_a_terminal(capsys, cache):
    code, text = run(capsys, "doctor")
    lines = [line for line in text.splitlines() if str(cache) not in line]  # a long name of a folder stays whole
    assert code == 0 and max(map(len, lines)) <= 80
    assert {"fast here", "not fast here"} <= set(lines)
    assert not cache.exists(), "the folder is not made for the question"


def test_doctor_says_why_memory_is_given_back():
    for variables, expected in (({"UNDERTOW_MALLOC": "off"}, False), ({}, sys.platform == "linux")):
        program = "from undertow.cli import main; main(['doctor', '--json'])"
        environment = {**os.environ, **variables}
        output = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        ).stdout
        assert json.loads(output)["keeps_memory_mapped"] == expected


def test_doctor_names_a_cache_that_cannot_be_written(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    code, text = run(capsys, "doctor", "--json")
    found = json.loads(text)["cache"]
    assert code == 0 and not found["is_writable"] and str(tmp_path / "file") in found["problem"]


def test_doctor_without_numba(tmp_path):
    program = (
        "import sys; sys.modules['numba'] = None; from undertow.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    abilities = {item["name"]: item for item in json.loads(result.stdout)["abilities"]}
    found = abilities["kernels and search for plans"]
    assert not found["is_fast"] and "pip install numba" in found["reason"]


@pytest.mark.parametrize(
    "module, words, package",
    [
        ("safetensors", ["plan", "mlp"], "safetensors"),
        ("typer", ["models"], "typer"),
        ("sklearn.datasets", ["train", "lenet5"], "scikit-learn"),
        ("PIL", ["train", "lenet5"], "pillow"),
    ],
)
def test_a_missing_library_is_one_line(module, words, package, tmp_path):
    program = f"import sys; sys.modules[{module!r}] = None; from undertow.cli import main; sys.exit(main({words}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    name = module.partition(".")[0]
    assert result.stderr == f"undertow: {name} is not installed, and Undertow needs it: pip install {package}\n"


def test_a_cache_that_cannot_be_written_is_one_line_of_a_command(tmp_path):
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")}
    command = [sys.executable, "-m", "undertow", "plan", "mlp", "--budget", "1GiB"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("undertow: warning: costs or plans could not be kept in the cache folder")


def test_a_container_without_room_for_the_libraries_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(
        "undertow.cli.about_commands.find_free_memory", lambda: FreeMemory(100 << 20, 150 << 20, "the container")
    )
    assert main(["plan", "lenet5", "--quick"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "take 224 MiB, and 100 MiB of 150 MiB are free in the container" in said.err
    assert main(["--version"]) == 0


def test_free_memory_is_known_before_pytorch_is_imported():
    code = (
        "import sys; from undertow.free_memory import find_free_memory as find; find(); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
