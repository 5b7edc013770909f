"""The memory that a plan takes as a CUDA graph: PyTorch's caching allocator, played through the step.

In: a plan. Out: the stretch of memory with which its graph is to start, and all that it will hold. Tensors that come
and go leave gaps, and a graph keeps the memory for good: of ResNet-50 and GPT-2, 1 to 10 % more than is alive at once.
The allocator takes the smallest free block that is large enough, cuts off what is left over, and joins what is free
side by side. Kernels' workspace is played as one block beside the outputs; several smaller ones may lie otherwise.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from undertow.ir import InputKind, Plan, Program

# c10/core/AllocatorConfig.h: blocks of up to a MiB come from segments of two, others from such of 20 or their own.
BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
MEDIUM_BYTES, MEDIUM_SEGMENT_BYTES = 10 << 20, 20 << 20
SEGMENT_UNIT_BYTES = 2 << 20

NUM_TRIALS = 6  # each halves what may be too much of the stretch
_SEGMENT_SPAN = 1 << 48  # between two segments' addresses: they never join


@dataclass(frozen=True)
class GraphMemory:
    """The stretch that a graph starts with, and all that its step takes.

    That is the stretch, segments of small tensors, and the outputs, of which every call hands out copies.
    """

    stretch_bytes: int
    total_bytes: int


def find_graph_memory(plan: Plan) -> GraphMemory:
    """The least memory found in which the step of `plan` runs as a graph, copies of its arguments included."""
    size = least = max(_play(plan, 0).most_bytes, SMALL_BYTES)
    most: int | None = None
    found: dict[int, int] = {}
    for _ in range(NUM_TRIALS):
        played = _play(plan, size)
        found[size] = played.total_bytes
        most = played.total_bytes if most is None else most
        least, most = (least, size) if played.is_whole else (size, most)
        if least == most:
            break
        size = (least + most) // 2
    best = min(found, key=lambda size: found[size])
    return GraphMemory(best, found[best] + copied_output_bytes(plan.program))


def copied_output_bytes(program: Program) -> int:
    """The copies of a graph's outputs that its user is given."""
    return sum(_round_up(value.type.allocated_bytes, BLOCK_BYTES) for value in program.outputs)


@dataclass(frozen=True)
class _Played:
    total_bytes: int
    most_bytes: int  # alive at once in large blocks
    is_whole: bool  # whether the stretch was enough for these


def _play(plan: Plan, stretch_bytes: int) -> _Played:
    large, small = _Allocator(is_small=False), _Allocator(is_small=True)
    if stretch_bytes:
        large.add_segment(_round_up(stretch_bytes, SEGMENT_UNIT_BYTES))
    num_segments = large.num_segments

    def allocator_for(size: int) -> _Allocator:
        return small if size <= SMALL_BYTES else large

    for item in plan.program.inputs:
        if item.kind is InputKind.ARGUMENT:
            allocator_for(item.value.type.allocated_bytes).allocate(item.value.type.allocated_bytes)
    sizes, blocks = plan.tables.storage_bytes, {}
    most_bytes = large.alive_bytes
    for storages, freed, workspace_bytes in zip(
        _births(plan), plan.tables.frees, plan.tables.workspace_bytes, strict=True
    ):
        for storage in storages:
            blocks[storage] = allocator_for(sizes[storage]).allocate(sizes[storage])
        workspace = allocator_for(workspace_bytes).allocate(workspace_bytes) if workspace_bytes else None
        most_bytes = max(most_bytes, large.alive_bytes)
        if workspace is not None:
            allocator_for(workspace_bytes).free(*workspace)
        for storage in freed:
            if storage in blocks:
                allocator_for(sizes[storage]).free(*blocks.pop(storage))
    is_whole = large.num_segments == num_segments
    return _Played(large.segment_bytes + small.segment_bytes, most_bytes, is_whole)


def _births(plan: Plan) -> Iterator[list[int]]:
    """The storages that each node makes."""
    storage = plan.tables.storage
    known = {storage[item.value] for item in plan.program.inputs}
    for node in plan.nodes:
        found = list(dict.fromkeys(storage[value] for value in node.named_outputs if storage[value] not in known))
        known.update(found)
        yield found


class _Allocator:
    """One of the allocator's two pools."""

    def __init__(self, is_small: bool) -> None:
        self._least_rest = BLOCK_BYTES if is_small else SMALL_BYTES + 1  # less is not cut off
        self._is_small = is_small
        self._free: list[tuple[int, int]] = []  # size and address, the smallest first
        self._size_at: dict[int, int] = {}  # of free blocks, by where they start
        self._start_of: dict[int, int] = {}  # and by where they end
        self.num_segments = self.segment_bytes = self.alive_bytes = 0

    def add_segment(self, size: int) -> None:
        self.num_segments += 1
        self.segment_bytes += size
        self._add(self.num_segments * _SEGMENT_SPAN, size)

    def allocate(self, num_bytes: int) -> tuple[int, int]:
        """Address and size of a block; for no bytes there is none."""
        if not num_bytes:
            return 0, 0
        wanted = _round_up(num_bytes, BLOCK_BYTES)
        place = bisect_left(self._free, (wanted, 0))
        if place == len(self._free):
            self.add_segment(self._segment_for(wanted))
            place = bisect_left(self._free, (wanted, 0))
        size, address = self._free[place]
        self._remove(address, size)
        if size - wanted >= self._least_rest:
            self._add(address + wanted, size - wanted)
            size = wanted
        self.alive_bytes += size
        return address, size

    def free(self, address: int, size: int) -> None:
        """Give a block back; free neighbours become one with it."""
        if not size:
            return
        self.alive_bytes -= size
        after = self._size_at.get(address + size)
        if after is not None:
            self._remove(address + size, after)
            size += after
        before = self._start_of.get(address)
        if before is not None:
            size += address - before
            self._remove(before, address - before)
            address = before
        self._add(address, size)

    def _segment_for(self, size: int) -> int:
        if self._is_small:
            return SMALL_SEGMENT_BYTES
        return MEDIUM_SEGMENT_BYTES if size < MEDIUM_BYTES else _round_up(size, SEGMENT_UNIT_BYTES)

    def _add(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._size_at[address] = size
        self._start_of[address + size] = address

    def _remove(self, address: int, size: int) -> None:
        del self._free[bisect_left(self._free, (size, address))]
        del self._size_at[address]
        del self._start_of[address + size]


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
