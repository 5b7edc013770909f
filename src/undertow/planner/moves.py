"""The moves of the search, for Numba. Each changes a schedule under edit through its journal and says whether it did.

- `rerun_before`: run a value's writer again just before one of its reads, so that the value need not stay alive until
  then. What that run reads stays alive, or is run again too where staying alive costs more excess than running costs
  time. This is recursive: one move repeats many runs.
- `drop_run`: take a run out, so that its readers use the earlier write. Runs left without readers follow.
- `shift_run`: move a run to another position between its suppliers and its readers.
- `switch_formulation`: replace a run by other kinds that write what its readers need.

A move leaves the schedule valid or returns False. The caller then rolls back.
"""

from __future__ import annotations

from undertow.planner.sequence import (
    activate,
    can_activate,
    can_deactivate,
    commit,
    find_use,
    has_room,
    has_use,
    is_present_before,
    is_read_at,
    link_new,
    peek_excess,
    remove,
)
from undertow.planner.state import (
    CAN_REPEAT,
    DESTROY,
    DURATION,
    END,
    EXCESS,
    IS_ACTIVE,
    LIVE_RUNS,
    MAXIMUM_STACK,
    NEXT_RUN,
    NUM_LIVE,
    NUM_REPEATED,
    NUM_USES,
    PINNED_RUN,
    POSITION_OF,
    PREV_RUN,
    RANDOM,
    READ_STARTS,
    REPEATED,
    RUN_AT,
    RUN_KIND,
    RUNS_OF_KIND,
    SIZE,
    STACK_NEXT,
    STACK_RUN,
    START,
    TARGETS,
    TIME,
    TOUCH_FLAGS,
    TOUCHED,
    USE_STARTS,
    USES,
    WRITE,
    WRITE_STARTS,
    WRITER_STARTS,
    WRITERS,
    at,
    inner,
)

LOG_MAXIMUM_INSERTED = 10
MAXIMUM_INSERTED = 1 << LOG_MAXIMUM_INSERTED  # runs that one move may insert; several moves insert more


@inner
def draw(state, bound):
    """A number in 0..bound-1 from Knuth's linear congruential generator (MMIX): the same on every machine."""
    state[RANDOM] = state[RANDOM] * 6364136223846793005 + 1442695040888963407
    return ((state[RANDOM] >> 33) & 0x3FFFFFFF) % bound


@inner
def draw_unit(state):
    """A number in (0, 1)."""
    return (draw(state, 1 << 30) + 0.5) / (1 << 30)


@inner
def _pick_writer(state, value):
    """A kind that may run (again) to write the value, or -1."""
    first, last = at(state, WRITER_STARTS, value), at(state, WRITER_STARTS, value + 1)
    if first == last:
        return -1
    kind = at(state, WRITERS, first + (draw(state, last - first) if last - first > 1 else 0))
    if at(state, RUNS_OF_KIND, kind) > 0 and not at(state, CAN_REPEAT, kind):
        return -1
    return kind


@inner
def _inactive_run(state, kind, before):
    """An inactive run of the kind right after `before`; a base kind that does not run yet has its own position."""
    pinned = at(state, PINNED_RUN, kind)
    if pinned >= 0:
        if at(state, POSITION_OF, pinned) > at(state, POSITION_OF, before):
            return -1
        if not at(state, IS_ACTIVE, pinned):
            return pinned
    return link_new(state, kind, before)


@inner
def _last_supply(state, kind, limit):
    """The latest run before `limit` after which something that the kind reads is surely present."""
    latest = START
    for entry in range(at(state, READ_STARTS, kind), at(state, WRITE_STARTS, kind)):
        value = at(state, TOUCHED, entry)
        index = find_use(state, value, at(state, POSITION_OF, limit)) - 1
        if has_use(state, value, index):
            run = at(state, USES, index) >> 2
            if at(state, USES, index) & 3 == DESTROY:
                run = at(state, PREV_RUN, run)
            if at(state, POSITION_OF, run) > at(state, POSITION_OF, latest):
                latest = run
    return latest


