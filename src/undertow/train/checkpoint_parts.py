"""A checkpoint that several ranks write at once: each a part of the tensors, and rank 0 the file that makes them one.

In: a checkpoint that is the same on all ranks. Out: files `part-HASH.safetensors` beside `checkpoint.safetensors`,
which lists them and is written last, by a rename. A part's name is the hash of what is in it. Until the rename the
checkpoint before stands, with its own parts; afterwards parts that nothing lists are deleted. Who reads a checkpoint
whose parts are deleted meanwhile reads the one that has replaced it.

A part holds pieces of tensors. A piece is a range of a tensor's elements: `optimizer/3/exp_avg[100:200]`. The main file
has the shape of each tensor that is in pieces, and whoever reads puts them together again. So it does not
matter how many ranks have written it. A rank that holds only a range of a tensor can write that as well.

The folder must be on a disk that all ranks share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from undertow.errors import DataError
from undertow.hashing import hash_tensors
from undertow.train.weights import read_tensors, write_tensors

PART_FORMAT = "undertow part of a checkpoint 1"
NUM_DIGITS = 32  # of a hash, in the name of a file
_PIECE = re.compile(r"(.+)\[(\d+):(\d+)\]")
_PART = re.compile(rf"part-[0-9a-f]{{{NUM_DIGITS}}}\.safetensors")


class PartMissing(DataError):
    """A part is not there: lost, or its checkpoint was replaced while it was read."""


@dataclass(frozen=True)
class Piece:
    """The elements of a tensor from `first` to before `end`."""

    name: str
    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.name}[{self.first}:{self.end}]"


def divide_tensors(tensors: Mapping[str, torch.Tensor], num_parts: int) -> list[list[Piece]]:
    """Pieces of about the same bytes for each part; together they are all elements."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    ends = [total * (part + 1) // num_parts for part in range(num_parts)]
    parts: list[list[Piece]] = [[] for _ in range(num_parts)]
    part, offset = 0, 0
    for name, tensor in tensors.items():
        first, size = 0, tensor.element_size()
        while first < tensor.numel():
            while part < num_parts - 1 and ends[part] - offset < size:
                part += 1
            left = tensor.numel() - first
            taken = left if part == num_parts - 1 else min(left, (ends[part] - offset) // size)
            parts[part].append(Piece(name, first, first + taken))
            first, offset = first + taken, offset + taken * size
    return parts


def write_part(folder: Path, tensors: Mapping[str, torch.Tensor], pieces: Sequence[Piece]) -> str:
    """Write a part, durably; returns the name of its file."""
    content = {str(piece): tensors[piece.name].detach().reshape(-1)[piece.first : piece.end] for piece in pieces}
    digest = hash_tensors(content)
    name = f"part-{digest[:NUM_DIGITS]}.safetensors"
    write_tensors(folder / name, content, {"format": PART_FORMAT, "sha256": digest})
    return name


def read_parts(path: Path, files: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """The tensors of these shapes, from the parts of the checkpoint at `path`; raises DataError."""
    pieces: dict[str, list[tuple[Piece, torch.Tensor]]] = {name: [] for name in shapes}
    for file in files:
        for piece, content in _read_part(path, file):
            if piece.name in pieces:
                pieces[piece.name].append((piece, content))
    return {name: _join(path, name, shape, pieces[name]) for name, shape in shapes.items()}


def _read_part(path: Path, file: str) -> list[tuple[Piece, torch.Tensor]]:
    if not _PART.fullmatch(file):
        raise DataError(f"{path} is refused: it names a part {file!r}, which is no name of one")
    part = path.with_name(file)
    try:
        tensors, metadata = read_tensors(part)
    except (DataError, FileNotFoundError):
        if part.is_file():
            raise
        raise PartMissing(
            f"{path} is a checkpoint in parts, and {file} is missing beside it: bring it back, or go on from another "
            f"checkpoint, such as one of --keep"
        ) from None
    if metadata.get("format") != PART_FORMAT or not file.startswith(f"part-{hash_tensors(tensors)[:NUM_DIGITS]}."):
        raise DataError(f"{part} is damaged: its content does not match the hash in its name")
    found = []
    for name, tensor in tensors.items():
        match = _PIECE.fullmatch(name)
        if match is None or int(match[3]) - int(match[2]) != tensor.numel():
            raise DataError(f"{part} is refused: {name} is no piece of a tensor")
        found.append((Piece(match[1], int(match[2]), int(match[3])), tensor.reshape(-1)))
    return found


def _join(path: Path, name: str, shape: Sequence[int], pieces: Sequence[tuple[Piece, torch.Tensor]]) -> torch.Tensor:
    """The tensor of all its pieces; nothing is allocated before they are known to fit."""
    ordered = sorted(pieces, key=lambda item: item[0].first)
    ends = [0, *(piece.end for piece, _ in ordered)]
    is_whole = all(piece.first == end for (piece, _), end in zip(ordered, ends, strict=False))
    types = {content.dtype for _, content in ordered}
    if not ordered or not is_whole or ends[-1] != prod(shape) or len(types) != 1:
        raise DataError(f"{path} is refused: its parts do not hold all of {name}")
    return torch.cat([content for _, content in ordered]).reshape(tuple(shape))


def delete_other_parts(folder: Path, files: Sequence[str]) -> None:
    """Delete the parts that the checkpoint does not list, and what a killed run has left of them."""
    for path in folder.glob("part-*.safetensors*"):
        if path.name not in files:
            path.unlink(missing_ok=True)
