"""A schedule under edit, with its memory profile, for Numba: the primitives that every move of the search is made of.

In: a state array and a schedule. Out: edits of the schedule. Runs are linked, activated, deactivated and unlinked. Each
edit updates the bytes per position, the summed excess over the budget and the total time; a journal takes a whole move
back.

Runs have numbered *positions* with gaps between them, so that a run is inserted without renumbering. This is the layout
of FastSA (Fujii et al., NeurIPS 2023), where a segment tree has the maximum. Here the profile is a flat array. Adding
to a stretch of it is one vectorised loop, which also yields the change of the *summed* excess over the budget; that
tells the search far more than the maximum does. `profile[position]` is the bytes alive minus the budget. A position
without an active run has -EMPTY added, so that it never counts.

Each value has a list of its uses, sorted by position: `run * 4 + flag`. A value is alive over a stretch that starts at
a write and ends at the last read before the next write. Inserting or removing one use changes at most one stretch.
START writes the initial values and END reads the targets, which makes both ordinary uses.

Does not choose anything. Capacities are fixed at creation; a run that would overflow one is refused.
"""

from __future__ import annotations

import numpy as np

from undertow.kernels.compiler import cached_njit
from undertow.planner.instance import Instance, Int64s
from undertow.planner.state import (
    BUDGET,
    CAN_REPEAT,
    DESTROY,
    DURATION,
    END,
    EXCESS,
    FREE_RUNS,
    INITIAL,
    IS_ACTIVE,
    IS_BASE,
    JOURNAL_BEFORE,
    JOURNAL_ENTRY,
    JOURNAL_RUN,
    LIVE_INDEX,
    LIVE_RUNS,
    MAXIMUM_JOURNAL,
    MAXIMUM_STACK,
    NEXT_RUN,
    NUM_FREE,
    NUM_JOURNAL,
    NUM_LINKED,
    NUM_LIVE,
    NUM_REPEATED,
    NUM_USES,
    NUM_VALUES,
    PINNED_RUN,
    POSITION_OF,
    PREV_RUN,
    PROFILE,
    READ,
    READ_STARTS,
    REPEATED,
    REPEATED_INDEX,
    REUSE_BYTES,
    REUSE_READ,
    RUN_AT,
    RUN_KIND,
    RUNS_OF_KIND,
    SIZE,
    START,
    TARGETS,
    TIME,
    TOUCH_FLAGS,
    TOUCHED,
    USE_STARTS,
    USES,
    WORKSPACE,
    WRITE,
    WRITE_STARTS,
    at,
    inner,
    make_state,
)

EMPTY = 1 << 60
LINKED, ACTIVATED, DEACTIVATED, UNLINKED = 0, 1, 2, 3  # journal entries
MAXIMUM_SHIFT = 48  # runs moved aside for one insertion before all gaps are spread again


def make_sequence(instance: Instance, schedule: Int64s, is_fixed_order: bool, budget_bytes: int, seed: int) -> Int64s:
    """A state array with a valid schedule laid out in it, measured against a budget."""
    num_scheduled = np.bincount(schedule, minlength=instance.num_kinds)
    state = make_state(instance, is_fixed_order, num_scheduled, seed)
    state[BUDGET] = budget_bytes - instance.fixed_bytes
    lay_out(state, _with_absent_base_kinds(instance, schedule) if is_fixed_order else schedule)
    return state


def _with_absent_base_kinds(instance: Instance, schedule: Int64s) -> Int64s:
    """The schedule with base kinds that never run inserted in base order, coded as `-1 - kind`."""
    base_index = {kind: index for index, kind in enumerate(instance.order.tolist())}
    present = set(schedule.tolist())
    absent = [kind for kind in reversed(instance.order.tolist()) if kind not in present]
    codes: list[int] = []
    seen: set[int] = set()
    for kind in schedule.tolist():
        if kind in base_index and kind not in seen:
            seen.add(kind)
            while absent and base_index[absent[-1]] < base_index[kind]:
                codes.append(-1 - absent.pop())
        codes.append(kind)
    return np.array(codes + [-1 - kind for kind in reversed(absent)], np.int64)


