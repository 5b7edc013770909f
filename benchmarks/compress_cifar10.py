"""VGG-16 for CIFAR-10 with 15 M parameters: trained, then compressed for several errors; bytes and test errors.

DATA is a folder of CIFAR-10 (see `docs/data.md`). The network is trained by `ut.train_step` on 45,000 images for some
minutes, with crops, flips and holes made on the device, and rounded to float16, so that its files are what is
compressed. Then `ut.compress` searches for each of `--searches`, side by side on one device: ERROR[:DISTILL], where
ERROR is what may be reached on the 5,000 images left out, in percent. Test images are read at the end of each search,
by plain PyTorch in float32. Published: 384 KB at 6.57 %, 101 KB at 10.0 % (Havasi, Peharz & Hernandez-Lobato 2019).

FOLDER/results.json is written after every round; beside it are the networks, the dense one in parts of 15 MB. A FOLDER
that holds the dense one is gone on with.

Usage: scripts/bench compress_cifar10 DATA --out FOLDER [--minutes 9] [--train-minutes 3] [--searches 6.2 6.2:0.5 9.5]
       scripts/bench compress_cifar10 DATA --out FOLDER --smoke       a small network: whether this script works
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from binary_networks import accuracy
from machine import describe_machine
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from single_bits_vgg import augment, read_cifar10
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.models.vgg import CONFIGURATION_D, convolution_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH = 250
NUM_VALIDATED = 5_000
HOLE = 16  # pixels of a side (DeVries & Taylor 2017)
PART_BYTES = 15_000_000
Data = dict[str, tuple[torch.Tensor, torch.Tensor]]


def make_network(width: int) -> nn.Module:
    """VGG-16 with batch normalisation, and one hidden layer."""
    layers = (nn.Flatten(), nn.Linear(8 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 10))
    return nn.Sequential(convolution_blocks(CONFIGURATION_D, width, has_batch_norm=True), *layers)


def load_data(folder: Path, num: int) -> Data:
    """Images of mean 0 and deviation 1 on the device: train, validation, test."""
    (images, labels), (test, test_labels) = read_cifar10(folder)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:num]
    images = images[order].float() / 255
    mean, deviation = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    images, test = (images - mean) / deviation, (test[:num] / 255 - mean) / deviation
    num_left = min(NUM_VALIDATED, num // 10)
    parts = {
        "train": (images[num_left:], labels[order][num_left:]),
        "validation": (images[:num_left], labels[order][:num_left]),
        "test": (test, test_labels[:num]),
    }
    return {name: (part[0].to(DEVICE), part[1].to(DEVICE)) for name, part in parts.items()}


class Augmented:
    """Batches of moved and mirrored images, in a new order each time; `generator` is seeded by whoever iterates."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, has_holes: bool) -> None:
        self.images, self.labels, self.has_holes, self.generator = images, labels, has_holes, torch.Generator()

    def __len__(self) -> int:
        return len(self.images) // BATCH

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(self.images), generator=self.generator).to(DEVICE)
        for places in order.split(BATCH)[: len(self)]:
            images = augment(self.images[places], self.generator)
            yield self.pierce(images) if self.has_holes else images, self.labels[places]

    def pierce(self, images: torch.Tensor) -> torch.Tensor:
        """A square of zeros in each image, with its centre anywhere."""
        side = torch.arange(images.shape[-1], device=DEVICE)
        centres = torch.randint(len(side), (2, len(images), 1), generator=self.generator).to(DEVICE)
        rows, columns = (side >= centres - HOLE // 2) & (side < centres + HOLE // 2)
        return images.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0)


