"""The arena of a step: one allocation that is made once, in which values lie at the offsets that the plan gives them.

In: a plan. Out: a tensor for each value that has an offset. The tensors too are made once, and every call writes into
them. Each has a storage of its own, as if it had been allocated, because operations look at where in its storage a
tensor begins.

The arena belongs to one call at a time. A second call that starts before the first ends, in another thread or by
recursion, gets memory of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import partial

import torch

from undertow.ir import Plan, Value

HUGE_PAGE_BYTES = 1 << 21
MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)


class Arena:
    """The values of a plan that have an offset, and the memory they lie in."""

    def __init__(self, plan: Plan) -> None:
        tables = plan.tables
        self._num_bytes = tables.arena_bytes
        offsets = {value: tables.offsets[tables.storage[value]] for node in plan.nodes for value in node.named_outputs}
        made: dict[int, Value] = {}
        for value, first in offsets.items():
            if first is not None:
                made.setdefault(tables.storage[value], value)  # others of the storage are views, or written over it
        self.values: tuple[Value, ...] = tuple(made.values())
        self._offsets = [first for value in self.values if (first := offsets[value]) is not None]
        self._free: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def take(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The memory and the tensors in it, for one call only."""
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give_back(self, memory: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
        """Store the memory for the next call."""
        self._free[:] = [memory]

    def release(self) -> None:
        """Free the memory until the next call."""
        self._free.clear()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The memory that is there between calls."""
        return [memory for memory, _ in self._free]

    def _make(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with torch.inference_mode(False):
            memory = torch.empty(self._num_bytes, dtype=torch.uint8)
            _ask_for_huge_pages(memory)
            return memory, list(map(partial(_view, memory), self._offsets, self.values))


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