@cached_njit()
def lay_out(state, codes):
    """Fill an empty state with a schedule; `-1 - kind` stands for an inactive run at a base kind's position."""
    state[state[NEXT_RUN] + START] = END
    state[state[PREV_RUN] + END] = START
    state[NUM_LINKED] = 2
    for offset in range(state[INITIAL], state[TARGETS]):
        value = state[offset]
        state[state[USES] + at(state, USE_STARTS, value)] = START * 4 + WRITE
        state[state[NUM_USES] + value] = 1
    for code in codes:
        kind = code if code >= 0 else -1 - code
        run = _new_run(state, kind)
        before = at(state, PREV_RUN, END)
        state[state[NEXT_RUN] + before], state[state[PREV_RUN] + run] = run, before
        state[state[NEXT_RUN] + run], state[state[PREV_RUN] + END] = END, run
        state[NUM_LINKED] += 1
        if at(state, IS_BASE, kind) and at(state, PINNED_RUN, kind) < 0:
            state[state[PINNED_RUN] + kind] = run
        if code < 0:
            continue
        for entry in range(at(state, READ_STARTS, kind), at(state, READ_STARTS, kind + 1)):
            value = at(state, TOUCHED, entry)
            end = at(state, USE_STARTS, value) + at(state, NUM_USES, value)
            state[state[USES] + end] = run * 4 + at(state, TOUCH_FLAGS, entry)
            state[state[NUM_USES] + value] += 1
        _count_run(state, run, kind)
    for offset in range(state[TARGETS], len(state)):
        value = state[offset]
        state[state[USES] + at(state, USE_STARTS, value) + at(state, NUM_USES, value)] = END * 4 + READ
        state[state[NUM_USES] + value] += 1
    spread_positions(state)


@inner
def spread_positions(state):
    """Give every linked run a new position with a gap after it, and compute the profile again."""
    last = 2 * state[NUM_LINKED] + 1
    profile = state[state[PROFILE] : state[PROFILE] + last + 2]
    state[state[RUN_AT] : state[RUN_AT] + last + 1] = -1
    profile[:] = 0
    run, position = START, 0
    while run >= 0:
        state[state[POSITION_OF] + run] = position
        state[state[RUN_AT] + position] = run
        run, position = at(state, NEXT_RUN, run), position + 2
    for value in range(state[NUM_VALUES]):
        first = at(state, USE_STARTS, value)
        since = -1
        for index in range(first, first + at(state, NUM_USES, value)):
            use = at(state, USES, index)
            position = at(state, POSITION_OF, use >> 2)
            if use & 3 == WRITE:
                since = position
            ends = index + 1 == first + at(state, NUM_USES, value) or at(state, USES, index + 1) & 3 == WRITE
            if ends and use >> 2 != START:
                profile[since] += at(state, SIZE, value)
                profile[position + 1] -= at(state, SIZE, value)
    alive = 0
    for position in range(last + 1):
        alive += profile[position]
        run = at(state, RUN_AT, position)
        profile[position] = alive - state[BUDGET] - EMPTY
        if run >= 0 and at(state, IS_ACTIVE, run):
            profile[position] += EMPTY + at(state, WORKSPACE, at(state, RUN_KIND, run)) - _reused(state, run)
    profile[0] = -EMPTY
    state[EXCESS] = _sum_excess(profile[: last + 1])


@inner
def _sum_excess(profile):
    excess = 0
    for position in range(len(profile)):
        excess += max(profile[position], 0)
    return excess


@inner
def peek_excess(state, first, last, amount):
    """By how much the summed excess would change if `amount` were added to the positions first..last."""
    part = state[state[PROFILE] + first : state[PROFILE] + last + 1]
    change = 0
    for index in range(len(part)):
        before = part[index]
        change += max(before + amount, 0) - max(before, 0)
    return change


@inner
def _add(state, first, last, amount):
    part = state[state[PROFILE] + first : state[PROFILE] + last + 1]
    change = 0
    for index in range(len(part)):
        before = part[index]
        after = before + amount
        part[index] = after
        change += max(after, 0) - max(before, 0)
    state[EXCESS] += change


@inner
def find_use(state, value, position):
    """Index into `uses` of the value's first use at this position or later."""
    low = at(state, USE_STARTS, value)
    high = low + at(state, NUM_USES, value)
    while low < high:
        middle = (low + high) >> 1
        if at(state, POSITION_OF, at(state, USES, middle) >> 2) < position:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def has_use(state, value, index):
    """Whether an index into `uses` lies inside the value's list."""
    return at(state, USE_STARTS, value) <= index < at(state, USE_STARTS, value) + at(state, NUM_USES, value)


