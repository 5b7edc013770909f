"""`open_data`. In: the name of data. Out: its examples. The files found there decide how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from undertow.data.cifar import is_cifar_folder, open_cifar_folder
from undertow.data.digits import open_digits
from undertow.data.examples import Source
from undertow.data.idx import is_idx_folder, open_idx_folder
from undertow.data.images import is_image_folder, open_image_folder
from undertow.data.npz import open_npz
from undertow.data.text import open_text
from undertow.errors import DataError

DIGITS = "digits"
LAYOUTS = (
    "the idx files of MNIST, the .bin files of CIFAR-10, or a folder of images for each class; "
    "a file is .npz or .txt; digits needs no files"
)


def open_data(name: str, wanted: Sequence[int] | None, vocabulary: str | None = None) -> Source:
    """The data called `name`, for a model whose inputs have the shape `wanted`; None if any shape will do.

    `vocabulary` is given for a language model that already has one.
    """
    if name == DIGITS:
        return open_digits(wanted)
    path = Path(name)
    if not path.exists():
        raise DataError(f"there is no data {name!r}: give a folder with {LAYOUTS}")
    if path.is_file():
        if path.suffix == ".npz":
            return open_npz(path, wanted)
        if path.suffix == ".txt":
            return open_text(path, wanted, vocabulary)
        raise DataError(f"{name}: a file of data ends in .npz or .txt")
    for is_layout, open_folder in (
        (is_idx_folder, open_idx_folder),
        (is_cifar_folder, open_cifar_folder),
        (is_image_folder, open_image_folder),
    ):
        if is_layout(path):
            return open_folder(path, wanted)
    raise DataError(f"{name} holds no known data: give a folder with {LAYOUTS}")
