"""How small do LeNet-300-100 and LeNet-5 get on MNIST, and what does that cost?

Trains each network, compresses it, and reads the test data once at the end. Published (Deep Compression, Han, Mao &
Dally 2016): 40 times at 1.58 % error (dense 1.64 %) and 39 times at 0.74 % (dense 0.80 %). `--losses` gives the curve
beyond: percentage points of accuracy that may be lost. DATA is the folder of the four idx files.
Usage: scripts/bench small_lenets DATA [--networks lenet300 lenet5] [--seeds 5] [--losses 0.1 0.5 1] [--out F]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe_machine

TRAINING = ["--validation", "0.08", "--optimizer", "adamw", "--lr", "0.001", "--schedule", "cosine", "--batch", "100"]
TRAINING += ["--weight-decay", "0.02", "--label-smoothing", "0.05", "--numerics", "fast"]
DENSE_EPOCHS = {"lenet300": 20, "lenet5": 15}
# Dense error at most, and how many times smaller at least.
AIMS = {"lenet300": (1.64, 60.0), "lenet5": (0.80, 108.0)}


def call(*words: str) -> dict[str, Any]:
    """The object that a command of Undertow prints; an accuracy that could not be kept is a result too."""
    run = subprocess.run([sys.executable, "-m", "undertow", *words, "--json"], stdout=subprocess.PIPE, text=True)
    if run.returncode not in (0, 1):
        raise SystemExit(f"undertow {' '.join(words)} ended with {run.returncode}")
    return json.loads(run.stdout)


def measure(network: str, seed: int, loss: float, options: argparse.Namespace) -> dict[str, Any]:
    """Train, if that is not done yet, and compress."""
    folder = Path(options.work) / f"{network}-{seed}"
    if not folder.exists():
        epochs = str(DENSE_EPOCHS[network])
        words = ["--data", options.data, "--seed", str(seed), "--epochs", epochs, "--out", str(folder)]
        call("train", network, *words, *TRAINING)
    start = time.perf_counter()
    asked = ["--max-loss", str(loss), "--epochs", str(options.epochs), "--lr", "0.002", "--numerics", "fast"]
    found = call("compress", str(folder), "--out", f"{folder}-{loss:g}.utz", *asked)
    accuracy = found["accuracy"]
    return {
        "network": network,
        "seed": seed,
        "max_loss": loss,
        "bytes": found["bytes"],
        "ratio": found["ratio"],
        "dense_error": 100 - accuracy["dense_test"],
        "error": 100 - accuracy["test"],
        "is_accuracy_kept": found["is_accuracy_kept"],
        "rounds": len(found["history"]),
        "seconds": time.perf_counter() - start,
    }


def summarise(rows: list[dict[str, Any]]) -> str:
    """A line for all seeds of one network at one loss."""
    network, loss = rows[0]["network"], rows[0]["max_loss"]
    shown = []
    for name, digits in (("ratio", 1), ("dense_error", 2), ("error", 2)):
        values = [row[name] for row in rows]
        spread = f" +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        shown.append(f"{name} {statistics.mean(values):.{digits}f}{spread}")
    dense_error, ratio = AIMS[network]
    aim = f"aim: {ratio:g} times, dense error at most {dense_error} %"
    return f"{network}, {loss:g} points, {len(rows)} seeds: {', '.join(shown)} ({aim})"


def main() -> None:
    """Measure everything that was asked for; the file is written after each network."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--networks", nargs="+", default=list(AIMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--losses", nargs="+", type=float, default=[0.1])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--work", default="runs/small_lenets")
    parser.add_argument("--out", default="benchmarks/results/small_lenets.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for network in options.networks:
        for loss in options.losses:
            found = []
            for seed in range(options.seeds):
                found.append(measure(network, seed, loss, options))
                print(json.dumps(found[-1]), flush=True)
                text = json.dumps({"machine": describe_machine(), "rows": [*rows, *found]}, indent=1)
                Path(options.out).write_text(text + "\n")
            rows += found
            print(summarise(found), flush=True)


if __name__ == "__main__":
    main()
