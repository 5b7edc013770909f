"""The offset of each storage in one arena: storages that are alive at once do not overlap, and the peak hardly grows.

In: which storages may lie there, when each is alive, and the workspace of kernels. Out: the offset of each, None for
those that stay outside. The arena is there from the first operation to the last. So the peak becomes its size plus the
most that is alive outside it at once. This may exceed the most that is alive at once, by the gaps that are allowed.

Storages are placed one by one, each at the lowest offset that is free as long as it is alive: the largest first
(Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020: greedy by size), or the longest
alive first, or the largest size times life first. At the peak there may be no gap at all, and each order succeeds where
others fail. A storage for which there is no offset stays outside, if there is room; if not, a smaller arena is tried.
The arena that holds most is taken. Numba compiles the loops over pairs of storages: a step has thousands of storages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from undertow.kernels.compiler import cached_njit

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
NUM_SIZES = 16  # of arenas that are tried, evenly spaced


def place(
    sizes: Sequence[int],
    stretches: Sequence[tuple[int, int] | None],
    is_movable: Sequence[bool],
    workspaces: Sequence[Sequence[int]],
    gap_bytes: int,
) -> tuple[tuple[int | None, ...], int]:
    """The offset of each storage, None outside of the arena, and by how much the arena raises the peak.

    `workspaces` are the bytes of the kernel of each moment. Where they are not known, there are several guesses, and
    the arena has to fit with each. With none of them may the peak grow by more than `gap_bytes`.
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
    # What the arena and the storages outside may take together, at each moment.
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
    """The offsets that put most bytes into the arena; `room` is what storages may take at each moment, in it or not."""
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


@cached_njit()
def _place(starts: Any, ends: Any, sizes: Any, room_outside: Any, arena_bytes: int, offsets: Any) -> bool:
    """Fill `offsets`, -1 for what stays outside; False where a storage has no room in the arena and none outside."""
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
