"""A budget as the operating system sees it: memory that the C library holds without using it is returned in time.

In: a plan with a budget. Out: for its large operations, a call that makes room before each of them. glibc keeps what a
step frees, for reuse, and cannot always reuse it: pieces are too small, or lie elsewhere. So the process may hold far
more than the step, although the allocator never gave out more than the budget. Before an operation takes memory, the
process's resident memory is read, which takes two microseconds. If the operation could lift it above the limit,
`malloc_trim` returns every free page. Far from the peak nothing is returned, and memory stays mapped.

After a trim nothing free is resident. What the process then holds beyond the step (libraries, data of the user's own)
is known, and the limit is that much plus the budget. Before the first trim of a plan the pages of LLVM's library, which
planning has read and no step reads, are dropped as well: 65 MiB, which are read again when something is compiled.

Does nothing where the C library is not glibc.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from undertow.ir import Node, Plan
from undertow.ir.plan import ARENA_GAPS

COMPILER = "libllvmlite"  # the file that has LLVM
FEWEST_BYTES = 1 << 20  # operations that take less do not look
# Small operations do not look, and pages are larger than what lies in them.
SLACK_SHARE, SLACK_BYTES = 64, 8 << 20


def rooms_of(plan: Plan) -> Mapping[Node, Callable[[], None]]:
    """For each large operation of a plan with a budget on the CPU, the call that makes room for it."""
    is_on_cpu = all(item.value.tensor_type.device.type == "cpu" for item in plan.program.inputs)
    if plan.budget_bytes is None or not is_on_cpu or trim_memory is None:
        return {}
    limit = ResidentLimit(plan.budget_bytes)
    return {
        node: partial(limit.make_room, taken_bytes, held_bytes)
        for node, (taken_bytes, held_bytes) in zip(plan.nodes, _taken_and_held(plan), strict=True)
        if taken_bytes >= FEWEST_BYTES
    }


class ResidentLimit:
    """How many bytes the process may hold while one step runs."""

    def __init__(self, budget_bytes: int) -> None:
        self._allowed_bytes = budget_bytes + budget_bytes // SLACK_SHARE + SLACK_BYTES
        self._limit_bytes = 0  # not known before the first trim

    def make_room(self, taken_bytes: int, held_bytes: int) -> None:
        """Return free memory to the system, if what is about to be taken could exceed the limit.

        `held_bytes` is what the step holds at this moment.
        """
        if resident_bytes() + taken_bytes > self._limit_bytes:
            if not self._limit_bytes:
                drop_compiler()
            trim_memory()
            self._limit_bytes = resident_bytes() - held_bytes + self._allowed_bytes


def _taken_and_held(plan: Plan) -> list[tuple[int, int]]:
    """What each operation takes from the allocator, and what the step holds before that: its whole arena, always."""
    tables = plan.tables
    inputs = {tables.storage[item.value] for item in plan.program.inputs}
    held_bytes = sum(size for name, size in plan.held.items() if name != ARENA_GAPS) + tables.arena_bytes
    cotangents = {tables.storage[item.value] for item in plan.program.cotangents}
    found, seen = [], set(inputs)
    for position, node in enumerate(plan.nodes):
        if position == plan.program.boundary:
            held_bytes += sum(tables.storage_bytes[storage] for storage in cotangents - seen)
            seen |= cotangents
        made = {tables.storage[value] for value in node.named_outputs} - seen
        seen |= made
        made_bytes = sum(tables.storage_bytes[item] for item in made if tables.offsets[item] is None)
        found.append((made_bytes + tables.workspace_bytes[position], held_bytes))
        freed = (item for item in tables.frees[position] if tables.offsets[item] is None)
        held_bytes += made_bytes - sum(tables.storage_bytes[item] for item in freed)
    return found


def _find_trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if found is None else partial(found, 0)


trim_memory: Callable[[], Any] = _find_trim()


def drop_compiler() -> None:
    """Take the pages of LLVM's library out of this process; only such as nobody has written to, so nothing is lost."""
    madvise = ctypes.CDLL(None).madvise
    first = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *words = line.split()
        if not key.endswith(":"):
            is_compiler = Path(words[-1]).name.startswith(COMPILER)
            first, end = (int(address, 16) for address in key.split("-")) if is_compiler else (0, 0)
        elif key == "Anonymous:" and words[0] == "0" and end > first:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


@cache
def _open_counts() -> int:
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


os.register_at_fork(after_in_child=_open_counts.cache_clear)  # the parent's file counts the parent's pages


def resident_bytes() -> int:
    """What of this process's memory is in use, as the system counts it."""
    return int(os.pread(_open_counts(), 64, 0).split()[1]) * os.sysconf("SC_PAGESIZE")