@inner
def is_read_at(state, value, index):
    """Whether the use at this index exists and reads the value."""
    return has_use(state, value, index) and at(state, USES, index) & 3 != WRITE


@inner
def is_present_before(state, value, index):
    """Whether the value can be read just before the use at this index."""
    return has_use(state, value, index - 1) and at(state, USES, index - 1) & 3 != DESTROY


@inner
def _reused(state, run):
    """Bytes the run saves by writing over an input that dies there."""
    kind = at(state, RUN_KIND, run)
    value = at(state, REUSE_READ, kind)
    if value < 0 or at(state, REUSE_BYTES, kind) == 0:
        return 0
    index = find_use(state, value, at(state, POSITION_OF, run))
    return 0 if is_read_at(state, value, index + 1) else at(state, REUSE_BYTES, kind)


@inner
def _toggle_reuse(state, value, index, sign):
    """A stretch now ends at this use (+1) or no longer does (-1): its run may save bytes by reuse."""
    use = at(state, USES, index)
    kind = at(state, RUN_KIND, use >> 2)
    if use & 3 != WRITE and kind >= 0 and at(state, REUSE_READ, kind) == value:
        position = at(state, POSITION_OF, use >> 2)
        _add(state, position, position, -sign * at(state, REUSE_BYTES, kind))


@inner
def _insert_use(state, value, run, flag):
    position = at(state, POSITION_OF, run)
    index = find_use(state, value, position)
    size = at(state, SIZE, value)
    for later in range(at(state, USE_STARTS, value) + at(state, NUM_USES, value), index, -1):
        state[state[USES] + later] = at(state, USES, later - 1)
    state[state[USES] + index] = run * 4 + flag
    state[state[NUM_USES] + value] += 1
    next_reads = is_read_at(state, value, index + 1)
    if flag == WRITE:
        if next_reads:
            _add(state, at(state, POSITION_OF, at(state, USES, index - 1) >> 2) + 1, position - 1, -size)
            _toggle_reuse(state, value, index - 1, 1)
        else:
            _add(state, position, position, size)
    elif not next_reads:
        _toggle_reuse(state, value, index - 1, -1)
        _add(state, at(state, POSITION_OF, at(state, USES, index - 1) >> 2) + 1, position, size)
        _toggle_reuse(state, value, index, 1)


@inner
def _remove_use(state, value, run, flag):
    position = at(state, POSITION_OF, run)
    index = find_use(state, value, position)
    size = at(state, SIZE, value)
    next_reads = is_read_at(state, value, index + 1)
    if flag == WRITE:
        if next_reads:
            _toggle_reuse(state, value, index - 1, -1)
            _add(state, at(state, POSITION_OF, at(state, USES, index - 1) >> 2) + 1, position - 1, size)
        else:
            _add(state, position, position, -size)
    elif not next_reads:
        _toggle_reuse(state, value, index, -1)
        _add(state, at(state, POSITION_OF, at(state, USES, index - 1) >> 2) + 1, position, -size)
        _toggle_reuse(state, value, index - 1, 1)
    state[state[NUM_USES] + value] -= 1
    for later in range(index, at(state, USE_STARTS, value) + at(state, NUM_USES, value)):
        state[state[USES] + later] = at(state, USES, later + 1)


@inner
def _new_run(state, kind):
    state[NUM_FREE] -= 1
    run = at(state, FREE_RUNS, state[NUM_FREE])
    state[state[RUN_KIND] + run] = kind
    state[state[IS_ACTIVE] + run] = 0
    return run


@inner
def _count_run(state, run, kind):
    state[state[IS_ACTIVE] + run] = 1
    state[state[LIVE_INDEX] + run] = state[NUM_LIVE]
    state[state[LIVE_RUNS] + state[NUM_LIVE]] = run
    state[NUM_LIVE] += 1
    state[TIME] += at(state, DURATION, kind)
    state[state[RUNS_OF_KIND] + kind] += 1
    if at(state, RUNS_OF_KIND, kind) == 2:
        state[state[REPEATED_INDEX] + kind] = state[NUM_REPEATED]
        state[state[REPEATED] + state[NUM_REPEATED]] = kind
        state[NUM_REPEATED] += 1


