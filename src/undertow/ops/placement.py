"""Where each storage lies in one stretch of memory: no two that are alive at once overlap.

The largest first, each at the lowest place that is free during all of its life (Pisarchyk and Lee, "Efficient Memory
Management for Deep Neural Net Inference", 2020: greedy by size). The loop over pairs is Numba's: a step has thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from undertow.kernels.compiler import numba

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


def place(sizes: Sequence[int], stretches: Sequence[tuple[int, int] | None]) -> tuple[int | None, ...]:
    """The first byte of each storage; None for those without a stretch of life."""
    members = [index for index, stretch in enumerate(stretches) if stretch is not None]
    members.sort(key=lambda index: (-sizes[index], index))
    starts = numpy.array([stretches[index][0] for index in members], numpy.int64)  # type: ignore[index]
    ends = numpy.array([stretches[index][1] for index in members], numpy.int64)  # type: ignore[index]
    aligned = numpy.array([-(-sizes[index] // ALIGNMENT) * ALIGNMENT for index in members], numpy.int64)
    offsets: list[int | None] = [None] * len(sizes)
    for index, offset in zip(members, _place(starts, ends, aligned).tolist(), strict=True):
        offsets[index] = offset
    return tuple(offsets)


@numba.njit(cache=True)
def _place(starts: Any, ends: Any, sizes: Any) -> Any:
    count = sizes.size
    offsets = numpy.zeros(count, numpy.int64)
    by_offset = numpy.empty(count, numpy.int64)  # those placed so far, lowest first
    for current in range(count):
        best = 0
        for position in range(current):
            other = by_offset[position]
            if starts[other] <= ends[current] and starts[current] <= ends[other]:
                if offsets[other] - best >= sizes[current]:
                    break
                best = max(best, offsets[other] + sizes[other])
        offsets[current] = best
        position = current
        while position > 0 and offsets[by_offset[position - 1]] > best:
            by_offset[position] = by_offset[position - 1]
            position -= 1
        by_offset[position] = current
    return offsets
