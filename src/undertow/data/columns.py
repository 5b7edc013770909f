"""Examples from the columns of a table: images with labels, rows of numbers with targets, or a text.

In: the parts of a dataset, as `tables` reads them. Out: a Source. Images stay in the table, encoded, and are decoded
when they are fetched.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from undertow.data.examples import HASHED_BYTES, Arrays, Batch, Examples, Source, Subset, hash_rows
from undertow.data.images import HASHED_FILES, decode_pixels, describe_first, sample_images
from undertow.data.npz import as_examples, check_finite, prepare_arrays
from undertow.data.preparation import Change, Preparation, Wanted, shape_images
from undertow.data.sizes import check_claim
from undertow.data.splitting import split_test
from undertow.data.tables import class_names, import_pyarrow, read_parts
from undertow.data.text import Stretches, cut_text, encode
from undertow.errors import DataError

INPUT_NAMES = ("image", "img", "images", "pixel_values", "x", "text")
TARGET_NAMES = ("label", "labels", "fine_label", "target", "y")
UNPREPARED = Preparation(())  # until the shape of the first training example is known


def open_tables(
    path: Path, wanted: Wanted | None, vocabulary: str | None = None, columns: Sequence[str] | None = None
) -> Source:
    """Training, validation and test examples; without a test part, 80 to 20 by class."""
    parts = read_parts(path)
    whole = parts["whole"] if "whole" in parts else parts["train"]
    inputs, target = find_columns(whole, str(path), columns)
    for name, part in parts.items():
        _check_columns(part, f"{path} ({name})", [column for column in (inputs, target) if column is not None])
    if target is None:
        texts = {name: _read_text(part.column(inputs), f"{path}: {inputs}") for name, part in parts.items()}
        return _open_text(texts, str(path), wanted, vocabulary)
    targets = {name: _read_targets(part.column(target), f"{path}: {target} ({name})") for name, part in parts.items()}
    is_image = _is_image(whole.schema.field(inputs).type)
    make = _make_images if is_image else _make_arrays
    made = {
        name: make(part.column(inputs), f"{path}: {inputs} ({name})", targets[name]) for name, part in parts.items()
    }
    if "test" not in made:
        made["train"], made["test"] = split_test(made.pop("whole" if "whole" in made else "train"))
    for name, examples in made.items():
        if not len(examples):
            raise DataError(f"{path} has too few examples: none for {name}")
    preparation = _prepare(path, made["train"], wanted)
    for examples in made.values():
        examples.prepare_as(preparation)
    size_note = describe_first(preparation, f"{path}: {inputs}") if is_image and wanted is None else ""
    has_pixels = is_image or len(preparation.shape) == 3
    classes = class_names(whole, target)
    return Source(made["train"], made["test"], preparation, classes, made.get("validation"), has_pixels, size_note)


def _open_text(texts: dict[str, str], what: str, wanted: Wanted | None, vocabulary: str | None) -> Source:
    """Each part as stretches; without a test part, the end of the text is one."""
    vocabulary = vocabulary or "".join(sorted(set().union(*texts.values())))
    source = cut_text(texts["whole"] if "whole" in texts else texts["train"], what, wanted, vocabulary)
    (length,) = source.preparation.shape
    made = {name: Stretches(encode(text, vocabulary, what), length, vocabulary) for name, text in texts.items()}
    if short := [name for name, part in made.items() if not len(part)]:
        raise DataError(f"{what}: the text of {short[0]} is too short for stretches of {length} characters")
    source = replace(source, validation=made.get("validation"))
    return replace(source, train=made["train"], test=made["test"]) if "test" in made else source


def _make_arrays(column: Any, what: str, targets: torch.Tensor) -> Examples:
    return Arrays(as_examples(_read_numbers(column, what)), targets, UNPREPARED)


def _make_images(column: Any, what: str, targets: torch.Tensor) -> Examples:
    return TableImages(column, what, targets)


def _prepare(path: Path, train: Examples, wanted: Wanted | None) -> Preparation:
    whole, first = (train.whole, int(train.indices[0])) if isinstance(train, Subset) else (train, 0)
    if isinstance(whole, TableImages):
        return shape_images(str(path), whole.decode(first).shape, 255.0, wanted)
    assert isinstance(whole, Arrays)
    return prepare_arrays(str(path), whole.inputs, wanted)


def find_columns(table: Any, what: str, columns: Sequence[str] | None) -> tuple[str, str | None]:
    """The columns of inputs and targets; None for the targets of a text."""
    names = table.column_names
    if columns is not None:
        _check_columns(table, what, columns)
        found = columns[0], columns[1] if len(columns) == 2 else None
    else:
        inputs = next((name for name in INPUT_NAMES if name in names), None)
        target = next((name for name in TARGET_NAMES if name in names), None)
        if inputs is None or target is None and inputs != "text":
            raise DataError(
                f"{what} has the columns {', '.join(names)}: say which are inputs and targets, such as "
                f"--columns image,label"
            )
        found = inputs, target
    types = import_pyarrow().types
    kind = table.schema.field(found[0]).type
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if is_text and found[1] is not None:
        raise DataError(
            f"{what}: {found[0]} is text with targets, which needs a tokenizer: give --columns {found[0]} to train a "
            f"character model, or loaders of your own, file.py:factory"
        )
    if not is_text and found[1] is None:
        raise DataError(f"{what}: {found[0]} is no text; give its targets too, such as --columns {found[0]},label")
    return found


def _check_columns(table: Any, what: str, columns: Sequence[str]) -> None:
    for name in columns:
        if name not in table.column_names:
            raise DataError(f"{what} has no column {name!r}; it has {', '.join(table.column_names)}")
        if table.column_names.count(name) > 1:
            raise DataError(f"{what} has several columns {name!r}")


def _is_image(kind: Any) -> bool:
    types = import_pyarrow().types
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _read_text(column: Any, what: str) -> str:
    check_claim(what, column.nbytes)
    return "\n".join(row for row in column.to_pylist() if row is not None)


def _read_targets(column: Any, what: str) -> torch.Tensor:
    numbers = _read_numbers(column, what)
    return numbers.float() if numbers.is_floating_point() else numbers.long()


def _read_numbers(column: Any, what: str) -> torch.Tensor:
    """A column of numbers, or of lists of them that all have the same shape."""
    types = import_pyarrow().types
    check_claim(what, column.nbytes)
    if column.null_count:
        raise DataError(f"{what} has {column.null_count:,} rows without a value; leave them out")
    flat, shape = column.combine_chunks(), [len(column)]
    flat = flat.storage if hasattr(flat, "storage") else flat
    while types.is_list(flat.type) or types.is_large_list(flat.type) or types.is_fixed_size_list(flat.type):
        inner = flat.flatten()
        size = len(inner) // len(flat) if len(flat) else 0
        lengths = (
            {flat.type.list_size}
            if types.is_fixed_size_list(flat.type)
            else set(flat.value_lengths().unique().to_pylist())
        )
        if flat.null_count or lengths != {size} or not size:
            raise DataError(f"{what} has rows of several lengths; numbers are read where all have the same")
        flat = inner
        shape.append(size)
    if flat.null_count or not (
        types.is_integer(flat.type) or types.is_floating(flat.type) or types.is_boolean(flat.type)
    ):
        raise DataError(f"{what} holds {flat.type}; images, numbers and texts are read")
    numbers = torch.from_numpy(numpy.array(flat.to_numpy(zero_copy_only=False))).reshape(shape)
    check_finite(what, numbers)
    return numbers


class TableImages(Examples):
    """Encoded images in a column, decoded when they are fetched."""

    preparation: Preparation

    def __init__(self, column: Any, what: str, targets: torch.Tensor) -> None:
        arrow = import_pyarrow()
        if arrow.types.is_struct(column.type):
            column = arrow.chunked_array(
                [chunk.field("bytes") for chunk in column.chunks], type=column.type.field("bytes").type
            )
        self.column, self.what, self.targets = column, what, targets

    def __len__(self) -> int:
        return len(self.targets)

    def decode(self, index: int) -> torch.Tensor:
        """The pixels of one image."""
        data = self.column[index].as_buffer()
        what = f"{self.what}, row {index}"
        if data is None:
            raise DataError(f"{what} has no image; images outside of the table are not read")
        return decode_pixels(io.BytesIO(data.to_pybytes()), what)

    def fetch(self, indices: Sequence[int], change: Change | None = None) -> Batch:
        decoded = (self.decode(index) for index in indices)
        return self.preparation.prepare_each(decoded, change), self.targets[torch.as_tensor(indices)]

    def fingerprint(self) -> str:
        """A hash of labels and sizes, and of some images at equal distances."""
        import pyarrow.compute

        digest = hashlib.sha256(hash_rows(self.targets).encode())
        sizes = pyarrow.compute.binary_length(self.column).fill_null(-1).to_numpy()
        digest.update(sizes.astype("int64").tobytes())
        for index in range(0, len(self), max(len(self) // HASHED_FILES, 1)):
            data = self.column[index].as_buffer()
            digest.update(b"" if data is None else data.to_pybytes()[:HASHED_BYTES])
        return digest.hexdigest()

    def sample(self, indices: Sequence[int]) -> torch.Tensor:
        return sample_images((self.decode(index) for index in indices), self.preparation)

    def prepare_as(self, preparation: Preparation) -> None:
        self.preparation = preparation
