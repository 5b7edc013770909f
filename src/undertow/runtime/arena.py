"""The arena of a step: one allocation that is made once, in which values lie at the offsets that the plan gives them.

In: a plan. Out: a tensor for each value that has an offset. The tensors too are made once, and every call writes into
them. Each has a storage of its own, as if it had been allocated, because operations look at where in its storage a
tensor begins.

The arena belongs to one call at a time. A second call that starts before the first ends, in another thread or by
recursion, gets memory of its own. Steps that take turns, such as those of the shards of a batch, share one allocation:
each takes it if it is large enough, and not so large that the step would exceed its budget.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass, field
from functools import partial

import torch

from undertow.ir import Plan, Value

HUGE_PAGE_BYTES = 1 << 21
SPARE_SHARE = 32  # without a budget a step may lie in memory that is larger than its arena by this part of it
MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)


@dataclass(eq=False)
class Block:
    """An allocation, and for each arena that was in it the tensors of its values."""

    memory: torch.Tensor
    tensors: dict[Arena, list[torch.Tensor]] = field(default_factory=dict)


class ArenaMemory:
    """The allocation in which arenas lie that are not used at the same time; a call takes it out."""

    def __init__(self) -> None:
        self.free: list[Block] = []

    def take(self, least_bytes: int, most_bytes: int) -> Block:
        """The block, for one call only; allocated again if its size is not within these bounds."""
        found = self.free.pop() if self.free else None
        if found is not None and least_bytes <= found.memory.numel() <= most_bytes:
            return found
        found = None  # freed before the other is there
        with torch.inference_mode(False):
            memory = torch.empty(least_bytes, dtype=torch.uint8)
            _ask_for_huge_pages(memory)
            return Block(memory)

    def give_back(self, block: Block) -> None:
        """Store the block for the next call."""
        self.free[:] = [block]

    def release(self) -> None:
        """Free the memory until the next call."""
        self.free.clear()

    def limit(self, most_bytes: int) -> None:
        """Free the memory if it is larger than this, for a step that does not use it."""
        self.free[:] = [block for block in self.free if block.memory.numel() <= most_bytes]


class Arena:
    """The values of a plan that have an offset, and the memory they lie in."""

    def __init__(self, plan: Plan, memory: ArenaMemory) -> None:
        tables = plan.tables
        self.memory, self.num_bytes = memory, tables.arena_bytes
        spare_bytes = self.num_bytes // SPARE_SHARE
        if plan.budget_bytes is not None:
            spare_bytes = max(plan.budget_bytes - plan.peak_bytes, 0)
        self.most_bytes = self.num_bytes + spare_bytes
        offsets = {value: tables.offsets[tables.storage[value]] for node in plan.nodes for value in node.named_outputs}
        made: dict[int, Value] = {}
        for value, first in offsets.items():
            if first is not None:
                made.setdefault(tables.storage[value], value)  # others of the storage are views, or written over it
        self.values: tuple[Value, ...] = tuple(made.values())
        self._offsets = [first for value in self.values if (first := offsets[value]) is not None]

    def take(self) -> Block:
        """The memory, with a tensor for each of the arena's values, for one call only."""
        block = self.memory.take(self.num_bytes, self.most_bytes)
        if self not in block.tensors:
            with torch.inference_mode(False):
                block.tensors[self] = list(map(partial(_view, block.memory), self._offsets, self.values))
        return block


def _view(memory: torch.Tensor, first: int, value: Value) -> torch.Tensor:
    kind = value.tensor_type
    part = memory.numpy()[first : first + kind.num_bytes]
    return torch.from_numpy(part).view(kind.dtype).as_strided(kind.shape, kind.strides)


def _ask_for_huge_pages(memory: torch.Tensor) -> None:
    """Only a request: where the system grants none, the memory stays as it was."""
    if MADV_HUGEPAGE is None or not sys.platform.startswith("linux"):
        return
    first = -(-memory.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    num_bytes = (memory.data_ptr() + memory.numel() - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if num_bytes > 0:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), ctypes.c_int(MADV_HUGEPAGE))
