"""CIFAR-10, binary version (Krizhevsky, "Learning multiple layers of features from tiny images", 2009).

In: its folder. Out: images with labels. A file holds only records: a label byte and 3 x 32 x 32 bytes of pixels.
"""

from __future__ import annotations

from pathlib import Path

import torch

from undertow.data.examples import Arrays, Source
from undertow.data.preparation import Wanted, shape_images
from undertow.data.sizes import check_claim, file_bytes
from undertow.errors import DataError

RECORD_BYTES = 1 + 3 * 32 * 32
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def is_cifar_folder(folder: Path) -> bool:
    """Whether the folder has any of the files."""
    return any((folder / name).exists() for name in (*TRAIN_FILES, TEST_FILE))


def open_cifar_folder(folder: Path, wanted: Wanted | None) -> Source:
    """The images with their labels."""
    parts = [read_records(folder / name) for name in TRAIN_FILES]
    images, labels = (torch.cat(pair) for pair in zip(*parts, strict=True))
    test_images, test_labels = read_records(folder / TEST_FILE)
    preparation = shape_images(str(folder), images.shape[1:], 255.0, wanted)
    train, test = Arrays(images, labels, preparation), Arrays(test_images, test_labels, preparation)
    return Source(train, test, preparation, CLASSES)


def read_records(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (count, 3, 32, 32) and labels of one file."""
    size = file_bytes(path)
    if size == 0 or size % RECORD_BYTES:
        raise DataError(
            f"{path} has {size:,} bytes; it must hold whole records of CIFAR-10, {RECORD_BYTES:,} bytes each"
        )
    check_claim(str(path), size)
    records = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).reshape(-1, RECORD_BYTES)
    labels = records[:, 0].long()
    if labels.max() >= len(CLASSES):
        index = int(labels.argmax())
        raise DataError(f"{path}: the label of record {index} is {int(labels[index])}, out of range: 0 to 9")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels
