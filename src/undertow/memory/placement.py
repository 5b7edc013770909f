"""Where each storage lies in one arena: no two that are alive at once overlap, and the step's peak hardly grows.

In: which storages may lie there, when each is alive, and what kernels allocate for themselves meanwhile. Out: the first
byte of each, None for those that stay outside. The arena is there from the first operation to the last, so with it the
peak is its size and the most that is held outside at once; that may be more than the most that is alive at once by the
gaps that are allowed, and no more.

The largest first, each at the lowest place that is free during all of its life (Pisarchyk and Lee, "Efficient Memory
Management for Deep Neural Net Inference", 2020: greedy by size), or those first that live longest, or whose size times
life is largest: at the peak nothing may be lost, and each order succeeds where others fail. What finds no place in the
arena stays outside if there is room for it there; if not, a smaller arena is tried. The one that holds most is taken.
The loops over pairs are Numba's: a step has thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from undertow.kernels.compiler import numba

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
NUM_SIZES = 16  # of arenas that are tried, evenly spaced


def place(
    sizes: Sequence[int],
    stretches: Sequence[tuple[int, int] | None],
    is_movable: Sequence[bool],
    workspaces: Sequence[Sequence[int]],
    gap_bytes: int,
) -> tuple[tuple[int | None, ...], int]:
    """The first byte of each storage, None outside of the arena, and by how much the arena raises the peak.

    `workspaces` are the bytes of each moment's kernel: where they are not known, several guesses that must all hold.
    The peak may grow by `gap_bytes`, of whichever guess.
    """
    members = [index for index, can_move in enumerate(is_movable) if can_move]
    offsets: list[int | None] = [None] * len(sizes)
    if not members:
        return tuple(offsets), 0
    outside, alive = numpy.zeros((2, len(workspaces[0])), numpy.int64)
    for size, stretch, can_move in zip(sizes, stretches, is_movable, strict=True):
        if stretch is not None:
            alive[stretch[0] : stretch[1] + 1] += size
            outside[stretch[0] : stretch[1] + 1] += 0 if can_move else size
    guesses = numpy.array(workspaces, numpy.int64)
    # What arena and outside may take together, at each moment.
    limits = ((alive + guesses).max(1, keepdims=True) + gap_bytes - guesses).min(0)
    best = _find_best(sizes, stretches, members, limits - outside)
    if not best:
        return tuple(offsets), 0
    for index in members:
        offsets[index] = best.get(index)
        if index not in best:
            outside[stretches[index][0] : stretches[index][1] + 1] += sizes[index]  # type: ignore[index]
    arena_bytes = max(offset + sizes[index] for index, offset in best.items())
    return tuple(offsets), int(arena_bytes + (outside + guesses[0]).max() - (alive + guesses[0]).max())


def _find_best(
    sizes: Sequence[int], stretches: Sequence[tuple[int, int] | None], members: list[int], room: Any
) -> dict[int, int]:
    """The offsets that put most bytes into the arena; `room` is for members, in it or outside, at each moment."""
    best: dict[int, int] = {}
    best_bytes = 0
    lives = {index: stretch[1] - stretch[0] + 1 for index in members if (stretch := stretches[index]) is not None}
    orders = [
        sorted(members, key=lambda index: (-sizes[index], index)),
        sorted(members, key=lambda index: (-sizes[index] * lives[index], index)),
        sorted(members, key=lambda index: (-lives[index], index)),
    ]
    all_bytes, most_bytes = sum(sizes[index] for index in members), int(room.min())
    tries = [
        (
            order,
            *numpy.array([stretches[index] for index in order], numpy.int64).T,
            numpy.array([sizes[index] for index in order], numpy.int64),
        )
        for order in orders
    ]
    for part in range(NUM_SIZES, 0, -1):
        arena_bytes = most_bytes * part // NUM_SIZES
        for order, starts, ends, plain in tries:
            found = numpy.empty(len(order), numpy.int64)
            is_sound = _place(starts, ends, plain, room - arena_bytes, arena_bytes, found)
            if is_sound and (placed_bytes := int(plain[found >= 0].sum())) > best_bytes:
                best_bytes = placed_bytes
                best = {index: offset for index, offset in zip(order, found.tolist(), strict=True) if offset >= 0}
        if best_bytes == all_bytes:
            break
    return best


@numba.njit(cache=True)
def _place(starts: Any, ends: Any, sizes: Any, room_outside: Any, arena_bytes: int, offsets: Any) -> bool:
    """Fill `offsets`, -1 for what stays outside; False where something has room neither here nor there."""
    by_offset = numpy.empty(sizes.size, numpy.int64)  # those placed so far, lowest first
    num_placed = 0
    for current in range(sizes.size):
        aligned = (sizes[current] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        lowest = 0
        for position in range(num_placed):
            other = by_offset[position]
            if starts[other] <= ends[current] and starts[current] <= ends[other]:
                if offsets[other] - lowest >= aligned:
                    break
                end = offsets[other] + (sizes[other] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
                lowest = max(lowest, end)
        if lowest + aligned > arena_bytes:
            offsets[current] = -1
            for moment in range(starts[current], ends[current] + 1):
                room_outside[moment] -= sizes[current]
                if room_outside[moment] < 0:
                    return False
            continue
        offsets[current] = lowest
        position = num_placed
        while position > 0 and offsets[by_offset[position - 1]] > lowest:
            by_offset[position] = by_offset[position - 1]
            position -= 1
        by_offset[position] = current
        num_placed += 1
    return True
