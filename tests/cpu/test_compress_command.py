"""`undertow compress` and what the other commands do with its file, as from a shell."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time

import numpy
import pytest
import torch
from PIL import Image
from training_commands import refuse, run, users_folder

from undertow.coding.small_file import open_small_file, write_small_file
from undertow.train.weights import read_tensors, write_tensors

MODELS = """
from torch import nn


def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def other():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 31), nn.ReLU(), nn.Linear(31, 10))


def broken():
    model = make()
    model[1].weight.data[0, 0] = float("nan")
    return model
"""
DENSE = ["train", "models.py:make", "--data", "digits", "--epochs", "3", "--lr", "0.1", "--validation", "0.2"]
SMALL = ["compress", "dense", "--max-loss", "3", "--epochs", "1", "--lr", "0.003", "--out"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a dense run and its small network, both made by commands in a process of their own."""
    path = tmp_path_factory.mktemp("small")
    (path / "models.py").write_text(MODELS)
    for words in ([*DENSE, "--out", "dense"], [*SMALL, "net.utz"]):
        subprocess.run([sys.executable, "-m", "undertow", *words], cwd=path, check=True, capture_output=True)
    return path


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    with users_folder(folder, monkeypatch):
        yield


def find_number(text, before):
    """The number that follows some words."""
    return float(text.partition(before)[2].split()[0].rstrip("%,"))


def test_the_file_is_small_and_the_state_is_gone(folder, capsys):
    code, out, err = run(capsys, "inspect", "net.utz", "--json")
    found = json.loads(out)
    assert code == 0, err
    assert found["bytes"] == os.path.getsize("net.utz")
    assert found["float32_bytes"] == 4 * (64 * 32 + 32 + 320 + 10)
    assert found["ratio"] == found["float32_bytes"] / found["bytes"] > 8
    assert not os.path.exists("net.utz.part")


def test_evaluate_predict_and_export_agree_with_the_exported_weights(folder, capsys):
    code, out, err = run(capsys, "evaluate", "net.utz", "--data", "digits", "--model", "models.py:make", "--json")
    assert code == 0, err
    accuracy = json.loads(out)["test_accuracy"]
    assert accuracy > 0.8
    assert run(capsys, "export", "net.utz", "out.safetensors")[0] == 0
    weights, _ = read_tensors(folder / "out.safetensors")
    file = open_small_file(folder / "net.utz")
    assert all(torch.equal(file.read(name).dense(), item) for name, item in weights.items())
    # The exported weights, run by a model that reads them as the start of a training of no step.
    words = ["train", "models.py:make", "--data", "digits", "--init", "out.safetensors", "--validation", "0.2"]
    code, out, err = run(capsys, *words, "--lr", "0", "--epochs", "1", "--out", "again", "--json")
    assert code == 0 and json.loads(out)["test_accuracy"] == accuracy, err
    Image.fromarray((numpy.eye(8) * 255).astype("uint8")).save("image.png")
    code, out, err = run(capsys, "predict", "net.utz", "image.png", "--model", "models.py:make", "--top", "3", "--json")
    assert code == 0 and len(json.loads(out)[0]["classes"]) == 3, err


def test_the_table_and_the_page(folder, capsys):
    code, out, _ = run(capsys, "inspect", "net.utz", "--html", "net.html")
    assert code == 0 and "1.weight" in out and "times less than" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    page = (folder / "net.html").read_text()
    assert page.count("<article>") == 4 and "1.weight" in page and "script-src 'none'" in page
    refuse(capsys, 2, "--html is for a .utz file", "inspect", "models.py:make", "--html", "x.html")


def test_huffman_gives_the_same_network_in_more_bytes(folder, capsys):
    code, _, err = run(capsys, *SMALL, "huffman.utz", "--coder", "huffman")
    assert code == 0, err
    first, second = open_small_file(folder / "net.utz"), open_small_file(folder / "huffman.utz")
    assert second.num_bytes > first.num_bytes
    assert all(torch.equal(first.read(name).dense(), second.read(name).dense()) for name in first)


def test_a_model_with_weights_is_compressed_like_a_run(folder, capsys):
    run(capsys, "export", "dense", "dense.safetensors")
    words = ["compress", "models.py:make", "--weights", "dense.safetensors", "--data", "digits", "--max-loss", "3"]
    code, _, err = run(capsys, *words, "--epochs", "1", "--lr", "0.003", "--out", "weights.utz")
    assert code == 0, err
    assert os.path.getsize("weights.utz") < 2500
    refuse(capsys, 2, "which data to retrain on", *words[:4], "--out", "x.utz")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive)])
