"""Sessions on a GPU as a user has them, by the command line alone: trained, resumed, evaluated, reported.

In: nothing for ResNet-50 and GPT-2 small, whose data is made up; the folder of CIFAR-10 for the recipe of
`docs/training.md`. Out: for each the commands, their seconds and exit codes, and what the run says of itself. A run is
trained in two parts, and once in one: both must end in the same weights where the kernels repeat themselves.

Usage: scripts/bench gpu_session resnet50|gpt2 [--steps N] [--out F]
       scripts/bench gpu_session cifar DATA [--out F]
       SMOKE=1 scripts/bench gpu_session resnet50 --steps 6          small networks, also without a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_training import BATCH, DEVICE, make_gpt2, make_loader, make_resnet50
from machine import describe_machine

__all__ = ["make_gpt2", "make_resnet50"]
NUM_EPOCH_STEPS = 10_000  # more than are taken
OPTIMIZERS = {"resnet50": ["--lr", "0.01"], "gpt2": ["--optimizer", "adamw", "--lr", "1e-4"]}
CIFAR = [
    *("resnet18_small", "--numerics", "bf16", "--batch", "512", "--epochs", "50", "--workers", "8"),
    *("--lr", "0.2", "--nesterov", "--weight-decay", "5e-4", "--schedule", "cosine", "--warmup", "485"),
    *("--label-smoothing", "0.1", "--augment", "crop,flip"),
]


def resnet50_loaders() -> Any:
    """For `undertow train`."""
    return make_loader("resnet50", NUM_EPOCH_STEPS), make_loader("resnet50", 4)


def gpt2_loaders() -> Any:
    """For `undertow train`."""
    return make_loader("gpt2", NUM_EPOCH_STEPS), make_loader("gpt2", 4)


def call(words: list[str]) -> dict[str, Any]:
    """One command, with what it printed as JSON."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "undertow", *words, "--json"], capture_output=True, text=True)
    found = {"command": " ".join(words), "seconds": round(time.perf_counter() - start, 1), "exit_code": done.returncode}
    if done.returncode:
        return found | {"error": done.stderr.strip()[-400:]}
    printed = json.loads(done.stdout)
    names = ("test_loss", "test_accuracy", "steps", "weights_sha256", "predicted_peak_bytes", "measured_peak_bytes")
    return found | {name: printed[name] for name in names if printed.get(name) is not None}


def run_session(name: str, num_steps: int, folder: Path) -> list[dict[str, Any]]:
    """Half of the steps, the other half by a resume, evaluated and reported; and all steps at once."""
    words = ["train", f"{__file__}:make_{name}", "--data", f"{__file__}:{name}_loaders", "--epochs", "1"]
    words += ["--device", DEVICE, "--numerics", "bf16", *OPTIMIZERS[name]]
    parts, whole = str(folder / "parts"), str(folder / "whole")
    return [
        call([*words, "--max-steps", str(num_steps // 2), "--out", parts]),
        call(["train", "--resume", parts, "--max-steps", str(num_steps)]),
        call(["evaluate", parts]),
        call(["report", parts]),
        call([*words, "--max-steps", str(num_steps), "--out", whole]),
    ]


def main() -> None:
    """One session."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[*OPTIMIZERS, "cifar"])
    parser.add_argument("data", nargs="?", default="")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", default="benchmarks/results/gpu_session.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if options.name == "cifar":
            words = ["train", *CIFAR, "--data", options.data, "--device", DEVICE, "--out", str(folder / "run")]
            found = [call(words), call(["evaluate", str(folder / "run"), "--data", options.data])]
        else:
            found = run_session(options.name, options.steps, folder)
    for item in found:
        print(json.dumps(item), flush=True)
    hashes = [item["weights_sha256"] for item in found[1::3] if "weights_sha256" in item]
    gpu = {"gpu": torch.cuda.get_device_name()} if DEVICE == "cuda" else {}
    out = Path(options.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    results[options.name] = {
        "machine": describe_machine() | gpu | {"batch": BATCH, "smoke": os.environ.get("SMOKE") == "1"},
        "commands": found,
        "same_weights": len(hashes) == 2 and hashes[0] == hashes[1],
    }
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
