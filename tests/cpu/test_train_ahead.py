"""Steps that are started before an earlier loss is read, as on a GPU: the same run, told one step late.

The CPU reads every loss at once; here it is made to be one step ahead, so that the order of things can be tested.
"""

import json
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from training_commands import refuse, run, users_folder

from undertow.train import devices
from undertow.train.batches import Batch
from undertow.train.folder import RunFolder
from undertow.train.layout import lay_out_state, try_channels_last, use_channels_last

FILES = """
from pathlib import Path
import torch
from torch import nn

def make(): return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
class Log(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(12, 4)
    def forward(self, x):
        return torch.log(self.body(x) + 8)
def diverging(): return Log()
"""
CALLBACKS = """
from pathlib import Path
def note(line):
    with open("seen", "a") as file:
        file.write(line + "\\n")
def on_step(record):
    note(f"{record['step']} {record['loss']!r}")
    if Path("stop").exists() and record["step"] == 5:
        return True
    if Path("fail").exists() and record["step"] == 5:
        raise KeyError("tracker")
def on_evaluation(record): note(f"{record['kind']} {record['step']}")
"""
WORDS = ["train", "models.py:make", "--data", "data.npz", "--batch", "8", "--epochs", "3", "--seed", "3", "--json"]
OPTIONS = ["--callbacks", "calls.py", "--ema", "0.9", "--clip-norm", "0.5", "--validation", "0.2", "--accumulate", "2"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(FILES)
    (tmp_path / "calls.py").write_text(CALLBACKS)
    x = numpy.random.default_rng(0).standard_normal((120, 12)).astype("float32")
    numpy.savez(tmp_path / "data.npz", x=x, y=x[:, :4].argmax(1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with users_folder(tmp_path, monkeypatch):
        yield tmp_path


@pytest.fixture
def ahead(monkeypatch):
    def choose(num):
        monkeypatch.setitem(devices.NUM_AHEAD, "cpu", num)

    return choose


def finish(capsys, *words):
    code, out, err = run(capsys, *words)
    assert code == 0, err
    return json.loads(out)["weights_sha256"]


def lines_of(name):
    """All records but those of times."""
    return [item for item in RunFolder(Path(name)).read_metrics() if item["kind"] != "speed"]


def seen():
    text = Path("seen").read_text()
    Path("seen").unlink()
    return text


def test_a_run_ahead_is_the_same_run(capsys, ahead):
    more, found = OPTIONS, {}
    for num in (0, 1):
        ahead(num)
        whole = finish(capsys, *WORDS, *more, "--out", f"whole{num}", "--save-every", "3")
        found[num] = whole, lines_of(f"whole{num}"), seen()
    assert found[0] == found[1] and len(found[0][2].splitlines()) > 10
    assert all("gradient_norm" in item for item in found[0][1] if item["kind"] == "train")
    progress = [RunFolder(Path(f"whole{num}")).read_checkpoint().progress for num in (0, 1)]
    for name in ("step", "epoch", "batch", "loss_sum", "last_loss", "epoch_loss", "num_examples", "best_loss"):
        assert getattr(progress[0], name) == getattr(progress[1], name), name
    ahead(1)
    finish(capsys, *WORDS, *more, "--out", "parts", "--max-steps", "5")
    assert finish(capsys, "train", "--resume", "parts", "--max-steps", "1000", "--json") == found[0][0]
    assert [item for item in lines_of("parts") if item["kind"] == "train"] == [
        item for item in found[0][1] if item["kind"] == "train"
    ]


def test_a_loss_that_is_not_finite_is_explained_alike(capsys, ahead):
    messages = []
    words = [*WORDS[:1], "models.py:diverging", *WORDS[2:], "--lr", "2", "--loss", "mse_loss"]
    x = numpy.random.default_rng(0).standard_normal((120, 12)).astype("float32")
    numpy.savez("data.npz", x=x, y=-9 * x[:, :4])
    for num in (0, 1):
        ahead(num)
        code, _, err = run(capsys, *words, "--out", f"a{num}")
        assert code == 4, err
        messages.append(err.splitlines()[-1].replace(f"a{num}/", ""))
    assert messages[0] == messages[1] and "log (" in messages[0]


def test_a_callback_that_fails_loses_nothing(capsys, ahead):
    ahead(1)
    whole = finish(capsys, *WORDS, "--out", "whole")
    Path("fail").touch()
    refuse(capsys, 2, "on_step in calls.py failed: KeyError", *WORDS[:-1], "--callbacks", "calls.py", "--out", "a")
    Path("fail").unlink()
    # The step that had begun is part of the run, with its record.
    assert RunFolder(Path("a")).read_checkpoint().progress.step == 6 and lines_of("a")[-1]["step"] == 6
    assert finish(capsys, "train", "--resume", "a", "--json") == whole
    assert lines_of("a") == lines_of("whole")


@pytest.mark.parametrize("num", [0, 1])
def test_a_callback_ends_the_run_after_the_step_that_has_begun(capsys, ahead, num):
    ahead(num)
    Path("stop").touch()
    code, out, err = run(capsys, *WORDS, "--callbacks", "calls.py", "--out", "a")
    assert code == 0 and json.loads(out)["steps"] == 5 + num, err
    assert [line.split()[0] for line in seen().splitlines()] == [str(step) for step in range(1, 6 + num)]


class Convolving(nn.Module):
    """Its weights in another layout are no matter for `flatten`; `view` needs PyTorch's own."""

    def __init__(self, does_view):
        super().__init__()
        self.convolution, self.norm, self.out = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(144, 2)
        self.does_view = does_view

    def forward(self, x):
        hidden = self.norm(self.convolution(x))
        return self.out(hidden.view(len(x), -1) if self.does_view else hidden.flatten(1))


def test_the_layout_that_convolutions_take_on_a_gpu():
    batch = Batch((torch.randn(2, 3, 8, 8),), {}, ())
    model = Convolving(does_view=False).eval()
    weight, before = model.convolution.weight, model(*batch.args)
    assert try_channels_last(model, batch) is None
    assert model.convolution.weight is weight and weight.is_contiguous(memory_format=torch.channels_last)
    # A sum of 27 products in another order.
    torch.testing.assert_close(model(*batch.args), before, rtol=27 * 2**-23, atol=27 * 2**-23)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(*batch.args).sum().backward()
    optimizer.step()
    state = optimizer.state[weight]
    state["momentum_buffer"] = momentum = state["momentum_buffer"].contiguous()
    lay_out_state(optimizer)
    assert state["momentum_buffer"].stride() == weight.stride() and torch.equal(state["momentum_buffer"], momentum)

    model = Convolving(does_view=True).eval()
    assert "view size is not compatible" in try_channels_last(model, batch)
    assert model.convolution.weight.is_contiguous() and model(*batch.args).shape == (2, 2)
    assert not use_channels_last(nn.Linear(3, 3)) and try_channels_last(nn.Linear(3, 3), batch) == ""
    assert "unexpected keyword" in try_channels_last(model, Batch((), {"y": batch.args[0]}, ()))
    assert model.convolution.weight.is_contiguous()