def test_a_stopped_command_goes_on_to_the_same_bytes(folder, number):
    words = [sys.executable, "-m", "undertow", *SMALL, f"stopped{number}.utz"]
    state = folder / f"stopped{number}.utz.part"
    process = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True)
    while not state.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130}.get(number, -number), err
    assert state.exists() and not (folder / f"stopped{number}.utz").exists()
    if number != signal.SIGKILL:
        assert "the same command goes on from" in err
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "going on after round" in done.stderr, done.stderr
    assert (folder / f"stopped{number}.utz").read_bytes() == (folder / "net.utz").read_bytes()
    assert not state.exists()


def test_a_full_disk_is_said_in_one_line_and_loses_nothing(folder, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        code, out, err = run(capsys, *SMALL, "full.utz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert (code, out) == (5, "") and "full.utz.part cannot be written: File too large" in err
    assert "Traceback" not in err and not os.path.exists("full.utz")
    assert run(capsys, *SMALL, "full.utz")[0] == 0
    assert (folder / "full.utz").read_bytes() == (folder / "net.utz").read_bytes()


def test_wrong_calls_are_refused_before_any_work(folder, capsys):
    refuse(capsys, 2, "a name that ends in .utz", "compress", "dense", "--out", "net.bin")
    refuse(capsys, 5, "--out nowhere/net.utz cannot be written", "compress", "dense", "--out", "nowhere/net.utz")
    refuse(capsys, 2, "is no folder of a run", "compress", "nothing", "--out", "x.utz")
    refuse(capsys, 2, "max_loss must be 0 or more", "compress", "dense", "--max-loss", "-1", "--out", "x.utz")
    refuse(capsys, 2, "coder must be one of", "compress", "dense", "--coder", "zip", "--out", "x.utz")
    refuse(capsys, 3, "there is no data", "compress", "dense", "--data", "nothing", "--out", "x.utz")
    run(capsys, "export", "dense", "dense.safetensors")
    weights, _ = read_tensors(folder / "dense.safetensors")
    weights["1.weight"][0, 0] = torch.nan
    write_tensors(folder / "nan.safetensors", weights, {})
    words = ["compress", "models.py:make", "--weights", "nan.safetensors", "--data", "digits", "--out", "x.utz"]
    refuse(capsys, 4, "1.weight holds numbers that are infinite or not a number", *words)
    refuse(capsys, 3, "not this model's", "compress", "models.py:other", *words[2:3], "dense.safetensors", *words[4:])
    assert not os.path.exists("x.utz") and not os.path.exists("x.utz.part")


def test_runs_whose_data_cannot_judge_are_refused(folder, capsys):
    (folder / "loaders.py").write_text(
        "import torch\n\n\ndef batches(num):\n    inputs = torch.randn(num, 8, 1, 8, 8)\n"
        "    return [(part, part.flatten(1)[:, :10].argmax(1)) for part in inputs]\n\n\n"
        "def two():\n    return batches(4), batches(2)\n\n\n"
        "def untested():\n    return batches(4), batches(2), []\n"
    )
    refuse(capsys, 2, "makes no validation loader", "compress", "dense", "--data", "loaders.py:two", "--out", "x.utz")
    refuse(capsys, 3, "has no test data", "compress", "dense", "--data", "loaders.py:untested", "--out", "x.utz")


def test_files_that_do_not_fit_or_name_code_are_refused(folder, capsys):
    evaluate = ["evaluate", "net.utz", "--data", "digits"]
    refuse(capsys, 2, "names the code 'models.py:make', which is not run on a file's word", *evaluate)
    refuse(capsys, 3, "not this model's: 1.weight is", *evaluate, "--model", "models.py:other")
    refuse(capsys, 2, "say on which data to evaluate it", "evaluate", "net.utz", "--model", "models.py:make")
    refuse(capsys, 2, "--last and --epoch are for runs", *evaluate, "--last")
    refuse(capsys, 2, "--model is for a .utz file", "evaluate", "dense", "--model", "models.py:make")
    refuse(capsys, 3, "cannot be read", "inspect", "nothing.utz")
    (folder / "cut.utz").write_bytes((folder / "net.utz").read_bytes()[:-1])
    refuse(capsys, 3, "is damaged or cut off", "inspect", "cut.utz")
    for place, metadata in enumerate(
        (
            {"model": "lenet5", "classes": -1},
            {"model": "lenet5", "classes": 1e300},
            {"model": "lenet5", "preparation": {"shape": "no"}},
            {"model": "lenet5", "preparation": {"dtype": "no"}},
            {"model": "lenet5", "columns": 7},
        )
    ):
        write_small_file(folder / f"odd{place}.utz", {"x": torch.zeros(1)}, metadata)
        code, out, err = run(capsys, "evaluate", f"odd{place}.utz", "--data", "digits")
        assert code in (2, 3) and out == "" and "Traceback" not in err, err
