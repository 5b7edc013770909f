"""`undertow train --parallel stages=2`: one process's bits, through a kill, a restart and other meshes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from training_commands import users_folder

from undertow.hashing import hash_tensors
from undertow.train.folder import RunFolder

MODELS = """
import os
import signal
from torch import nn

def make():
    hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3))]
    return nn.Sequential(nn.Linear(8, 32), *hidden, nn.Linear(32, 3))

def on_step(record):
    if record["step"] == 9 and os.environ.get("KILL_ONCE") and not os.path.exists("was_killed"):
        open("was_killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""
RUN = ["train", "models.py:make", "--data", "data.npz", "--batch", "12", "--shards", "4", "--seed", "1"]
RUN += ["--threads", "1", "--device", "cpu", "--optimizer", "adamw", "--clip-norm", "1", "--lost-after", "20"]
RUN += ["--epochs", "3", "--validation", "0.25", "--save-every", "2", "--callbacks", "models.py"]


@pytest.fixture
def inside(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(MODELS)
    draw = numpy.random.default_rng(0)
    x, y = draw.standard_normal((100, 8)).astype("float32"), draw.integers(0, 3, 100)
    numpy.savez(tmp_path / "data.npz", x_train=x[:80], y_train=y[:80], x_test=x[80:], y_test=y[80:])
    with users_folder(tmp_path, monkeypatch):
        yield tmp_path


def call(*words, code=0, **environment):
    command = [sys.executable, "-m", "undertow", *words]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | environment | {"COLUMNS": "200"}
    )
    assert result.returncode == code, result.stderr
    return result


def state_of(name):
    """What a run has come to."""
    checkpoint = RunFolder(Path(name)).read_checkpoint()
    tensors = {key: item for key, item in checkpoint.tensors.items() if not key.startswith("generator/")}
    progress = checkpoint.progress
    return hash_tensors(tensors), progress.step, progress.epoch, progress.best_loss


def test_a_run_in_stages_is_killed_and_goes_on_with_other_meshes(inside):
    call(*RUN, "--out", "one")
    start = time.monotonic()
    killed = call(*RUN, "--out", "moved", "--parallel", "stages=2", "--max-steps", "12", code=6, KILL_ONCE="1")
    assert time.monotonic() - start < 100
    assert Path("was_killed").exists()  # the fault fired
    assert "rank 0 was killed by SIGKILL" in killed.stderr
    more = ["--stage-schedule", "gpipe"]
    call("train", "--resume", "moved", "--parallel", "data=2,stages=2", "--max-steps", "12", *more)
    assert len(list(Path("moved").glob("part-*"))) == 4
    call("train", "--resume", "moved", "--parallel", "data=1", "--max-steps", "1000")
    assert state_of("moved")[:3] == state_of("one")[:3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parallel", "stages=2"], "no shards are given"),
        (["--parallel", "data=8,stages=2", "--shards", "4"], "4 shards cannot be divided over 8 ranks"),
        (["--parallel", "stages=2", "--shards", "4", "--ema", "0.9"], "ema averages all weights"),
        (["--parallel", "layers=2", "--shards", "4"], "parallel is written as data=4 or stages=4 or hogwild=4"),
        (
            ["--parallel", "stages=2", "--shards", "4", "--stage-schedule", "dfs"],
            "can be gpipe, 1f1b, interleaved, zero-bubble",
        ),
    ],
)
def test_refusals(inside, words, message):
    found = call("train", "models.py:make", "--data", "data.npz", "--batch", "12", *words, code=2)
    assert message in found.stderr