@inner
def _discount_run(state, run, kind):
    state[state[IS_ACTIVE] + run] = 0
    state[NUM_LIVE] -= 1
    last, index = at(state, LIVE_RUNS, state[NUM_LIVE]), at(state, LIVE_INDEX, run)
    state[state[LIVE_RUNS] + index], state[state[LIVE_INDEX] + last] = last, index
    state[TIME] -= at(state, DURATION, kind)
    state[state[RUNS_OF_KIND] + kind] -= 1
    if at(state, RUNS_OF_KIND, kind) == 1:
        state[NUM_REPEATED] -= 1
        last, index = at(state, REPEATED, state[NUM_REPEATED]), at(state, REPEATED_INDEX, kind)
        state[state[REPEATED] + index], state[state[REPEATED_INDEX] + last] = last, index


@inner
def _note(state, entry, run, before):
    number = state[NUM_JOURNAL]
    state[state[JOURNAL_ENTRY] + number] = entry
    state[state[JOURNAL_RUN] + number] = run
    state[state[JOURNAL_BEFORE] + number] = before
    state[NUM_JOURNAL] += 1


@inner
def _make_room_after(state, before):
    """A free position between a run and the next one; later runs move aside, or all positions are spread again."""
    after = at(state, NEXT_RUN, before)
    gap = at(state, POSITION_OF, after) - at(state, POSITION_OF, before)
    if gap > 1:
        return at(state, POSITION_OF, before) + (gap >> 1)
    run = after
    for _ in range(MAXIMUM_SHIFT):
        if run == END or at(state, POSITION_OF, at(state, NEXT_RUN, run)) - at(state, POSITION_OF, run) > 1:
            break
        run = at(state, NEXT_RUN, run)
    if run == END or at(state, POSITION_OF, at(state, NEXT_RUN, run)) - at(state, POSITION_OF, run) <= 1:
        spread_positions(state)
        return at(state, POSITION_OF, before) + 1
    while run != before:
        _shift_right(state, run)
        run = at(state, PREV_RUN, run)
    return at(state, POSITION_OF, before) + 1


@inner
def _shift_right(state, run):
    """Move a run to the empty position after it. This changes no bytes at any run."""
    position = at(state, POSITION_OF, run)
    before = at(state, PROFILE, position)
    if at(state, IS_ACTIVE, run):
        kind = at(state, RUN_KIND, run)
        before += _reused(state, run) - at(state, WORKSPACE, kind) - EMPTY
        for entry in range(at(state, WRITE_STARTS, kind), at(state, READ_STARTS, kind + 1)):
            before -= at(state, SIZE, at(state, TOUCHED, entry))
    state[state[PROFILE] + position + 1] = at(state, PROFILE, position)
    state[state[PROFILE] + position] = before
    state[state[POSITION_OF] + run] = position + 1
    state[state[RUN_AT] + position + 1] = run
    state[state[RUN_AT] + position] = -1


@inner
def _link(state, run, before):
    position = _make_room_after(state, before)
    after = at(state, NEXT_RUN, before)
    state[state[NEXT_RUN] + before], state[state[PREV_RUN] + run] = run, before
    state[state[NEXT_RUN] + run], state[state[PREV_RUN] + after] = after, run
    state[state[POSITION_OF] + run] = position
    state[state[RUN_AT] + position] = run
    state[NUM_LINKED] += 1


@inner
def _unlink(state, run):
    before, after = at(state, PREV_RUN, run), at(state, NEXT_RUN, run)
    state[state[NEXT_RUN] + before], state[state[PREV_RUN] + after] = after, before
    state[state[RUN_AT] + at(state, POSITION_OF, run)] = -1
    state[NUM_LINKED] -= 1


@inner
def link_new(state, kind, before):
    """A new inactive run of a kind right after another run; -1 when there is no room left."""
    if state[NUM_FREE] < 2 or state[NUM_JOURNAL] + 4 > state[MAXIMUM_JOURNAL]:
        return -1
    run = _new_run(state, kind)
    _link(state, run, before)
    _note(state, LINKED, run, before)
    return run


@inner
def has_room(state, kind):
    """Whether the lists of uses have room for one more run of the kind."""
    for entry in range(at(state, READ_STARTS, kind), at(state, READ_STARTS, kind + 1)):
        value = at(state, TOUCHED, entry)
        if at(state, USE_STARTS, value) + at(state, NUM_USES, value) >= at(state, USE_STARTS, value + 1):
            return False
    return True


