"""Does training with other kernels reach the same accuracy? LeNet-5 on MNIST, exact (eager's bits) and fast.

DATA is the folder of the four idx files. Usage: scripts/bench accuracy DATA [--seeds 5] [--epochs 3] [--out F]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe_machine

SETTINGS = ["--batch", "64", "--lr", "0.02", "--momentum", "0.9", "--weight-decay", "5e-4", "--schedule", "cosine"]


def train(data: str, numerics: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train once; returns the object that `undertow train --json` prints."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "undertow", "train", "lenet5", "--data", data, "--numerics", numerics]
        words += ["--seed", str(seed), "--epochs", str(epochs), "--out", f"{folder}/run", "--json", *SETTINGS]
        return json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    """Train with every seed in both numerics, then print both spreads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="benchmarks/results/accuracy.json")
    options = parser.parse_args()
    found: dict[str, list[float]] = {"exact": [], "fast": []}
    for seed in range(options.seeds):
        hashes = set()
        for numerics, accuracies in found.items():
            result = train(options.data, numerics, seed, options.epochs)
            accuracies.append(result["test_accuracy"])
            hashes.add(result["weights_sha256"])
            print(f"seed {seed} {numerics:5} {100 * result['test_accuracy']:.2f} %", flush=True)
        if len(hashes) == 1:
            print(f"seed {seed}: the same weights both ways; fast chose eager's kernels", flush=True)
    for numerics, accuracies in found.items():
        percent = [100 * item for item in accuracies]
        mean, spread = statistics.mean(percent), statistics.stdev(percent)
        print(f"{numerics:5} {mean:.2f} % +- {spread:.2f} ({min(percent):.2f} to {max(percent):.2f})")
    results = {"machine": describe_machine(), "epochs": options.epochs, "test_accuracy": found}
    Path(options.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