@inner
def _wants_rerun(state, value, run, price):
    """Whether a value that stays alive up to a run costs more than another run of its writer; both are estimates."""
    index = find_use(state, value, at(state, POSITION_OF, run))
    first = at(state, POSITION_OF, at(state, USES, index - 1) >> 2) + 1
    last = at(state, POSITION_OF, run) - 1
    size = at(state, SIZE, value)
    if first > last or size == 0:
        return False
    if at(state, WRITER_STARTS, value + 1) == at(state, WRITER_STARTS, value):
        return False
    kind = at(state, WRITERS, at(state, WRITER_STARTS, value))
    if is_read_at(state, value, index):
        excess = -peek_excess(state, first, last, -size)
    else:
        excess = peek_excess(state, first, last, size)
    return price * excess > at(state, DURATION, kind) * 2.0 * draw_unit(state)


@inner
def _complete(state, run, price, most_time):
    """Activate a linked run. First run again, recursively, what it reads and is absent or too costly to leave alive.

    Gives up when total time passes `most_time`. How many runs it may insert is drawn: at a high price every input is
    too costly to leave alive, and without a limit each move would repeat the whole program.
    """
    depth, inserted = 1, 1
    max_inserted = 1 << draw(state, LOG_MAXIMUM_INSERTED)
    state[state[STACK_RUN] + 0] = run
    state[state[STACK_NEXT] + 0] = at(state, READ_STARTS, at(state, RUN_KIND, run))
    while depth > 0:
        top, entry = at(state, STACK_RUN, depth - 1), at(state, STACK_NEXT, depth - 1)
        kind = at(state, RUN_KIND, top)
        if entry == at(state, WRITE_STARTS, kind):
            if not can_activate(state, top):
                return False
            activate(state, top)
            depth -= 1
            if state[TIME] > most_time:
                return False
            continue
        state[state[STACK_NEXT] + depth - 1] += 1
        value = at(state, TOUCHED, entry)
        is_absent = not is_present_before(state, value, find_use(state, value, at(state, POSITION_OF, top)))
        if not is_absent and (inserted >= max_inserted or not _wants_rerun(state, value, top, price)):
            continue
        writer = _pick_writer(state, value)
        if writer < 0 or inserted >= MAXIMUM_INSERTED or depth + 1 >= state[MAXIMUM_STACK]:
            if is_absent:
                return False
            continue
        before = at(state, PREV_RUN, top)
        if is_absent and draw(state, 2) == 0:
            before = _last_supply(state, writer, top)
        source = _inactive_run(state, writer, before)
        if source < 0:
            if is_absent:
                return False
            continue
        state[state[STACK_RUN] + depth] = source
        state[state[STACK_NEXT] + depth] = at(state, READ_STARTS, writer)
        depth += 1
        inserted += 1
    return True


@inner
def _is_useless(state, run):
    kind = at(state, RUN_KIND, run)
    for entry in range(at(state, WRITE_STARTS, kind), at(state, READ_STARTS, kind + 1)):
        value = at(state, TOUCHED, entry)
        if is_read_at(state, value, find_use(state, value, at(state, POSITION_OF, run)) + 1):
            return False
    return True


@inner
def _remove_with_suppliers(state, run):
    """Take a run out and then every run whose writes nothing reads any more."""
    depth = 1
    state[state[STACK_RUN] + 0] = run
    while depth > 0:
        depth -= 1
        run = at(state, STACK_RUN, depth)
        if not at(state, IS_ACTIVE, run) or not can_deactivate(state, run):
            continue
        kind = at(state, RUN_KIND, run)
        position = at(state, POSITION_OF, run)
        if depth + at(state, WRITE_STARTS, kind) - at(state, READ_STARTS, kind) >= state[MAXIMUM_STACK]:
            continue
        first = depth
        for entry in range(at(state, READ_STARTS, kind), at(state, WRITE_STARTS, kind)):
            value = at(state, TOUCHED, entry)
            index = find_use(state, value, position) - 1
            while at(state, USES, index) & 3 != WRITE:
                index -= 1
            state[state[STACK_RUN] + depth] = at(state, USES, index) >> 2
            depth += 1
        remove(state, run)
        end = first
        for number in range(first, depth):
            source = at(state, STACK_RUN, number)
            if source != START and at(state, IS_ACTIVE, source) and _is_useless(state, source):
                state[state[STACK_RUN] + end] = source
                end += 1
        depth = end


