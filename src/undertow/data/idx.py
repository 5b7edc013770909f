"""MNIST and its relatives: four idx files, plain or gzip (format: LeCun, Cortes & Burges, "The MNIST database").

An idx file is two zero bytes, the type of its elements (8: unsigned bytes), the number of dimensions, each dimension as
a big-endian 32-bit number, then the elements. The header is compared with the file's length before anything is read.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import torch

from undertow.data.examples import Arrays, Source, check_pair
from undertow.data.preparation import Wanted, shape_images
from undertow.data.sizes import check_claim, file_bytes
from undertow.errors import DataError

UNSIGNED_BYTE = 8
PARTS = {
    "training images": ("train-images", 3),
    "training labels": ("train-labels", 1),
    "test images": ("t10k-images", 3),
    "test labels": ("t10k-labels", 1),
}


def is_idx_folder(folder: Path) -> bool:
    """Whether the folder has any of the four files."""
    return any(_find(folder, stem, dims) is not None for stem, dims in PARTS.values())


def open_idx_folder(folder: Path, wanted: Wanted | None) -> Source:
    """The images with their labels."""
    found = {name: _read_part(folder, name) for name in PARTS}
    images, test_images = (found[name].unsqueeze(1) for name in ("training images", "test images"))
    labels, test_labels = (found[name].long() for name in ("training labels", "test labels"))
    check_pair(f"{folder} (training)", len(images), len(labels))
    check_pair(f"{folder} (test)", len(test_images), len(test_labels))
    preparation = shape_images(str(folder), images.shape[1:], 255.0, wanted)
    train, test = Arrays(images, labels, preparation), Arrays(test_images, test_labels, preparation)
    return Source(train, test, preparation, classes=None)


def _names(stem: str, dims: int) -> list[str]:
    return [f"{stem}{dot}idx{dims}-ubyte{end}" for dot in "-." for end in ("", ".gz")]


def _find(folder: Path, stem: str, dims: int) -> Path | None:
    return next((folder / name for name in _names(stem, dims) if (folder / name).exists()), None)


def _read_part(folder: Path, name: str) -> torch.Tensor:
    stem, dims = PARTS[name]
    path = _find(folder, stem, dims)
    if path is None:
        raise DataError(f"{folder} has no {name}: {_names(stem, dims)[0]} or {_names(stem, dims)[1]} is missing")
    return read_idx(path, dims)


def read_idx(path: Path, num_dims: int) -> torch.Tensor:
    """The bytes of an idx file in its shape."""
    size = file_bytes(path)
    is_packed = path.suffix == ".gz"
    try:
        with gzip.open(path) if is_packed else open(path, "rb") as file:
            return _read(file, path, num_dims, size, is_packed)  # type: ignore[arg-type]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _read(file: BinaryIO, path: Path, num_dims: int, size: int, is_packed: bool) -> torch.Tensor:
    header = file.read(4 + 4 * num_dims)
    if len(header) < 4 + 4 * num_dims or header[:2] != b"\0\0":
        raise DataError(f"{path} is not an idx file: it does not begin with two zero bytes and a whole header")
    if (header[2], header[3]) != (UNSIGNED_BYTE, num_dims):
        raise DataError(
            f"{path} holds elements of type {header[2]} in {header[3]} dimensions; it must hold unsigned bytes (8) "
            f"in {num_dims}"
        )
    shape = struct.unpack(f">{num_dims}I", header[4:])
    num_elements = math.prod(shape)
    check_claim(str(path), num_elements, size if is_packed else None)
    if not is_packed and size != len(header) + num_elements:
        raise DataError(
            f"{path} has {size:,} bytes, but its header {list(shape)} claims {len(header) + num_elements:,}"
        )
    # Reads one byte more than there should be: a gzip file gives its length only at its end.
    body = file.read(num_elements + 1)
    if len(body) != num_elements:
        more = "more" if len(body) > num_elements else f"{len(body):,}"
        raise DataError(f"{path}: the header {list(shape)} claims {num_elements:,} bytes, but there are {more}")
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).reshape(shape) if body else torch.empty(shape)
