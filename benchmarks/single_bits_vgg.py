"""A VGG of 14 M parameters on CIFAR-10 in floats and in single bits: test accuracy, seconds, bytes of the file.

DATA is a folder of CIFAR-10 (see `docs/data.md`). Each network is trained by `ut.train_step`, with crops and flips made
on the device, for a few minutes on a GPU; the last weights are tested, once. Then the binary one is run from its file
by packed bits on the CPU, and compared with its float evaluation there. Figures are written whenever a network is done.

Usage: scripts/bench single_bits_vgg DATA [--seeds N] [--epochs N] [--kinds float,binary] [--out F]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from binary_networks import accuracy, vgg
from machine import describe_machine
from torch.nn import functional

import undertow as ut
from undertow.coding.small_file import open_small_file, write_small_file
from undertow.data.cifar import open_cifar_folder
from undertow.small.quantising import code_model
from undertow.small.running import run_small

_BATCH = 200
_PAD = 4
_COMPARED = 500  # images that are evaluated by packed bits


def make_optimizer(model: torch.nn.Module, is_binary: bool, device: str) -> tuple[torch.optim.Optimizer, float]:
    """SGD as is usual for a VGG; for signs Adam without decay, since a decayed weight changes its sign by noise."""
    rate = 2e-3 if is_binary else 0.05
    # A CUDA graph reads the rate where it lies.
    held: Any = torch.tensor(rate, device=device) if device == "cuda" else rate
    fused: dict[str, Any] = {"fused": True} if device == "cuda" else {}
    if is_binary:
        capturable = {"capturable": True} if fused else {}
        return torch.optim.Adam(model.parameters(), held, **fused, **capturable), rate
    return torch.optim.SGD(model.parameters(), held, 0.9, weight_decay=5e-4, nesterov=True, **fused), rate


def read_cifar10(folder: Path) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Training and test images, uint8 [count, 3, 32, 32], with their labels."""
    source: Any = open_cifar_folder(folder, None)
    return (source.train.inputs, source.train.targets), (source.test.inputs, source.test.targets)


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each image moved by up to four pixels, with zeros around it, and half of them mirrored."""
    count, _, height, width = images.shape
    device = images.device
    padded = functional.pad(images, (_PAD,) * 4)
    moves = torch.randint(0, 2 * _PAD + 1, (2, count, 1), generator=generator).to(device)
    mirrored = torch.rand(count, 1, generator=generator).to(device) < 0.5
    rows = torch.arange(height, device=device) + moves[0]
    columns = torch.arange(width, device=device)
    columns = torch.where(mirrored, width - 1 - columns, columns) + moves[1]
    places = torch.arange(count, device=device)[:, None, None]
    chosen = padded.permute(0, 2, 3, 1)[places, rows[:, :, None], columns[:, None, :]]
    return chosen.permute(0, 3, 1, 2)


def train(
    data: dict[str, torch.Tensor], is_binary: bool, seed: int, options: argparse.Namespace
) -> tuple[torch.nn.Module, float]:
    """The trained network, and the seconds that its steps took, without planning."""
    torch.manual_seed(seed)
    model = vgg(is_binary, options.width).to(options.device, memory_format=torch.channels_last)
    optimizer, rate = make_optimizer(model, is_binary, options.device)
    generator = torch.Generator().manual_seed(seed)
    example = augment(data["train"][:_BATCH], generator), data["train_labels"][:_BATCH]
    step = ut.train_step(
        model,
        example[:1],
        targets=example[1:],
        loss=functional.cross_entropy,
        optimizer=optimizer,
        numerics=options.numerics,
    )
    num_batches = len(data["train"]) // _BATCH
    num_steps, began = options.epochs * num_batches, time.perf_counter()
    for epoch in range(options.epochs):
        order = torch.randperm(len(data["train"]), generator=generator).to(options.device)
        for number, places in enumerate(order.split(_BATCH)[:num_batches], epoch * num_batches):
            warm = min(1.0, (number + 1) / num_batches)
            now = rate * warm * 0.5 * (1 + math.cos(math.pi * number / num_steps))
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(now)
                else:
                    group["lr"] = now
            loss = step(augment(data["train"][places], generator), data["train_labels"][places])
        print(f"  epoch {epoch + 1}: loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    step.release()
    return model.eval(), time.perf_counter() - began


def evaluate(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Test accuracy; and of the file in its small form on the CPU, for some images: time, and whether bits agree."""
    found: dict[str, Any] = {"test_accuracy": accuracy(model, data["test"], data["test_labels"])}
    model = copy.deepcopy(model).cpu()
    images, labels = data["test"][:_COMPARED].cpu(), data["test_labels"][:_COMPARED].cpu()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.utz"
        found["file_bytes"] = write_small_file(path, code_model(model), {})
        tensors = open_small_file(path).read_all()
    found["float_bytes"] = sum(tensor.nbytes for tensor in model.state_dict().values())
    small = run_small(model, tensors, (images[:1],), prefer="memory")
    found["forms"] = {choice.name: choice.form for choice in small.choices}
    with torch.no_grad():
        found["same_bits"] = all(torch.equal(small(part), model(part)) for part in images.split(50))
    for name, network in (("float", model), ("small", small)):
        start = time.perf_counter()
        found[f"{name}_accuracy_of_{_COMPARED}"] = accuracy(network, images, labels, batch=50)
        found[f"{name}_cpu_s"] = round(time.perf_counter() - start, 3)
    return found


def main() -> None:
    """Train each kind with every seed; write and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--kinds", default="float,binary")
    parser.add_argument("--numerics", default="exact")
    parser.add_argument("--examples", type=int, default=50_000, help="fewer only to try the script")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/single_bits_vgg.json"))
    options = parser.parse_args()
    (images, labels), (test, test_labels) = read_cifar10(options.data)
    images, labels = images[: options.examples].float() / 255, labels[: options.examples]
    mean, deviation = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    data = {"train": (images - mean) / deviation, "train_labels": labels}
    data |= {
        "test": (test[: options.examples] / 255 - mean) / deviation,
        "test_labels": test_labels[: options.examples],
    }
    data = {name: tensor.to(options.device) for name, tensor in data.items()}
    results: dict[str, Any] = {"machine": describe_machine(), "epochs": options.epochs, "numerics": options.numerics}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for kind in options.kinds.split(","):
            model, seconds = train(data, kind == "binary", seed, options)
            found = {"seed": seed, "train_s": round(seconds, 1), **evaluate(model, data)}
            results.setdefault(kind, []).append(found)
            print(f"{kind} {found}", flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