@inner
def _draw_distant_read(state):
    """A random read of a value that lives across at least one run before it: (run, value), run -1 if none was found."""
    num_targets = len(state) - state[TARGETS]
    for _ in range(8):
        choice = draw(state, state[NUM_LIVE] + num_targets)
        if choice >= state[NUM_LIVE]:
            return END, at(state, TARGETS, choice - state[NUM_LIVE])
        run = at(state, LIVE_RUNS, choice)
        kind = at(state, RUN_KIND, run)
        first, last = at(state, READ_STARTS, kind), at(state, WRITE_STARTS, kind)
        if first == last:
            continue
        value = at(state, TOUCHED, first + draw(state, last - first))
        if at(state, SIZE, value) == 0:
            continue
        index = find_use(state, value, at(state, POSITION_OF, run))
        if at(state, NEXT_RUN, at(state, USES, index - 1) >> 2) != run:
            return run, value
    return -1, -1


@inner
def rerun_before(state, price, threshold):
    """Run a value's writer again just before one of its reads."""
    run, value = _draw_distant_read(state)
    if run < 0:
        return False
    kind = _pick_writer(state, value)
    if kind < 0:
        return False
    index = find_use(state, value, at(state, POSITION_OF, run))
    first, last = at(state, POSITION_OF, at(state, USES, index - 1) >> 2) + 1, at(state, POSITION_OF, run) - 1
    saved = -price * peek_excess(state, first, last, -at(state, SIZE, value))
    # The new run alone cannot be worth it. Several runs together could be, so such draws are mostly skipped.
    if at(state, DURATION, kind) - saved > threshold and draw(state, 8) != 0:
        return False
    most_time = state[TIME] + price * state[EXCESS] + threshold
    new = _inactive_run(state, kind, at(state, PREV_RUN, run))
    return new >= 0 and _complete(state, new, price, most_time)


@inner
def _draw_repetition(state):
    """A random run, not the pinned one, of a kind that runs more than once, or -1."""
    if state[NUM_REPEATED] == 0:
        return -1
    kind = at(state, REPEATED, draw(state, state[NUM_REPEATED]))
    value = at(state, TOUCHED, at(state, WRITE_STARTS, kind))
    chosen, seen = -1, 0
    for index in range(at(state, USE_STARTS, value), at(state, USE_STARTS, value) + at(state, NUM_USES, value)):
        run = at(state, USES, index) >> 2
        if (
            at(state, USES, index) & 3 == WRITE
            and at(state, RUN_KIND, run) == kind
            and at(state, PINNED_RUN, kind) != run
        ):
            seen += 1
            if draw(state, seen) == 0:
                chosen = run
    return chosen


@inner
def drop_run(state):
    """Take out a run whose readers can use an earlier write. One draw in eight also tries kinds that run once."""
    run = at(state, LIVE_RUNS, draw(state, state[NUM_LIVE])) if draw(state, 8) == 0 else _draw_repetition(state)
    if run < 0 or not can_deactivate(state, run):
        return False
    _remove_with_suppliers(state, run)
    return True


@inner
def drop_useless(state):
    """Take out every run that nothing needs."""
    for index in range(state[NUM_LIVE] - 1, -1, -1):
        if index < state[NUM_LIVE] and _is_useless(state, at(state, LIVE_RUNS, index)):
            _remove_with_suppliers(state, at(state, LIVE_RUNS, index))
            commit(state)


@inner
def shift_limits(state, run):
    """The two runs between which a run may move without changing which run supplies which."""
    kind, position = at(state, RUN_KIND, run), at(state, POSITION_OF, run)
    low, high = START, END
    for entry in range(at(state, READ_STARTS, kind), at(state, WRITE_STARTS, kind)):
        value = at(state, TOUCHED, entry)
        index = find_use(state, value, position)
        earlier = index - 1
        if at(state, TOUCH_FLAGS, entry) != DESTROY:
            while at(state, USES, earlier) & 3 != WRITE:
                earlier -= 1
        source = at(state, USES, earlier) >> 2
        if at(state, POSITION_OF, source) > at(state, POSITION_OF, low):
            low = source
        index += 1
        while has_use(state, value, index) and at(state, USES, index) & 3 == 0:
            index += 1
        if has_use(state, value, index):
            other = at(state, USES, index) >> 2
            if at(state, POSITION_OF, other) < at(state, POSITION_OF, high):
                high = other
    for entry in range(at(state, WRITE_STARTS, kind), at(state, READ_STARTS, kind + 1)):
        value = at(state, TOUCHED, entry)
        index = find_use(state, value, position)
        if has_use(state, value, index - 1):
            other = at(state, USES, index - 1) >> 2
            if at(state, POSITION_OF, other) > at(state, POSITION_OF, low):
                low = other
        if has_use(state, value, index + 1):
            other = at(state, USES, index + 1) >> 2
            if at(state, POSITION_OF, other) < at(state, POSITION_OF, high):
                high = other
    return low, high


