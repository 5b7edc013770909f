"""LeNet-5 on MNIST in floats and in single bits: test accuracy, bytes of the file, and evaluation from packed bits.

DATA is the folder of the four idx files. Both networks are trained by `ut.train_step` on the same batches, shifted by
up to two pixels; the last weights are tested, once. Usage: scripts/bench single_bits DATA [--seeds 5] [--epochs 20]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from binary_networks import accuracy, lenet5
from machine import describe_machine
from torch.nn import functional

import undertow as ut
from undertow.coding.small_file import open_small_file, write_small_file
from undertow.data.idx import open_idx_folder
from undertow.small.quantising import code_model
from undertow.small.running import run_small

_BATCH = 100
_RATE = 4e-3
_MAX_SHIFT = 2


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Images with mean 0 and deviation 1, and labels."""
    source = open_idx_folder(folder, None)
    assert source.test is not None
    found = {}
    for part, examples in (("train", source.train), ("test", source.test)):
        images, labels = examples.inputs, examples.targets
        found[part], found[f"{part}_labels"] = (images.float() / 255 - 0.1307) / 0.3081, labels.long()
    return found


def train(data: dict[str, torch.Tensor], is_binary: bool, seed: int, epochs: int) -> tuple[torch.nn.Module, float]:
    """The trained network, and the seconds it took."""
    torch.manual_seed(seed)
    model = lenet5(is_binary)
    optimizer = torch.optim.Adam(model.parameters(), _RATE)
    example, wanted = data["train"][:_BATCH].clone(), data["train_labels"][:_BATCH]
    step = ut.train_step(
        model, (example,), targets=(wanted,), loss=functional.cross_entropy, optimizer=optimizer, numerics="fast"
    )
    generator = torch.Generator().manual_seed(seed)
    num_steps, began = epochs * (len(data["train"]) // _BATCH), time.perf_counter()
    number = 0
    for epoch in range(epochs):
        order = torch.randperm(len(data["train"]), generator=generator)
        for places in order.split(_BATCH):
            optimizer.param_groups[0]["lr"] = _RATE * 0.5 * (1 + math.cos(math.pi * number / num_steps))
            shift = torch.randint(-_MAX_SHIFT, _MAX_SHIFT + 1, (2,), generator=generator).tolist()
            images = torch.roll(data["train"][places], shift, (2, 3))
            step(images, data["train_labels"][places])
            number += 1
        print(f"  epoch {epoch + 1} of {epochs}: {time.perf_counter() - began:.0f} s", flush=True)
    return model.eval(), time.perf_counter() - began


def evaluate(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Accuracy, the file, and the same from the file in its small form."""
    images, labels = data["test"], data["test_labels"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.utz"
        num_bytes = write_small_file(path, code_model(model), {})
        tensors = open_small_file(path).read_all()
    small = run_small(model, tensors, (images[:_BATCH],), prefer="memory")
    with torch.no_grad():
        same = all(torch.equal(small(part), model(part)) for part in images.split(_BATCH))
    return {
        "test_accuracy": accuracy(model, images, labels),
        "small_accuracy": accuracy(small, images, labels),
        "same_bits": same,
        "file_bytes": num_bytes,
        "float_bytes": sum(tensor.nbytes for tensor in model.state_dict().values()),
        "forms": {choice.name: choice.form for choice in small.choices},
    }


def main() -> None:
    """Train both networks with every seed, print a line each, and the spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--kinds", default="float,binary")
    parser.add_argument("--out", default="benchmarks/results/single_bits.json")
    options = parser.parse_args()
    data = read(options.data)
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.kinds.split(",")}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for kind, found in results.items():
            model, seconds = train(data, kind == "binary", seed, options.epochs)
            found.append({"seed": seed, "train_s": round(seconds), **evaluate(model, data)})
            print(f"seed {seed} {kind:6} {found[-1]}", flush=True)
            record = {"machine": describe_machine(), "epochs": options.epochs, **results}
            Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
    for kind, found in results.items():
        percent = [100 * one["test_accuracy"] for one in found]
        spread = statistics.stdev(percent) if len(percent) > 1 else 0.0
        print(f"{kind:6} {statistics.mean(percent):.2f} % +- {spread:.2f} ({min(percent):.2f} to {max(percent):.2f})")


if __name__ == "__main__":
    main()
