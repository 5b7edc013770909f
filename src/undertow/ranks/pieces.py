"""Pieces of parameters: which elements of which parameter a rank updates.

In: a bucket, whose parameters lie one after the other, and where the parts of the ranks begin and end. Out: the pieces
of each rank. A rank has at most one piece of a parameter, because a parameter is in one bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Elements of a parameter, as they lie in memory, from `first` to before `end`."""

    name: str
    first: int
    end: int

    @property
    def num_elements(self) -> int:
        """How many they are."""
        return self.end - self.first

    def __str__(self) -> str:
        return f"{self.name}[{self.first}:{self.end}]"


def cut_pieces(names: Sequence[str], sizes: Sequence[int], cuts: Sequence[int]) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each rank's part of a bucket."""
    found: list[list[Piece]] = [[] for _ in cuts[1:]]
    start = 0
    for name, size in zip(names, sizes, strict=True):
        for rank, own in enumerate(found):
            first, end = max(cuts[rank] - start, 0), min(cuts[rank + 1] - start, size)
            if first < end:
                own.append(Piece(name, first, end))
        start += size
    return tuple(map(tuple, found))
