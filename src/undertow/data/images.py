"""Images from files: a folder with a folder of images for each class, or single files.

    data/train/cat/1.png  data/test/cat/9.png       with its own split (`test`, `val` or `valid`)
    data/cat/1.png                                  without one: it is then split 80 to 20

Images are decoded when a batch is fetched. A file's size in pixels is checked before it is decoded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from PIL import Image

from undertow.data.examples import HASHED_BYTES, Examples, Source, hash_rows, split_fixed
from undertow.data.preparation import SAMPLE_SIZE, Preparation, fit_images
from undertow.data.sizes import file_bytes
from undertow.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
TEST_NAMES = ("test", "val", "valid")
MAX_PIXELS = 64 << 20
HASHED_FILES = 256
UNBOUNDED_MODES = ("I", "F")  # 32 bits a pixel


def is_image_folder(folder: Path) -> bool:
    """Whether the folder, or `train` in it, has folders with images."""
    return any(_class_folders(subfolder) for subfolder in (folder, folder / "train"))


def open_image_folder(folder: Path, wanted: Sequence[int] | None) -> Source:
    """The images with their classes: the names of the folders, sorted."""
    root = folder / "train" if _class_folders(folder / "train") else folder
    own_test = next((folder / name for name in TEST_NAMES if _class_folders(folder / name)), None)
    names = _class_folders(root)
    paths, targets = _list(root, names)
    if root != folder and own_test is not None:
        if extra := set(_class_folders(own_test)) - set(names):
            raise DataError(f"{own_test} has the classes {sorted(extra)}, which {root} does not have")
        test_paths, test_targets = _list(own_test, names)
    else:
        train_indices, test_indices = split_fixed(len(paths))
        test_paths, test_targets = [paths[index] for index in test_indices], targets[test_indices]
        paths, targets = [paths[index] for index in train_indices], targets[train_indices]
    if not paths or not test_paths:
        raise DataError(f"{folder} has too few images for training and test: {len(paths)} and {len(test_paths)}")
    preparation = _fit(str(folder), paths, wanted)
    train, test = Images(paths, targets, preparation), Images(test_paths, test_targets, preparation)
    return Source(train, test, preparation, tuple(names))


class Images(Examples):
    """Image files, decoded when they are fetched."""

    def __init__(self, paths: Sequence[Path], targets: torch.Tensor, preparation: Preparation) -> None:
        self.paths, self.targets, self.preparation = paths, targets, preparation

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        images = [self.preparation(decode_image(self.paths[index])[None]) for index in indices]
        return torch.cat(images), self.targets[torch.as_tensor(indices)]

    def fingerprint(self) -> str:
        """A hash of classes, names and sizes of all files, and of the content of some, at equal distances."""
        digest = hashlib.sha256(hash_rows(self.targets).encode())
        for path in self.paths:
            digest.update(os.fsencode(f"{path.parent.name}/{path.name} {file_bytes(path)}\n"))
        for path in self.paths[:: max(len(self.paths) // HASHED_FILES, 1)]:
            digest.update(_read_start(path))
        return digest.hexdigest()


def _read_start(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(HASHED_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def decode_image(path: Path) -> torch.Tensor:
    """The pixels as bytes (channels, height, width); one channel for grey images, three for all others."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(f"{path} claims {width} x {height} pixels; at most {MAX_PIXELS:,} are decoded")
            if image.mode in UNBOUNDED_MODES:
                raise DataError(
                    f"{path} has pixels of mode {image.mode}, which have no largest value; save it with 8 or 16 bits"
                )
            is_deep = image.mode.startswith("I;16")
            is_grey = is_deep or image.mode in ("1", "L")
            # Pillow's own conversion clips 16 bits at 255.
            pixels = numpy.asarray(image) >> 8 if is_deep else numpy.asarray(image.convert("L" if is_grey else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path} cannot be decoded as an image: {reason}") from None
    tensor = torch.from_numpy(pixels.astype("uint8"))
    return tensor.unsqueeze(0) if is_grey else tensor.permute(2, 0, 1)


def list_images(folder: Path) -> list[Path]:
    """The image files of a folder, by name."""
    found = (path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    # Some systems leave a hidden file beside each image.
    return sorted(path for path in found if not path.name.startswith(".") and not path.is_dir())


def _class_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(subfolder.name for subfolder in folder.iterdir() if subfolder.is_dir() and list_images(subfolder))


def _list(folder: Path, names: Sequence[str]) -> tuple[list[Path], torch.Tensor]:
    found = [(path, label) for label, name in enumerate(names) for path in list_class_images(folder / name)]
    return [path for path, _ in found], torch.tensor([label for _, label in found], dtype=torch.int64)


def list_class_images(folder: Path) -> list[Path]:
    """The images of a class; none if its folder is missing."""
    return list_images(folder) if folder.is_dir() else []


def _fit(what: str, paths: Sequence[Path], wanted: Sequence[int] | None) -> Preparation:
    """The preparation; without a wanted shape, images get the shape of the first. A sample gives the statistics."""
    first = decode_image(paths[0])
    plain = Preparation(tuple(wanted) if wanted is not None else tuple(first.shape))
    step = max(len(paths) // SAMPLE_SIZE, 1)
    sample = [plain.resize(decode_image(path)[None].float()) for path in paths[::step][:SAMPLE_SIZE]]
    return fit_images(what, torch.cat(sample), 255.0, plain.shape)
