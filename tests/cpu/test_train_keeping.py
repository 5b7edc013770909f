"""Which weights a run keeps, by which data it judges epochs, and when it stops."""

import json
from pathlib import Path

import numpy
import pytest
import torch
from training_commands import refuse, run, users_folder

from undertow.cli.workloads import load_workload
from undertow.hashing import hash_tensors
from undertow.train.config import TrainConfig
from undertow.train.folder import RunFolder

MODELS = """
from torch import nn
def make():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
"""
TRAIN = ["train", "models.py:make", "--data", "data.npz", "--json", "--seed", "1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(MODELS)
    draw = numpy.random.default_rng(0)
    x = draw.standard_normal((80, 8)).astype("float32")
    y = draw.integers(0, 3, 80)  # nothing to learn: every model overfits at once
    numpy.savez(tmp_path / "data.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    with users_folder(tmp_path, monkeypatch):
        yield tmp_path


def train(capsys, *words):
    code, out, err = run(capsys, *TRAIN, *words)
    assert code == 0, err
    return json.loads(out)


def losses_of(name, kind):
    return [item["loss"] for item in RunFolder(Path(name)).read_metrics() if item["kind"] == kind]


OVERFITTING = ("--optimizer", "adam", "--lr", "0.03", "--epochs", "12")


@pytest.mark.parametrize("words, kind", [((), "test"), (("--validation", "0.25"), "validation")])
def test_the_best_weights_are_those_of_the_lowest_loss(capsys, words, kind):
    result = train(capsys, *OVERFITTING, *words, "--patience", "3", "--keep", "99", "--out", "a")
    losses = losses_of("a", kind)
    best = losses.index(min(losses))
    assert result["best_epoch"] == best < len(losses) - 1
    assert result["stopped"] == f"no lower {kind} loss" and len(losses) == best + 1 + 3 < 12
    folder = RunFolder(Path("a"))
    kept = {epoch: folder.read_trained(False, epoch).weights() for epoch in range(1, len(losses) + 1)}
    assert hash_tensors(folder.read_best().weights()) == hash_tensors(kept[best + 1])
    assert hash_tensors(folder.read_checkpoint().weights()) == hash_tensors(kept[len(losses)])
    found = [json.loads(run(capsys, "evaluate", "a", "--json", *more)[1]) for more in ((), ("--last",))]
    assert found[0] == json.loads(run(capsys, "evaluate", "a", "--json", "--epoch", str(best + 1))[1])
    assert found[0] != found[1]
    if kind == "validation":
        # Test data is read once, at the end, with the best weights.
        assert losses_of("a", "test") == [found[0]["test_loss"]] == [result["test_loss"]]
    for words, weights in (((), kept[best + 1]), (("--last",), kept[len(losses)])):
        out = json.loads(run(capsys, "export", "a", "w.safetensors", "--json", *words)[1])
        assert out["weights_sha256"] == hash_tensors(weights)


def test_a_resumed_run_keeps_the_same_best(capsys):
    words = (*OVERFITTING, "--validation", "0.25", "--ema", "0.8", "--schedule", "plateau", "--gradient-norm")
    whole = train(capsys, *words, "--schedule-args", "patience=2", "--out", "whole")
    train(capsys, *words, "--schedule-args", "patience=2", "--out", "parts", "--max-steps", "19")
    code, out, err = run(capsys, "train", "--resume", "parts", "--json", "--max-steps", "1000")
    assert code == 0, err
    resumed = json.loads(out)
    for name in ("weights_sha256", "best_loss", "best_epoch", "test_loss", "validation_loss", "steps"):
        assert resumed[name] == whole[name], name
    bests = [RunFolder(Path(name)).read_best().weights() for name in ("whole", "parts")]
    assert hash_tensors(bests[0]) == hash_tensors(bests[1])
    records = [
        [item for item in RunFolder(Path(name)).read_metrics() if item["kind"] == "train"]
        for name in ("whole", "parts")
    ]
    assert records[0] == records[1] and all(item["gradient_norm"] > 0 for item in records[0])
    rates = {item["lr"] for item in records[0]}
    assert max(rates) == 0.03 and min(rates) < 0.0031  # the loss does not fall, so the rate does


def test_keep_deletes_what_is_older(capsys):
    train(capsys, "--epochs", "5", "--keep", "2", "--out", "a")
    assert sorted(path.name for path in Path("a").glob("epoch-*")) == ["epoch-4.safetensors", "epoch-5.safetensors"]
    refuse(capsys, 2, "the checkpoint of epoch 3 is not kept (there are 4, 5)", "evaluate", "a", "--epoch", "3")
    refuse(capsys, 2, "one of the run's own checkpoints", "export", "a", "a/best.safetensors")


def test_until_the_loss_is_low_enough(capsys):
    result = train(capsys, *OVERFITTING, "--epochs", "200", "--until-loss", "0.5", "--out", "a")
    records = RunFolder(Path("a")).read_metrics()
    means = [item["train_loss"] for item in records if item["kind"] == "test"]
    assert result["stopped"] == "the loss is low enough"
    assert means[-1] <= 0.5 < min(means[:-1])


def test_a_batch_of_all_is_the_gradient_of_the_whole_set(capsys):
    train(capsys, "--batch", "all", "--epochs", "1", "--lr", "0.5", "--momentum", "0", "--out", "a")
    config = TrainConfig("models.py:make", data="data.npz", seed=1, batch="all")
    workload = load_workload(config)
    (x, y), model = next(iter(workload.train_loader)), workload.model.double()
    assert len(x) == 60
    torch.nn.functional.cross_entropy(model(x.double()), y).backward()
    found = RunFolder(Path("a")).read_checkpoint().weights()
    for name, parameter in model.named_parameters():
        step = (parameter.detach() - found[name].double()) / 0.5
        # float32: weights of at most 1 round by 2^-25 each, twice divided by the rate; sums of 60 rows.
        assert torch.allclose(step, parameter.grad, atol=60 * 2**-24)
    assert len([item for item in RunFolder(Path("a")).read_metrics() if item["kind"] == "train"]) == 1
