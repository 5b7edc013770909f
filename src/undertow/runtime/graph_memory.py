"""The memory that a plan takes as a CUDA graph: PyTorch's caching allocator, simulated over the step.

In: a plan. Out: the stretch of memory that its graph starts with, and all the memory that it takes. Tensors that come
and go leave gaps, and a graph does not return its memory. For ResNet-50 and GPT-2 it is 1 to 10 % more than is alive at
the same time. The allocator takes the smallest free block that is large enough, cuts off what is left over, and joins
neighbouring free blocks. A kernel's workspace is simulated as one block; several smaller ones may lie elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from undertow.ir import InputKind, Plan, Program

# c10/core/AllocatorConfig.h: blocks of up to a MiB come from segments of 2 MiB, others from segments of 20 MiB or from
# segments of their own.
BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
MEDIUM_BYTES, MEDIUM_SEGMENT_BYTES = 10 << 20, 20 << 20
SEGMENT_UNIT_BYTES = 2 << 20

NUM_TRIALS = 6  # each halves the range in which the least size of the stretch lies
_SEGMENT_SPAN = 1 << 48  # between the addresses of two segments: their blocks never join


@dataclass(frozen=True)
class GraphMemory:
    """The stretch that a graph starts with, and all that its step takes.

    The total is the stretch, the segments of small tensors, and the copies of the outputs that a call returns.
    """

    stretch_bytes: int
    total_bytes: int


def find_graph_memory(plan: Plan) -> GraphMemory:
    """The least memory found in which the step of `plan` runs as a graph, copies of its arguments included."""
    size = least = max(_simulate(plan, 0).most_bytes, SMALL_BYTES)
    most: int | None = None
    found: dict[int, int] = {}
    for _ in range(NUM_TRIALS):
        simulated = _simulate(plan, size)
        found[size] = simulated.total_bytes
        most = simulated.total_bytes if most is None else most
        least, most = (least, size) if simulated.is_whole else (size, most)
        if least == most:
            break
        size = (least + most) // 2
    best = min(found, key=lambda size: found[size])
    return GraphMemory(best, found[best] + copied_output_bytes(plan.program))


def copied_output_bytes(program: Program) -> int:
    """Bytes of the copies of a graph's outputs that the user gets."""
    return sum(_round_up(value.type.allocated_bytes, BLOCK_BYTES) for value in program.outputs)


@dataclass(frozen=True)
class _Simulated:
    total_bytes: int
    most_bytes: int  # alive at the same time in large blocks
    is_whole: bool  # whether the stretch was enough for the large blocks


def _simulate(plan: Plan, stretch_bytes: int) -> _Simulated:
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
        _made_by_each_node(plan), plan.tables.frees, plan.tables.workspace_bytes, strict=True
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
    return _Simulated(large.segment_bytes + small.segment_bytes, most_bytes, is_whole)


def _made_by_each_node(plan: Plan) -> Iterator[list[int]]:
    """The storages that each node makes."""
    storage = plan.tables.storage
    known = {storage[item.value] for item in plan.program.inputs}
    for node in plan.nodes:
        found = list(dict.fromkeys(storage[value] for value in node.named_outputs if storage[value] not in known))
        known.update(found)
        yield found


class _Allocator:
    """One of the two pools of PyTorch's allocator."""

    def __init__(self, is_small: bool) -> None:
        self._least_rest = BLOCK_BYTES if is_small else SMALL_BYTES + 1  # a smaller rest is not cut off
        self._is_small = is_small
        self._free: list[tuple[int, int]] = []  # size and address, the smallest first
        self._size_at: dict[int, int] = {}  # of free blocks, by their first address
        self._start_of: dict[int, int] = {}  # of free blocks, by the address after them
        self.num_segments = self.segment_bytes = self.alive_bytes = 0

    def add_segment(self, size: int) -> None:
        self.num_segments += 1
        self.segment_bytes += size
        self._add(self.num_segments * _SEGMENT_SPAN, size)

    def allocate(self, num_bytes: int) -> tuple[int, int]:
        """Address and size of a block; both are 0 for no bytes."""
        if not num_bytes:
            return 0, 0
        wanted = _round_up(num_bytes, BLOCK_BYTES)
        index = bisect_left(self._free, (wanted, 0))
        if index == len(self._free):
            self.add_segment(self._segment_for(wanted))
            index = bisect_left(self._free, (wanted, 0))
        size, address = self._free[index]
        self._remove(address, size)
        if size - wanted >= self._least_rest:
            self._add(address + wanted, size - wanted)
            size = wanted
        self.alive_bytes += size
        return address, size

    def free(self, address: int, size: int) -> None:
        """Give a block back and join it with free neighbours."""
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
