"""One flat array with an instance and a schedule under edit, so that compiled code passes a single argument.

In: an `Instance`, an order mode, how often each kind runs. Out: an int64 array. Its first words are the numbers and the
offsets named below; `at(state, POSITION_OF, run)` reads column POSITION_OF at `run`, and
`state[state[POSITION_OF] + run] = position` writes it.

Why not a tuple of arrays or a class: Numba passes every array as seven words and compiles each of them into every
function; with some thirty columns that made compiling take 40 s, and the calls cost more than the work.

Does not know what a valid edit is (see `sequence`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from undertow.kernels.compiler import cached_njit
from undertow.planner.instance import Instance, Int64s

READ, WRITE, DESTROY = 0, 1, 2  # how a run uses a value; after a destroying read it cannot be read
START, END = 0, 1  # two runs that compute nothing: START writes the initial values, END reads the targets

NUMBERS = range(12)
# Numbers of the schedule under edit, then numbers that never change.
BUDGET, EXCESS, TIME, NUM_FREE, NUM_REPEATED, NUM_JOURNAL, NUM_LINKED, NUM_LIVE, RANDOM = NUMBERS[:9]
NUM_VALUES, MAXIMUM_JOURNAL, MAXIMUM_STACK = NUMBERS[9:]

COLUMNS = range(len(NUMBERS), len(NUMBERS) + 37)
# By value.
SIZE, WRITER_STARTS, USE_STARTS, NUM_USES = COLUMNS[:4]
# By kind. A kind touches what it reads, from READ_STARTS[kind] to WRITE_STARTS[kind], and then what it writes.
DURATION, WORKSPACE, READ_STARTS, WRITE_STARTS, CAN_REPEAT, REUSE_READ, REUSE_BYTES, IS_BASE = COLUMNS[4:12]
RUNS_OF_KIND, PINNED_RUN, REPEATED, REPEATED_INDEX = COLUMNS[12:16]
# By run.
RUN_KIND, POSITION_OF, NEXT_RUN, PREV_RUN, IS_ACTIVE, LIVE_RUNS, LIVE_INDEX, FREE_RUNS = COLUMNS[16:24]
# By position.
RUN_AT, PROFILE = COLUMNS[24:26]
# By an index of its own.
TOUCHED, TOUCH_FLAGS, WRITERS, USES, JOURNAL_ENTRY, JOURNAL_RUN, JOURNAL_BEFORE, STACK_RUN, STACK_NEXT = COLUMNS[26:35]
INITIAL, TARGETS = COLUMNS[35:]

# With fewer kinds there is more room for repeated runs, since it costs little. A move that needs more is refused.
SMALL_KINDS = 3000


# For functions that only compiled code calls. Without the two entry points, compiling takes a third less time.
inner: Any = cached_njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)


@inner
def at(state, column, index):
    """One word of a column."""
    return state[state[column] + index]


def make_state(instance: Instance, is_fixed_order: bool, num_scheduled: Int64s, seed: int) -> Int64s:
    """The state of an instance with an empty schedule; `num_scheduled` counts the runs of each kind to come."""
    num_kinds, num_values = instance.num_kinds, instance.num_values
    is_small = num_kinds < SMALL_KINDS
    touched, flags, read_starts, write_starts = _touched(instance)
    runs_of_touched = np.repeat(1 + num_scheduled, np.diff(read_starts))
    num_uses = np.bincount(touched, weights=runs_of_touched, minlength=num_values).astype(np.int64)
    capacity = (6 if is_small else 3) * num_uses + (32 if is_small else 16)
    max_runs = (10 if is_small else 4) * num_kinds + 2 * int(num_scheduled.sum()) + 64
    max_journal = 4 * max_runs
    is_base = np.zeros(num_kinds, np.int64)
    is_base[instance.order] = is_fixed_order
    writers = instance.writers()
    columns = {
        SIZE: instance.size_bytes,
        WRITER_STARTS: writers.starts,
        USE_STARTS: np.concatenate([[0], np.cumsum(capacity)]),
        NUM_USES: np.zeros(num_values),
        DURATION: instance.duration,
        WORKSPACE: instance.workspace_bytes,
        READ_STARTS: read_starts,
        WRITE_STARTS: write_starts,
        CAN_REPEAT: instance.can_repeat,
        REUSE_READ: instance.reuse_read,
        REUSE_BYTES: instance.reuse_bytes(),
        IS_BASE: is_base,
        RUNS_OF_KIND: np.zeros(num_kinds),
        PINNED_RUN: np.full(num_kinds, -1),
        REPEATED: np.zeros(num_kinds),
        REPEATED_INDEX: np.full(num_kinds, -1),
        RUN_KIND: np.full(max_runs, -1),
        POSITION_OF: np.zeros(max_runs),
        NEXT_RUN: np.full(max_runs, -1),
        PREV_RUN: np.full(max_runs, -1),
        IS_ACTIVE: np.zeros(max_runs),
        LIVE_RUNS: np.zeros(max_runs),
        LIVE_INDEX: np.full(max_runs, -1),
        FREE_RUNS: np.arange(max_runs - 1, 1, -1),
        RUN_AT: np.full(2 * max_runs + 8, -1),
        PROFILE: np.zeros(2 * max_runs + 8),
        TOUCHED: touched,
        TOUCH_FLAGS: flags,
        WRITERS: writers.items,
        USES: np.zeros(int(capacity.sum())),
        JOURNAL_ENTRY: np.zeros(max_journal),
        JOURNAL_RUN: np.zeros(max_journal),
        JOURNAL_BEFORE: np.zeros(max_journal),
        STACK_RUN: np.zeros(max_runs),
        STACK_NEXT: np.zeros(max_runs),
        INITIAL: instance.initial,
        TARGETS: instance.targets,
    }
    numbers = np.zeros(len(NUMBERS) + len(COLUMNS), np.int64)
    numbers[NUM_FREE] = max_runs - 2
    numbers[NUM_VALUES], numbers[MAXIMUM_JOURNAL], numbers[MAXIMUM_STACK] = num_values, max_journal, max_runs
    numbers[RANDOM] = seed * 0x9E3779B9 + 0x1234567
    offset = len(numbers)
    for column in COLUMNS:
        numbers[column] = offset
        offset += len(columns[column])
    return np.concatenate([numbers] + [np.asarray(columns[column], np.int64) for column in COLUMNS])


def _touched(instance: Instance) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """For each kind the values it reads and then those it writes, with flags, and where both parts begin."""
    reads, writes, destroys = instance.reads, instance.writes, instance.destroys
    # Reads of kind k move up by the writes of the kinds before it, writes by the reads of kinds up to k.
    read_indices = np.arange(len(reads.items)) + writes.starts[reads.owners()]
    write_indices = np.arange(len(writes.items)) + reads.starts[writes.owners() + 1]
    touched, flags = np.zeros((2, len(reads.items) + len(writes.items)), np.int64)
    touched[read_indices], touched[write_indices] = reads.items, writes.items
    is_destroyed = np.isin(
        reads.owners() * instance.num_values + reads.items, destroys.owners() * instance.num_values + destroys.items
    )
    flags[read_indices] = np.where(is_destroyed, DESTROY, READ)
    flags[write_indices] = WRITE
    read_starts = reads.starts + writes.starts
    return touched, flags, read_starts, read_starts[:-1] + np.diff(reads.starts)
