"""`open_data`. In: the name of data. Out: its examples. The files found there decide how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from undertow.data.cifar import is_cifar_folder, open_cifar_folder
from undertow.data.columns import open_tables
from undertow.data.digits import open_digits
from undertow.data.examples import Examples, Joined, Source
from undertow.data.idx import is_idx_folder, open_idx_folder
from undertow.data.images import is_image_folder, open_image_folder
from undertow.data.npz import open_npz
from undertow.data.preparation import Preparation, Wanted, choose_sample, measure_statistics
from undertow.data.splitting import split_validation
from undertow.data.tables import SUFFIXES, is_table_folder
from undertow.data.text import open_text
from undertow.errors import CallError, DataError

DIGITS = "digits"
LAYOUTS = (
    "the idx files of MNIST, CIFAR-10 as .bin files or pictures, a folder of images for each class, or a dataset saved "
    "by datasets.save_to_disk; a file is .npz, .txt, .parquet or .arrow; digits needs no files"
)
Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def open_data(
    name: str,
    wanted: Wanted | None,
    vocabulary: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    validation: float | str | None = None,
    seed: int = 0,
    statistics: Statistics | None = None,
) -> Source:
    """The data called `name`, for a model whose inputs have the shape `wanted`; None if any shape will do.

    `vocabulary` is given for a language model that already has one, `columns` for a table. `validation` is a share of
    the training examples, chosen by the seed, or the name of other data. `statistics` are mean and deviation; without
    them those of the training examples are taken, after validation examples were taken out.
    """
    source = _open(name, wanted, vocabulary, columns)
    if validation is not None and source.validation is not None:
        raise CallError(f"--validation {validation}: {name} has a validation part of its own; leave --validation out")
    if isinstance(validation, float):
        train, chosen = split_validation(source.train, validation, seed, f"--validation {validation:g} of {name}")
        source = replace(source, train=train, validation=chosen)
    source = _normalise(source, name, statistics)
    return replace(source, validation=_open_validation(source, validation)) if isinstance(validation, str) else source


def _open(name: str, wanted: Wanted | None, vocabulary: str | None, columns: Sequence[str] | None) -> Source:
    path = Path(name)
    is_table = path.suffix in SUFFIXES if path.is_file() else path.is_dir() and is_table_folder(path)
    if columns is not None and not is_table and (name == DIGITS or path.exists()):
        raise CallError(f"--columns {','.join(columns)}: {name} is no table; it is for Hugging Face datasets")
    if name == DIGITS:
        return open_digits(wanted)
    if not path.exists():
        raise DataError(f"there is no data {name!r}: give a folder with {LAYOUTS}")
    if is_table:
        return open_tables(path, wanted, vocabulary, columns)
    if path.is_file():
        if path.suffix == ".npz":
            return open_npz(path, wanted)
        if path.suffix == ".txt":
            return open_text(path, wanted, vocabulary)
        raise DataError(f"{name}: a file of data ends in .npz, .txt, .parquet or .arrow")
    for is_layout, open_folder in (
        (is_idx_folder, open_idx_folder),
        (is_cifar_folder, open_cifar_folder),
        (is_image_folder, open_image_folder),
    ):
        if is_layout(path):
            return open_folder(path, wanted)
    raise DataError(f"{name} holds no known data: give a folder with {LAYOUTS}")


def _normalise(source: Source, name: str, statistics: Statistics | None) -> Source:
    """With mean and deviation: the given ones, or for pixels those of the training examples."""
    preparation = source.preparation
    if statistics is not None:
        num_channels, num_given = preparation.shape[0], len(statistics[0])
        if preparation.vocabulary is not None or num_given not in (1, num_channels):
            what = "text is not normalised" if preparation.vocabulary is not None else f"inputs have {num_channels}"
            raise DataError(f"--normalise gives {num_given} means, but {name}: {what}")
        preparation = replace(preparation, mean=statistics[0], std=statistics[1])
    elif source.has_pixels:
        preparation = measure_statistics(preparation, source.train.sample(choose_sample(len(source.train))))
    return set_preparation(source, preparation)


def set_preparation(source: Source, preparation: Preparation) -> Source:
    """The source with another preparation."""
    for examples in (source.train, source.test, source.validation):
        if examples is not None:
            examples.prepare_as(preparation)
    return replace(source, preparation=preparation)


def _open_validation(source: Source, name: str) -> Examples:
    """All examples of other data, with the classes and the preparation of the training examples."""
    other = _open(name, source.preparation.shape, source.preparation.vocabulary, None)
    set_preparation(other, adapt(source.preparation, other, name))
    parts = [part for part in (other.train, other.validation, other.test) if part is not None]
    if other.classes is not None and source.classes is not None and other.classes != source.classes:
        if extra := sorted(set(other.classes) - set(source.classes)):
            raise DataError(f"--validation {name} has the class {extra[0]!r}, which the training data does not have")
        numbers = torch.tensor([source.classes.index(label) for label in other.classes])
        for part in parts:
            part.targets = numbers[part.targets]
    joined = parts[0]
    for part in parts[1:]:
        joined = Joined(joined, part)
    return joined


def adapt(preparation: Preparation, source: Source, name: str) -> Preparation:
    """A run's preparation for other data: the format of an image gives the largest value of a pixel."""
    is_array = name.endswith(".npz")  # an array is taken to have the run's own
    return preparation if is_array else replace(preparation, scale=source.preparation.scale)