@inner
def _draw_movable(state):
    """A random run that may move: any in free order, one that is not pinned in fixed order."""
    if draw(state, 2) == 0:
        run = _draw_repetition(state)
        if run >= 0:
            return run
    for _ in range(8):
        run = at(state, LIVE_RUNS, draw(state, state[NUM_LIVE]))
        if at(state, PINNED_RUN, at(state, RUN_KIND, run)) != run:
            return run
    return -1


@inner
def shift_run(state):
    """Move a run to another position between its suppliers and its readers."""
    run = _draw_movable(state)
    if run < 0:
        return False
    low, high = shift_limits(state, run)
    choice = draw(state, 4)
    if choice == 0:
        before = low
    elif choice == 1:
        before = at(state, PREV_RUN, high)
    else:
        first, last = at(state, POSITION_OF, low), at(state, POSITION_OF, high) - 1
        if choice == 2:
            first = max(first, at(state, POSITION_OF, run) - 16)
            last = min(last, at(state, POSITION_OF, run) + 16)
        position = first + draw(state, last - first + 1)
        while at(state, RUN_AT, position) < 0:
            position -= 1
        before = at(state, RUN_AT, position)
    if before == run or before == at(state, PREV_RUN, run):
        return False
    kind = at(state, RUN_KIND, run)
    new = link_new(state, kind, before)
    if new < 0:
        return False
    # For a moment both runs count. The limits guarantee that the new one finds what it reads and serves all readers.
    if not has_room(state, kind):
        return False
    activate(state, new)
    remove(state, run)
    return True


@inner
def _supply(state, value, run, most_time, price):
    """Have a kind other than the run's write a value near the run: the new run, or -1."""
    other = _pick_writer(state, value)
    if other < 0 or other == at(state, RUN_KIND, run):
        return -1
    choice = draw(state, 3)
    before = run if choice == 0 else at(state, PREV_RUN, run) if choice == 1 else _last_supply(state, other, run)
    new = _inactive_run(state, other, before)
    # What the new run makes superfluous is still there and is taken out afterwards.
    if new < 0 or not _complete(state, new, price, most_time + at(state, DURATION, other)):
        return -1
    return new


@inner
def _drop_superfluous(state, new):
    """Take out the next runs that write again what a new run has written."""
    kind = at(state, RUN_KIND, new)
    for entry in range(at(state, WRITE_STARTS, kind), at(state, READ_STARTS, kind + 1)):
        value = at(state, TOUCHED, entry)
        index = find_use(state, value, at(state, POSITION_OF, new)) + 1
        if has_use(state, value, index) and at(state, USES, index) & 3 == WRITE:
            run = at(state, USES, index) >> 2
            if can_deactivate(state, run):
                _remove_with_suppliers(state, run)


@inner
def switch_formulation(state, price, threshold):
    """Replace a run by others that write what its readers need: one for a value drawn, one for each of the rest."""
    run = at(state, LIVE_RUNS, draw(state, state[NUM_LIVE]))
    kind = at(state, RUN_KIND, run)
    first, last = at(state, WRITE_STARTS, kind), at(state, READ_STARTS, kind + 1)
    if first == last:
        return False
    most_time = state[TIME] + at(state, DURATION, kind) + price * state[EXCESS] + threshold
    # The new runs can often read what the old one read. At a high price they would mostly have it made again.
    price = price if draw(state, 4) == 0 else 0.0
    new = _supply(state, at(state, TOUCHED, first + draw(state, last - first)), run, most_time, price)
    if new < 0:
        return False
    for entry in range(first, last):
        value = at(state, TOUCHED, entry)
        index = find_use(state, value, at(state, POSITION_OF, run))
        # A write just before serves the readers too.
        is_supplied = is_present_before(state, value, index) or not is_read_at(state, value, index + 1)
        if not is_supplied and _supply(state, value, run, most_time, price) < 0:
            return False
    if at(state, IS_ACTIVE, run) and can_deactivate(state, run):
        _remove_with_suppliers(state, run)
    if at(state, IS_ACTIVE, run):
        return False
    if at(state, IS_ACTIVE, new):
        _drop_superfluous(state, new)
    return True
