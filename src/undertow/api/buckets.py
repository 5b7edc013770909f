"""`buckets`: a few lengths to which sequences of many lengths are padded, so that few steps are recorded and planned.

In: the lengths of the data and how many buckets there may be. Out: `Buckets`, the lengths for which the padded work is
least, and `pad`, which brings a tensor to the next of them. The lengths are found by dynamic programming over the
sorted distinct lengths: cost[k][j] = min over i < j of cost[k-1][i] + count(i..j) * length[j], in
O(buckets * distinct lengths^2).

The work of a sequence is counted as its padded length. What a model makes of the padding is the user's: a mask, or a
target that the loss ignores.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from undertow.errors import CallError


@dataclass(frozen=True)
class Buckets:
    """Lengths in rising order; `added` is the share of work that padding the given lengths adds."""

    lengths: tuple[int, ...]
    added: float

    def length_for(self, length: int) -> int:
        """The least bucket that holds `length`."""
        index = bisect_left(self.lengths, length)
        if index == len(self.lengths):
            raise CallError(f"a length of {length} is above the largest bucket, {self.lengths[-1]}; cut the sequence")
        return self.lengths[index]

    def pad(self, tensor: torch.Tensor, value: Any = 0, dim: int = -1) -> torch.Tensor:
        """The tensor, filled up with `value` along `dim` to the next bucket; itself where it has that length."""
        if not -tensor.dim() <= dim < tensor.dim():
            raise CallError(f"dim {dim} does not exist in a tensor of {tensor.dim()} dimensions")
        missing = self.length_for(tensor.shape[dim]) - tensor.shape[dim]
        if missing == 0:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = missing
        return torch.cat([tensor, tensor.new_full(shape, value)], dim)


def buckets(lengths: Iterable[int], num: int = 8) -> Buckets:
    """At most `num` of the given lengths, to which padding all of them costs least; one entry per sequence."""
    counts = Counter(lengths)
    if not counts or any(not isinstance(length, int) or isinstance(length, bool) or length < 0 for length in counts):
        raise CallError("lengths must be whole numbers of at least 0, one per sequence, and at least one of them")
    if not isinstance(num, int) or isinstance(num, bool) or num < 1:
        raise CallError(f"num must be a whole number of at least 1, got {num!r}")
    distinct = sorted(counts)
    chosen = _choose(distinct, [counts[length] for length in distinct], min(num, len(distinct)))
    work = sum(length * count for length, count in counts.items())
    padded = sum(chosen[bisect_left(chosen, length)] * count for length, count in counts.items())
    return Buckets(tuple(chosen), padded / work - 1 if work else 0.0)


def _choose(lengths: list[int], counts: list[int], num: int) -> list[int]:
    """The lengths that end the buckets."""
    before = [0, *accumulate(counts)]
    # best[j]: the least work of the first j lengths; ends[k][j]: how many of them lie before the last of k + 1 buckets.
    best: list[float] = [0.0] + [float("inf")] * len(lengths)
    ends: list[list[int]] = []
    for _ in range(num):
        found = [
            min((best[i] + (before[j] - before[i]) * lengths[j - 1], i) for i in range(j))
            for j in range(1, len(lengths) + 1)
        ]
        best = [0.0, *(cost for cost, _ in found)]
        ends.append([0, *(start for _, start in found)])
    chosen, last = [], len(lengths)
    for row in reversed(ends):
        if last > 0:
            chosen.append(lengths[last - 1])
            last = row[last]
    return chosen[::-1]
