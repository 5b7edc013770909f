"""`undertow train` called as from a shell, for the tests of training runs."""

from __future__ import annotations

import contextlib
import json
import sys

import torch

from undertow.cli import main

PLAN = ["train", "models.py:make", "--data", "data.npz", "--batch", "16", "--epochs", "3", "--seed", "7"]


def run(capsys, *words):
    """Exit code, output and errors of one call."""
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def train(capsys, *words):
    """The object that a run of PLAN prints."""
    code, out, err = run(capsys, *PLAN, "--json", *words)
    assert code == 0, err
    return json.loads(out)


def refuse(capsys, code, message, *words):
    """Exactly one line, with this in it, and this exit code."""
    found, out, err = run(capsys, *words)
    lines = [line for line in err.splitlines() if line.startswith("undertow: ")]
    assert (found, out, len(lines)) == (code, "", 1), err
    assert message in lines[0]
    assert "Traceback" not in err


@contextlib.contextmanager
def users_folder(path, monkeypatch):
    """Inside, commands run in this folder; afterwards its modules are forgotten, and the generator is as before."""
    monkeypatch.chdir(path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    with torch.random.fork_rng(devices=[]):
        yield path
    for name in set(sys.modules) - known:
        if str(path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
