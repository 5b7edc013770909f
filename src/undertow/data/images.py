"""Images from files: a folder with a folder of images for each class, or single files.

    data/train/cat/1.png  data/test/cat/9.png       with its own split (`test`, `val` or `valid`)
    data/cat/1.png                                  without one: it is then split 80 to 20

Images are decoded when a batch is fetched. A file's size in pixels is checked before it is decoded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy
import torch
from PIL import Image

from undertow.data.examples import HASHED_BYTES, Batch, Examples, Source, hash_rows, split_fixed
from undertow.data.preparation import Change, Preparation, Wanted, shape_images
from undertow.data.sizes import file_bytes
from undertow.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
TEST_NAMES = ("test", "val", "valid")
MAX_PIXELS = 64 << 20
HASHED_FILES = 256
UNBOUNDED_MODES = ("I", "F")  # 32 bits a pixel


def is_image_folder(folder: Path) -> bool:
    """Whether the folder, or `train` in it, has folders with images."""
    return any(_has_classes(subfolder) for subfolder in (folder, folder / "train"))


def open_image_folder(folder: Path, wanted: Wanted | None) -> Source:
    """The images with their classes: the names of the folders, sorted."""
    root = folder / "train" if _has_classes(folder / "train") else folder
    found = _list_classes(root)
    own_test = next((folder / name for name in TEST_NAMES if _has_classes(folder / name)), None)
    paths, targets = _number(found, tuple(found))
    if root != folder and own_test is not None:
        found_test = _list_classes(own_test)
        if extra := found_test.keys() - found.keys():
            raise DataError(f"{own_test} has the classes {sorted(extra)}, which {root} does not have")
        test_paths, test_targets = _number(found_test, tuple(found))
    else:
        train_indices, test_indices = split_fixed(len(paths))
        test_paths, test_targets = [paths[index] for index in test_indices], targets[test_indices]
        paths, targets = [paths[index] for index in train_indices], targets[train_indices]
    if not paths or not test_paths:
        raise DataError(f"{folder} has too few images for training and test: {len(paths)} and {len(test_paths)}")
    preparation = shape_images(str(folder), decode_image(Path(paths[0])).shape, 255.0, wanted)
    train, test = Images(paths, targets, preparation), Images(test_paths, test_targets, preparation)
    size_note = describe_first(preparation, paths[0]) if wanted is None else ""
    return Source(train, test, preparation, tuple(found), size_note=size_note)


def describe_first(preparation: Preparation, first: str) -> str:
    """Which size the first image gives to all others."""
    _, height, width = preparation.shape
    return (
        f"images are resized to {height} x {width} (height x width), the size of the first, {first}: the model names "
        f"no size, and --image-size was not given"
    )


class Images(Examples):
    """Image files, decoded when they are fetched. Paths are strings: a hundred thousand `Path`s would take 50 MB."""

    def __init__(self, paths: Sequence[str], targets: torch.Tensor, preparation: Preparation) -> None:
        self.paths, self.targets, self.preparation = paths, targets, preparation

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: Sequence[int], change: Change | None = None) -> Batch:
        decoded = (decode_image(Path(self.paths[index])) for index in indices)
        return self.preparation.prepare_each(decoded, change), self.targets[torch.as_tensor(indices)]

    def fingerprint(self) -> str:
        """A hash of classes, names and sizes of all files, and of the content of some, at equal distances."""
        digest = hashlib.sha256(hash_rows(self.targets).encode())
        for path in self.paths:
            folder, name = os.path.split(path)
            digest.update(os.fsencode(f"{os.path.basename(folder)}/{name} {file_bytes(path)}\n"))
        for path in self.paths[:: max(len(self.paths) // HASHED_FILES, 1)]:
            digest.update(_read_start(path))
        return digest.hexdigest()

    def sample(self, indices: Sequence[int]) -> torch.Tensor:
        return sample_images((decode_image(Path(self.paths[index])) for index in indices), self.preparation)

    def prepare_as(self, preparation: Preparation) -> None:
        self.preparation = preparation


def sample_images(decoded: Iterable[torch.Tensor], preparation: Preparation) -> torch.Tensor:
    """Images of any sizes, to measure mean and deviation."""
    return torch.cat([preparation.resize(pixels[None].float()) for pixels in decoded]) / preparation.scale


def _read_start(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(HASHED_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def decode_image(path: Path) -> torch.Tensor:
    """The pixels of a file."""
    return decode_pixels(path, str(path))


def decode_pixels(file: Path | BinaryIO, what: str) -> torch.Tensor:
    """The pixels as bytes (channels, height, width); one channel for grey images, three for all others."""
    try:
        with Image.open(file) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(f"{what} claims {width} x {height} pixels; at most {MAX_PIXELS:,} are decoded")
            if image.mode in UNBOUNDED_MODES:
                raise DataError(
                    f"{what} has pixels of mode {image.mode}, which have no largest value; save it with 8 or 16 bits"
                )
            is_deep = image.mode.startswith("I;16")
            is_grey = is_deep or image.mode in ("1", "L")
            # Pillow's own conversion clips 16 bits at 255.
            pixels = numpy.asarray(image) >> 8 if is_deep else numpy.asarray(image.convert("L" if is_grey else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{what} cannot be decoded as an image: {reason}") from None
    tensor = torch.from_numpy(pixels.astype("uint8"))
    return tensor.unsqueeze(0) if is_grey else tensor.permute(2, 0, 1)


def list_images(folder: Path) -> list[Path]:
    """The image files of a folder, by name."""
    return [Path(path) for path in _list_paths(folder)]


def _is_image(entry: os.DirEntry[str]) -> bool:
    # Some systems leave a hidden file beside each image.
    name = entry.name
    return os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".") and not entry.is_dir()


def _list_paths(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.path for entry in entries if _is_image(entry))
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from None


def _list_folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from None
    return [folder / name for name in names]


def _has_classes(folder: Path) -> bool:
    """Whether any folder in this one has an image; reads no more names than it must."""
    for subfolder in _list_folders(folder) if folder.is_dir() else []:
        with os.scandir(subfolder) as entries:
            if any(_is_image(entry) for entry in entries):
                return True
    return False


def _list_classes(root: Path) -> dict[str, list[str]]:
    """The images of each class."""
    found = {folder.name: _list_paths(folder) for folder in _list_folders(root)}
    if empty := [name for name, paths in found.items() if not paths]:
        raise DataError(f"{root / empty[0]} has no images, but each folder in {root} is a class: fill it or remove it")
    return found


def _number(found: Mapping[str, list[str]], names: Sequence[str]) -> tuple[list[str], torch.Tensor]:
    """All images, and the number of the class of each."""
    paths = [path for name in names for path in found.get(name, [])]
    labels = [label for label, name in enumerate(names) for _ in found.get(name, [])]
    return paths, torch.tensor(labels, dtype=torch.int64)
