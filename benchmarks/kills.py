"""Training runs killed with SIGKILL at random instants: every one, resumed, ends in the same weights.

A small network with BatchNorm and dropout trains on random data. It saves a checkpoint after every step, so that about
half of the time goes into writing them. Each run is killed and resumed until it finishes. Then its weights are compared
with the weights of an undisturbed run. Processes are forked from one that has PyTorch loaded, so a kill costs a second
and not ten. Usage: scripts/bench kills [--kills N] [--seed N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a forked process has none of its parent's threads
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import numpy
import torch  # noqa: F401  loaded before forking
from machine import describe_machine

import undertow.cli.workloads
import undertow.train.run  # noqa: F401
from undertow.cli import main as undertow_main

MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 8))
"""
OPTIONS = ["--data", "data.npz", "--epochs", "3", "--batch", "32", "--save-every", "1", "--seed", "5"]
OPTIONS += ["--optimizer", "adamw", "--schedule", "cosine", "--weight-decay", "0.01"]


def write_inputs() -> None:
    """A model and data in the current folder."""
    Path("model.py").write_text(MODEL)
    draw = numpy.random.default_rng(0)
    x = draw.standard_normal((800, 32)).astype("float32")
    numpy.savez("data.npz", x=x, y=x[:, :8].argmax(1))


def start(folder: str) -> int:
    """Fork a process that starts or resumes the run; returns its id."""
    words = ["--resume", folder] if Path(folder, "config.json").exists() else ["model.py:make", "--out", folder]
    process = os.fork()
    if process:
        return process
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os._exit(undertow_main(["train", *words, *(OPTIONS if words[0] != "--resume" else [])]))


def wait(process: int) -> int:
    """The exit code of a process; negative where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def weights_of(folder: str) -> str:
    """The hash of a finished run's weights."""
    from undertow.hashing import hash_tensors
    from undertow.train.folder import RunFolder

    checkpoint = RunFolder(Path(folder)).read_checkpoint()
    assert checkpoint.progress.stopped == "finished"
    return hash_tensors(checkpoint.weights())


def run(num_kills: int, seed: int) -> dict[str, Any]:
    """Kill runs until `num_kills` kills have hit one."""
    write_inputs()
    began = time.perf_counter()
    assert wait(start("undisturbed")) == 0
    whole_s = time.perf_counter() - began
    expected = weights_of("undisturbed")
    draw = random.Random(seed)
    num_hits = num_writes_hit = num_runs = 0
    wrong: list[str] = []
    while num_hits < num_kills:
        folder = f"run-{num_runs}"
        num_runs += 1
        while True:
            process = start(folder)
            if num_hits < num_kills:
                time.sleep(draw.uniform(0, whole_s))
                os.kill(process, signal.SIGKILL)
            code = wait(process)
            if code == 0:
                break
            if code != -signal.SIGKILL:
                wrong.append(f"{folder}: exit code {code}")
                break
            num_hits += 1
            num_writes_hit += any(Path(folder).glob("*.new"))
        if not wrong and weights_of(folder) != expected:
            wrong.append(f"{folder}: other weights")
        if wrong:
            break
    return {
        "kills": num_hits,
        "kills_during_a_write": num_writes_hit,
        "runs": num_runs,
        "undisturbed_s": round(whole_s, 2),
        "weights_sha256": expected,
        "wrong": wrong,
    }


def main() -> None:
    """Kill and compare; the exit code is 1 if a run ended in other weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = describe_machine()
    home = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        result = run(options.kills, options.seed)
        os.chdir(home)
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine, "result": result}, indent=2) + "\n")
    if result["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
