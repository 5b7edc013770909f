"""The package as a stranger gets it: what the wheel holds, its types, and that it works in an empty environment."""

import ast
import email
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import undertow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the files that it is made from."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (made,) = (folder / "dist").iterdir()
    return made


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "undertow/py.typed" in names and any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"undertow", f"undertow-{undertow.__version__}.dist-info"}
    modules = {name for name in names if name.endswith(".py")}
    assert modules == {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}


def test_wheel_says_what_it_is(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Name"] == "undertow" and metadata["Version"] == undertow.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert metadata["Requires-Python"] == ">=3.11" and metadata["License-Expression"] == "Apache-2.0"
    classifiers = metadata.get_all("Classifier")
    assert "Typing :: Typed" in classifiers and "Programming Language :: Python :: 3.11" in classifiers
    assert metadata.get_all("Provides-Extra") == ["test", "docs", "data", "cluster"]
    needed = [item for item in metadata.get_all("Requires-Dist") if "extra ==" not in item]
    assert "torch>=2.11" in needed, "no upper limit: it would replace the PyTorch that a user has"


def test_only_dependencies_are_imported():
    """A wheel without its extras has to work: nothing of the tests' libraries is imported by the package."""
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE).group(1)
    allowed = set(re.findall(r'^ *"([a-z-]+)', listed, re.MULTILINE)) | {"undertow"}
    modules = {"pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}
    allowed = {modules.get(name, name) for name in allowed} | {"llvmlite"}  # which numba brings
    always, late = set(), set()
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            found = always if node in tree.body else late
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
    assert always - set(sys.stdlib_module_names) <= allowed
    # Where an option needs them, with a line that says how they are installed.
    assert late - set(sys.stdlib_module_names) <= allowed | {"pyarrow", "torchvision", "ray"}


def test_every_public_name_is_there():
    assert len(set(undertow.__all__)) == len(undertow.__all__)
    assert all(getattr(undertow, name) is not None for name in undertow.__all__)
    assert set(undertow._HOMES) <= set(undertow.__all__) <= set(dir(undertow))


USERS_FILE = """
from typing import cast
import torch
from torch import nn
import undertow as ut

class Network(nn.Module):
    def describe(self) -> str:
        return "a network"

def area(width: torch.Tensor, height: torch.Tensor) -> torch.Tensor:
    return width * height

x = torch.randn(2, 4)
planned = ut.plan(Network(), (x,), budget="1MiB")
reveal_type(planned)
reveal_type(planned.describe())
reveal_type(cast(ut.Plan, planned.plan).peak_bytes)
step = ut.train_step(planned, (x,), targets=(x,), loss=nn.functional.mse_loss)
reveal_type(step)
reveal_type(step(x, x))
reveal_type(step.plan)
reveal_type(ut.value_and_grad(area)(x, x)[0])
reveal_type(ut.vjp(area, x, x)[0])
reveal_type(ut.hvp(area, (x, x), (x, x)))
reveal_type(ut.measure(step, x, x).peak_bytes)
reveal_type(ut.tradeoff(planned, (x,)).minimum_bytes)
ut.plan(3, (x,))
ut.grad(area)(x)
"""
TYPES = [
    "Network",
    "str",
    "int",
    "TrainStep",
    "Tensor",
    "Plan",
    "Tensor",
    "Tensor",
    "tuple[Tensor, Tensor]",
    "int",
    "int",
]


def test_types_of_public_functions(tmp_path):
    (tmp_path / "users_file.py").write_text(USERS_FILE)
    # With the settings of `scripts/check`, whose cache makes this quick.
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *settings, "users_file.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    revealed = re.findall(r'Revealed type is "(.*)"', result.stdout)
    assert [re.sub(r"[\w.]+\.(?=\w)", "", item) for item in revealed] == TYPES, result.stdout + result.stderr
    errors = re.findall(r"error: .*\[(.*)\]", result.stdout)
    assert errors == ["type-var", "call-arg"], result.stdout


@pytest.mark.exhaustive
def test_wheel_in_an_empty_environment(wheel, tmp_path):
    """It installs with its dependencies, without extras; commands, planning and the demo run from another folder."""
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    constraints = tmp_path / "constraints.txt"
    shutil.copy(ROOT / "constraints.txt", constraints)
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", constraints, wheel]
    subprocess.run(install, check=True, cwd=tmp_path)

    def run(*command):
        result = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    undertow_command = tmp_path / "empty" / "bin" / "undertow"
    assert run(undertow_command, "--version") == f"undertow {undertow.__version__}\n"
    assert "resnet50" in run(undertow_command, "models") and "fast here" in run(undertow_command, "doctor")
    assert "peak" in run(undertow_command, "plan", "lenet5", "--batch", "8", "--budget", "4MiB")
    found = run(python, "-c", "import undertow; print(undertow.__file__)")
    assert str(tmp_path / "empty") in found
    run(python, "-m", "undertow.demo")