@inner
def can_activate(state, run):
    """Whether everything that the run reads is present, nothing that it destroys is read later, and there is room."""
    kind, position = at(state, RUN_KIND, run), at(state, POSITION_OF, run)
    if at(state, RUNS_OF_KIND, kind) > 0 and not at(state, CAN_REPEAT, kind):
        return False
    for entry in range(at(state, READ_STARTS, kind), at(state, WRITE_STARTS, kind)):
        value = at(state, TOUCHED, entry)
        index = find_use(state, value, position)
        if not is_present_before(state, value, index):
            return False
        if at(state, TOUCH_FLAGS, entry) == DESTROY and is_read_at(state, value, index):
            return False
    return has_room(state, kind)


@inner
def can_deactivate(state, run):
    """Whether all later reads of what the run writes find an earlier write."""
    kind, position = at(state, RUN_KIND, run), at(state, POSITION_OF, run)
    if at(state, PINNED_RUN, kind) == run and at(state, RUNS_OF_KIND, kind) > 1:
        return False  # a repetition would become the first run, out of the base order
    for entry in range(at(state, WRITE_STARTS, kind), at(state, READ_STARTS, kind + 1)):
        value = at(state, TOUCHED, entry)
        index = find_use(state, value, position)
        if is_read_at(state, value, index + 1) and not is_present_before(state, value, index):
            return False
    return state[NUM_JOURNAL] + 4 <= state[MAXIMUM_JOURNAL]


@inner
def _switch_on(state, run):
    kind, position = at(state, RUN_KIND, run), at(state, POSITION_OF, run)
    _add(state, position, position, EMPTY + at(state, WORKSPACE, kind))
    for entry in range(at(state, READ_STARTS, kind), at(state, READ_STARTS, kind + 1)):
        _insert_use(state, at(state, TOUCHED, entry), run, at(state, TOUCH_FLAGS, entry))
    _count_run(state, run, kind)


@inner
def _switch_off(state, run):
    kind, position = at(state, RUN_KIND, run), at(state, POSITION_OF, run)
    for entry in range(at(state, READ_STARTS, kind), at(state, READ_STARTS, kind + 1)):
        _remove_use(state, at(state, TOUCHED, entry), run, at(state, TOUCH_FLAGS, entry))
    _add(state, position, position, -EMPTY - at(state, WORKSPACE, kind))
    _discount_run(state, run, kind)


@inner
def activate(state, run):
    """Make a linked run count; `can_activate` must hold."""
    _switch_on(state, run)
    _note(state, ACTIVATED, run, 0)


@inner
def remove(state, run):
    """Take a run out; `can_deactivate` must hold. A pinned run stays linked at its position."""
    _switch_off(state, run)
    _note(state, DEACTIVATED, run, 0)
    if at(state, PINNED_RUN, at(state, RUN_KIND, run)) != run:
        _note(state, UNLINKED, run, at(state, PREV_RUN, run))
        _unlink(state, run)


@inner
def commit(state):
    """Forget the journal; the numbers of runs that were taken out are free again."""
    for number in range(state[NUM_JOURNAL]):
        if at(state, JOURNAL_ENTRY, number) == UNLINKED:
            state[state[FREE_RUNS] + state[NUM_FREE]] = at(state, JOURNAL_RUN, number)
            state[NUM_FREE] += 1
    state[NUM_JOURNAL] = 0


@inner
def roll_back(state):
    """Undo everything since the last commit."""
    for number in range(state[NUM_JOURNAL] - 1, -1, -1):
        entry, run = at(state, JOURNAL_ENTRY, number), at(state, JOURNAL_RUN, number)
        if entry == LINKED:
            _unlink(state, run)
            state[state[FREE_RUNS] + state[NUM_FREE]] = run
            state[NUM_FREE] += 1
        elif entry == ACTIVATED:
            _switch_off(state, run)
        elif entry == DEACTIVATED:
            _switch_on(state, run)
        else:
            _link(state, run, at(state, JOURNAL_BEFORE, number))
    state[NUM_JOURNAL] = 0


@cached_njit()
def write_schedule(state, kinds):
    """Copy the active runs' kinds in order; returns how many."""
    number, run = 0, at(state, NEXT_RUN, START)
    while run != END:
        if at(state, IS_ACTIVE, run):
            kinds[number] = at(state, RUN_KIND, run)
            number += 1
        run = at(state, NEXT_RUN, run)
    return number


def current_schedule(state: Int64s) -> Int64s:
    """The active runs' kinds in order."""
    kinds = np.zeros(state[MAXIMUM_STACK], np.int64)
    return kinds[: write_schedule(state, kinds)].copy()
