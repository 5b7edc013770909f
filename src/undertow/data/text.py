"""A text file for a character language model: the first nine tenths to train on, the last to test.

An example is a stretch of the text as character numbers. Its target is the same stretch, one character later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from undertow.data.examples import Batch, Examples, Source, hash_rows
from undertow.data.preparation import Change, Preparation, Wanted
from undertow.data.sizes import file_bytes
from undertow.errors import DataError

MAX_TEXT_BYTES = 1 << 30
TRAIN_SHARE = 0.9
DEFAULT_LENGTH = 64


def open_text(path: Path, wanted: Wanted | None, vocabulary: str | None = None) -> Source:
    """Stretches of the model's length; without a vocabulary, the text's characters are it."""
    return cut_text(read_text(path), str(path), wanted, vocabulary)


def cut_text(text: str, what: str, wanted: Wanted | None, vocabulary: str | None) -> Source:
    """A text as stretches to train on and to test on."""
    length = wanted[0] if wanted is not None and len(wanted) == 1 and wanted[0] is not None else DEFAULT_LENGTH
    vocabulary = vocabulary or "".join(sorted(set(text)))
    tokens = encode(text, vocabulary, what)
    middle = int(len(tokens) * TRAIN_SHARE)
    parts = [Stretches(part, length, vocabulary) for part in (tokens[:middle], tokens[middle:])]
    if not all(len(part) for part in parts):
        raise DataError(f"{what} has {len(tokens):,} characters, too few for stretches of {length} to train and test")
    preparation = Preparation((length,), vocabulary=vocabulary)
    return Source(parts[0], parts[1], preparation, tuple(vocabulary), has_pixels=False)


def read_text(path: Path) -> str:
    """The file as UTF-8."""
    if (size := file_bytes(path)) > MAX_TEXT_BYTES:
        raise DataError(f"{path} has {size:,} bytes; texts of at most {MAX_TEXT_BYTES:,} are read")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def encode(text: str, vocabulary: str, what: str) -> torch.Tensor:
    """Characters as their indices in the vocabulary."""
    numbers = {character: number for number, character in enumerate(vocabulary)}
    if unknown := sorted(set(text) - set(numbers)):
        raise DataError(f"{what} has the character {unknown[0]!r}, which the model was not trained on")
    return torch.tensor([numbers[character] for character in text], dtype=torch.int64)


class Stretches(Examples):
    """Consecutive stretches of `length` characters."""

    def __init__(self, tokens: torch.Tensor, length: int, vocabulary: str) -> None:
        self.tokens, self.length, self.vocabulary = tokens, length, vocabulary
        count = max((len(tokens) - 1) // length, 0)
        self.targets = tokens[1 : 1 + count * length].view(count, length)
        self._inputs = tokens[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.targets)

    def fetch(self, indices: Sequence[int], change: Change | None = None) -> Batch:
        chosen = torch.as_tensor(indices)
        return self._inputs[chosen], self.targets[chosen]

    def prepare_as(self, preparation: Preparation) -> None:
        """Characters are numbers already."""

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{hash_rows(self.tokens)} {self.vocabulary}".encode()).hexdigest()
