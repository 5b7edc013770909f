"""`scripts/setup` notices that another `pip install` has replaced a version, and puts it back."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Checkout:
    """A copy of the scripts with an environment of empty folders, whose `pip` only writes down how it was called."""

    def __init__(self, folder, environment):
        self.folder, self.environment = folder, folder / environment
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "setup", folder / "scripts")
        (folder / "pyproject.toml").write_text("")
        (folder / "constraints.txt").write_text("Jinja2==3.1.6\nhf-xet==1.8.0\ntorch==2.13.0\n")
        self.packages = self.environment / "lib" / "python3.11" / "site-packages"
        self.packages.mkdir(parents=True)
        self.calls = folder / "calls"
        binaries = self.environment / "bin"
        binaries.mkdir()
        python = binaries / "python"
        python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && echo "$*" >>{self.calls} && exit\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        (binaries / "pip").write_text(f"#!{python.resolve()}\n")

    def install(self, *names):
        for old in self.packages.iterdir():
            old.rmdir()
        for name in names:
            (self.packages / f"{name}.dist-info").mkdir()

    def set_up(self, *words):
        """What the script says, and how often it has called pip."""
        result = subprocess.run([self.folder / "scripts" / "setup", *words], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stderr, len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path, ".venv")


def test_a_replaced_version_is_put_back(checkout):
    message, count = checkout.set_up()
    assert message.startswith("Installing into .venv ") and count == 1
    checkout.install("torch-2.13.0+cpu", "jinja2-3.1.6", "hf_xet-1.8.0", "timm-1.0.0")
    assert checkout.set_up() == ("", 1), "all is as it should be"
    checkout.install("torch-2.15.0", "jinja2-3.1.6", "hf_xet-1.9.0", "timm-1.0.0")
    message, count = checkout.set_up()
    assert count == 2 and message.count("\n") == 1
    assert "torch 2.15.0 (wanted: 2.13.0)" in message and "hf_xet 1.9.0 (wanted: 1.8.0)" in message
    assert "jinja2" not in message and "timm" not in message


def test_another_version_of_torch_has_an_environment_of_its_own(tmp_path):
    checkout = Checkout(tmp_path, ".venv-torch-2.15.0")
    assert checkout.set_up("test", "2.15.0")[1] == 1
    assert "torch==2.15.0\n" in (checkout.environment / "constraints.txt").read_text()
    checkout.install("torch-2.15.0+cu132", "jinja2-3.1.6")
    assert checkout.set_up("test", "2.15.0") == ("", 1)
    checkout.install("torch-2.13.0", "jinja2-3.1.6")
    message, count = checkout.set_up("test", "2.15.0")
    assert count == 2 and "torch 2.13.0 (wanted: 2.15.0)" in message