def error_of(model: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Percent, by plain PyTorch in float32."""
    return 100 - 100 * accuracy(model, *part)


def train_dense(model: nn.Module, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """SGD, with a rate that follows what is done of the epochs or of the minutes, whichever is more."""
    model.to(memory_format=torch.channels_last)
    rate = torch.tensor(0.0, device=DEVICE) if DEVICE == "cuda" else 0.0  # a CUDA graph reads it where it lies
    optimizer = torch.optim.SGD(
        model.parameters(), rate, 0.9, weight_decay=5e-4, nesterov=True, fused=True if DEVICE == "cuda" else None
    )
    batches = Augmented(*data["train"], has_holes=True)
    batches.generator.manual_seed(options.seed)
    example = next(iter(batches))
    step = ut.train_step(
        model,
        example[:1],
        targets=example[1:],
        loss=functional.cross_entropy,
        optimizer=optimizer,
        numerics=options.numerics,
    )
    num_steps, number, done, began = options.train_epochs * len(batches), 0, 0.0, time.perf_counter()
    while done < 1:
        for images, labels in batches:
            done = max(number / num_steps, (time.perf_counter() - began) / (60 * options.train_minutes))
            now = 0.1 * min(1.0, (number + 1) / (5 * len(batches))) * max(1 - done, 0.001)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"].fill_(now) if DEVICE == "cuda" else now
            loss = step(images, labels)
            number += 1
            if done >= 1:
                break
        print(f"  {number} steps, loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    step.release()
    return {"train_steps": number, "train_s": round(time.perf_counter() - began, 1)}


def save_dense(model: nn.Module, folder: Path) -> None:
    """In float16, in parts."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    for name, item in model.state_dict().items():
        half = (item.half() if item.is_floating_point() else item).cpu().contiguous()
        if sum(other.nbytes for other in parts[-1].values()) + half.nbytes > PART_BYTES:
            parts.append({})
        parts[-1][name] = half
    for place, part in enumerate(parts):
        save_file(part, folder / f"dense-{place}.safetensors")


def load_dense(folder: Path, width: int) -> nn.Module:
    """The network of `save_dense`."""
    model = make_network(width).to(DEVICE)
    model.load_state_dict(
        {name: item for path in sorted(folder.glob("dense-*")) for name, item in load_file(path).items()}
    )
    return model.eval()


def search(data: Data, options: argparse.Namespace) -> None:
    """One search; FOLDER gets its file, and the work folder a record after every round."""
    start, record = time.perf_counter(), Path(options.work) / f"{options.search}.json"
    error, _, distill = options.search.partition(":")
    out, checkpoint = Path(options.out) / f"{options.search.replace(':', '-')}.utz", record.with_suffix(".part")
    dense = load_dense(Path(options.out), options.width)
    dense_error = error_of(dense, data["validation"])
    found: dict[str, Any] = {"search": options.search, "dense_validation_error": dense_error, "rounds": []}

    def note(line: str) -> None:
        print(f"{options.search}: {line}", flush=True)
        found["rounds"].append({"s": round(time.perf_counter() - start, 1), "line": line})
        record.write_text(json.dumps(found))
        if checkpoint.exists():  # the state after the round before
            with safe_open(checkpoint, "pt") as state:
                if "best" in state.keys():  # noqa: SIM118  it is no mapping
                    out.write_bytes(state.get_tensor("best").numpy().tobytes())

    small = ut.compress(
        dense,
        train=Augmented(*data["train"], has_holes=False),
        validation=list(zip(*(item.split(500) for item in data["validation"]), strict=True)),
        max_loss=max(float(error) - dense_error, 0.0),
        epochs=options.epochs,
        lr=options.lr,
        distill=float(distill or 0),
        numerics=options.numerics,
        checkpoint=checkpoint,
        progress=note,
        time_limit_s=options.time_limit_s,
    )
    small.save(out)
    loaded = ut.load_compressed(out, make_network(options.width).to(DEVICE))
    found |= {
        "bytes": small.num_bytes,
        "ratio": round(small.ratio, 1),
        "is_kept": small.is_accuracy_kept,
        "validation_error": error_of(loaded, data["validation"]),
        "test_error": error_of(loaded, data["test"]),
        "history": small.history,
        "table": [asdict(row) for row in small.table()],
    }
    record.write_text(json.dumps(found))


def main() -> None:
    """Train, search side by side, and keep results.json up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="of everything")
    parser.add_argument("--train-minutes", type=float, default=3.0)
    parser.add_argument("--train-epochs", type=int, default=200)
    parser.add_argument("--searches", nargs="+", default=["6.2", "6.2:0.5", "9.5"], metavar="ERROR[:DISTILL]")
    parser.add_argument("--epochs", type=int, default=12, help="of each round")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--numerics", default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="few images and few channels")
    parser.add_argument("--search", help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--time-limit-s", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.width, num = (4, 2_000) if options.smoke else (64, 50_000)
    data = load_data(options.data, num)
    if options.search is not None:
        search(data, options)
        return
    start, results_path = time.perf_counter(), options.out / "results.json"
    options.out.mkdir(parents=True, exist_ok=True)
    if not list(options.out.glob("dense-*")):
        torch.manual_seed(options.seed)
        model = make_network(options.width).to(DEVICE)
        about = train_dense(model, data, options)
        save_dense(model, options.out)
        (options.out / "results.json").write_text(json.dumps(about))
    dense = load_dense(options.out, options.width)
    results: dict[str, Any] = json.loads(results_path.read_text()) if results_path.exists() else {}
    results |= {"machine": describe_machine(), "parameters": sum(item.numel() for item in dense.parameters())}
    if DEVICE == "cuda":
        results["machine"] |= {"gpu": torch.cuda.get_device_name()}
    results |= {f"dense_{name}_error": error_of(dense, data[name]) for name in ("validation", "test")}
    results |= {"epochs": options.epochs, "lr": options.lr, "numerics": options.numerics, "searches": {}}
    results_path.write_text(json.dumps(results, indent=1) + "\n")
    print({name: item for name, item in results.items() if name != "searches"}, flush=True)
    del dense, data
    # Reading data, and testing at the end, take some of the time.
    left_s = 60 * options.minutes - (time.perf_counter() - start) - 20
    with tempfile.TemporaryDirectory() as work:
        words = [sys.executable, *sys.argv, "--work", work, "--time-limit-s", str(max(left_s, 1.0)), "--search"]
        running = {name: subprocess.Popen([*words, name]) for name in options.searches}
        while True:
            ended = [child.poll() is not None for child in running.values()]
            for name in running:
                path = Path(work) / f"{name}.json"
                if path.exists():
                    results["searches"][name] = json.loads(path.read_text())
            results_path.write_text(json.dumps(results, indent=1) + "\n")
            if all(ended):
                break
            time.sleep(2)
    for name, child in running.items():
        found = results["searches"].get(name, {})
        shown = {key: item for key, item in found.items() if key not in ("rounds", "history", "table")}
        print(f"{name}: exit code {child.returncode}, {shown}", flush=True)


if __name__ == "__main__":
    main()
