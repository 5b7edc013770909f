"""Arrays from an .npz file: `x_train`, `y_train`, `x_test`, `y_test`, or `x` and `y`, which are split 80 to 20.

An array of three dimensions holds grey images, one of four holds images with channels first or last, one of two holds
vectors. Every header is compared with the size of its member of the archive before numpy allocates. Arrays of Python
objects are refused, because they are pickles.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy
import torch

from undertow.data.examples import Arrays, Source, check_pair, split_fixed
from undertow.data.preparation import Preparation, Wanted, shape_images
from undertow.data.sizes import check_claim, file_bytes
from undertow.errors import DataError

SPLIT_NAMES = ("x_train", "y_train", "x_test", "y_test")
WHOLE_NAMES = ("x", "y")
# What zipfile (RuntimeError: encrypted members) and numpy's parser of headers (a Python literal) raise.
UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
    ValueError,
    TypeError,
    OSError,
    EOFError,
    RuntimeError,
    MemoryError,
)
MAX_REASON = 200  # characters; numpy quotes a header that it cannot parse


def open_npz(path: Path, wanted: Wanted | None) -> Source:
    """Training and test examples of a file."""
    arrays = read_npz(path)
    if all(name in arrays for name in SPLIT_NAMES):
        x_train, y_train, x_test, y_test = (arrays[name] for name in SPLIT_NAMES)
    elif all(name in arrays for name in WHOLE_NAMES):
        check_pair(str(path), len(arrays["x"]), len(arrays["y"]))
        train_indices, test_indices = split_fixed(len(arrays["x"]))
        x_train, x_test = (arrays["x"][indices] for indices in (train_indices, test_indices))
        y_train, y_test = (arrays["y"][indices] for indices in (train_indices, test_indices))
    else:
        raise DataError(
            f"{path} has the arrays {', '.join(arrays) or '(none)'}; it must have {', '.join(SPLIT_NAMES)}, or x and y"
        )
    check_pair(f"{path} (training)", len(x_train), len(y_train))
    check_pair(f"{path} (test)", len(x_test), len(y_test))
    x_train, x_test = as_examples(x_train), as_examples(x_test)
    preparation = prepare_arrays(str(path), x_train, wanted)
    train, test = (Arrays(x, _as_targets(y), preparation) for x, y in ((x_train, y_train), (x_test, y_test)))
    return Source(train, test, preparation, classes=None, has_pixels=x_train.dim() == 4)


def read_npz(path: Path) -> dict[str, torch.Tensor]:
    """Every array of the file."""
    size = file_bytes(path)
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                _check_member(path, archive, member, size)
        with numpy.load(path, allow_pickle=False) as arrays:
            found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read as .npz: {str(error)[:MAX_REASON] or type(error).__name__}") from None
    for name, array in found.items():
        if array.is_complex() or not array.dim():
            raise DataError(
                f"{path}: {name} is {array.dtype} of shape {list(array.shape)}; it must hold rows of real numbers"
            )
        check_finite(f"{path}: {name}", array)
    return found


def check_finite(what: str, array: torch.Tensor) -> None:
    """Raise DataError that names the first number that is not finite."""
    if array.is_floating_point() and not bool((finite := array.isfinite()).all()):
        index = (~finite).nonzero()[0].tolist()
        place, value = ",".join(map(str, index)), float(array[tuple(index)])
        raise DataError(f"{what}[{place}] is {value}, not a finite number; mend or leave out that example")


def _check_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, size: int) -> None:
    what = f"{path}: {member.filename}"
    check_claim(what, member.file_size, size)
    with archive.open(member) as file:
        version = numpy.lib.format.read_magic(file)
        read = numpy.lib.format.read_array_header_1_0 if version == (1, 0) else numpy.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise DataError(f"{what} holds Python objects; these are pickles and are not read")
        wanted_bytes = file.tell() + math.prod(shape) * dtype.itemsize
    if wanted_bytes != member.file_size:
        raise DataError(f"{what} claims {wanted_bytes:,} bytes in its header, but has {member.file_size:,}")


def as_examples(array: torch.Tensor) -> torch.Tensor:
    """Images with their channels first; vectors unchanged."""
    if array.dim() == 3:
        return array.unsqueeze(1)
    if array.dim() == 4 and array.shape[-1] in (1, 3) and array.shape[1] not in (1, 3):
        return array.permute(0, 3, 1, 2).contiguous()
    return array


def prepare_arrays(what: str, examples: torch.Tensor, wanted: Wanted | None) -> Preparation:
    """The preparation of an array: images get the wanted size, other numbers only another shape."""
    stored = examples.shape[1:]
    if examples.dim() == 4:
        return shape_images(what, stored, 255.0 if examples.dtype == torch.uint8 else 1.0, wanted)
    if wanted is not None and None in wanted:
        raise DataError(f"{what} holds no images, which --image-size is for")
    shape = tuple(map(int, wanted)) if wanted is not None else tuple(stored)  # type: ignore[arg-type]
    if math.prod(shape) != math.prod(examples.shape[1:]):
        raise DataError(f"{what}: the model takes inputs of shape {list(shape)}, found {list(examples.shape[1:])}")
    return Preparation(shape)


def _as_targets(array: torch.Tensor) -> torch.Tensor:
    return array.float() if array.is_floating_point() else array.long()
