"""Proved lower bounds: on the peak of any schedule, and on the time of any schedule that fits a budget.

In: an instance, an order mode, a budget. Out: `Bound`: a number, the order mode it holds for, and the sentence that
proves it. Every bound for free order holds for fixed order too.

*Necessity.* A value that is not initial needs a kind when each of its writers is that kind or needs it. A kind needs
what its reads need. Kinds that the targets need are *required*. `m` is necessarily before `k` when `k` needs `m`.

*Peak.* When a required kind runs for the first time, these are alive together: the values it reads and writes, its
workspace, and every value that cannot be made again and that a later required kind reads.

*Time.* Choose moments: the first runs of required kinds m_1, ..., m_T whose order is known (fixed order: any; free
order: each necessarily before the next). They cut every schedule into stages 0..T. Let run[j,k] = 1 when kind k runs
in stage j, alive[j,v] = 1 when value v is alive, and not written, at moment j, and from[j,k] = 1 when k runs in stage j
or later. Every schedule then satisfies the constraints built below, each with its sentence. HiGHS solves the linear
relaxation. What is reported is not its objective but the weak-duality value of its multipliers y >= 0, clipped and
summed again here. For  min c.x, A.x <= b, 0 <= x <= 1  it is
-b.y + sum(min(0, c + A'.y)), a bound for every y, so a wrong answer of the solver can only weaken it.

This is the linear relaxation of Checkmate (Jain et al., MLSys 2020) with a few stages. With one per operation the
number of variables is quadratic.

Does not use that a destroyed value is gone, nor the bytes between two moments.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from undertow.planner.instance import Instance, replay

with warnings.catch_warnings():  # SciPy's import adds filters; the user's stay as they are
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

# Relaxations with one moment, then more. Each costs several times the one before. So the next is tried only while the
# last one said more than "every required kind runs once", and kinds and values times moments stay below the limit.
MOMENT_COUNTS = (1, 6, 24)
MAXIMUM_STAGE_ITEMS = {True: 26_000, False: 12_000}  # by is_fixed_order; HiGHS then needs 5 s at most


@dataclass(frozen=True)
class Bound:
    """A proved lower bound."""

    amount: int
    order: str  # "free": holds for every order; "fixed": holds when first runs keep the base order
    proof: str


class Necessity:
    """What every valid schedule of an instance must run, and in which order."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.reads = instance.reads.lists()
        self.writes = instance.writes.lists()
        self.writers = instance.writers().lists()
        self.needs = self._find_needs()
        self.needed_by: list[list[int]] = [[] for _ in self.reads]
        for kind, row in enumerate(self.needs):
            for other in row:
                self.needed_by[other].append(kind)
        roots = [kind for value in instance.targets.tolist() for kind in self.needs_of_value[value]]
        self.required = self._reach(roots, self.needs.__getitem__)
        # A value that is made only once must stay alive until its last necessary read.
        initial = set(instance.initial.tolist())
        self.is_unique = [
            len(row) + (value in initial) <= 1 and not any(instance.can_repeat[kind] for kind in row)
            for value, row in enumerate(self.writers)
        ]

    def _find_needs(self) -> list[list[int]]:
        """For each kind, kinds without which it cannot run; what those need is left out.

        must[v] = intersection over the writers w of v of ({w} + union over the reads r of w of must[r]), the largest
        solution. However a value is made for the first time, these have run: they are dominators, as in a flow graph.
        """
        instance = self.instance
        base = instance.order.tolist()
        order = base + sorted(set(range(instance.num_kinds)) - set(base))
        position_of = {kind: position for position, kind in enumerate(order)}
        everything = (1 << (instance.num_kinds + 1)) - 1  # one bit more than there are kinds: what nothing can make
        initial = set(instance.initial.tolist())
        must = [0 if value in initial else everything for value in range(instance.num_values)]
        must_run = [everything] * instance.num_kinds  # what has run once the kind has run
        has_changed = True
        while has_changed:
            has_changed = False
            for kind in order:
                found = 1 << position_of[kind]
                for value in self.reads[kind]:
                    found |= must[value]
                if found == must_run[kind]:
                    continue
                must_run[kind], has_changed = found, True
                for value in self.writes[kind]:
                    if value not in initial:
                        must[value] = functools.reduce(operator.and_, (must_run[w] for w in self.writers[value]))

        def latest(members: int) -> list[int]:
            found = []
            while members and members != everything:
                found.append(order[members.bit_length() - 1])
                members &= ~must_run[found[-1]]
            return found

        self.needs_of_value = [latest(members) for members in must]
        return [list(dict.fromkeys(k for value in row for k in self.needs_of_value[value])) for row in self.reads]

    def has_choice(self) -> bool:
        """Whether something that must be made can be made in several ways, none of which is required."""
        wanted = {value for kind in self.required for value in self.reads[kind]} | set(self.instance.targets.tolist())
        wanted -= set(self.instance.initial.tolist())
        return any(self.required.isdisjoint(self.writers[value]) for value in wanted)

    def before(self, kind: int) -> set[int]:
        """Kinds that run before the first run of this one."""
        return self._reach(self.needs[kind], self.needs.__getitem__)

    def after(self, kind: int) -> set[int]:
        """Kinds that cannot run before the first run of this one."""
        return self._reach(self.needed_by[kind], lambda other: self.needed_by[other])

    @staticmethod
    def _reach(roots: Iterable[int], neighbours: Callable[[int], Iterable[int]]) -> set[int]:
        found = set(roots)
        pending = list(found)
        while pending:
            for other in neighbours(pending.pop()):
                if other not in found:
                    found.add(other)
                    pending.append(other)
        return found


def _own_bytes(instance: Instance, kind: int, reuse: int) -> int:
    """The fixed bytes, what a run of the kind writes, and its workspace, less what it reuses."""
    written = int(instance.size_bytes[instance.writes.row(kind)].sum())
    return instance.fixed_bytes + written + int(instance.workspace_bytes[kind]) - reuse


def lower_bound_peak(instance: Instance, is_fixed_order: bool) -> Bound:
    """Bytes that are alive at some run of every valid schedule."""
    necessity = Necessity(instance)
    reuse = instance.reuse_bytes()
    # Everything the targets need is in the base order, each kind after the kinds it needs.
    required = [kind for kind in instance.order.tolist() if kind in necessity.required]
    made_before, read_after = _unique_values_around(instance, necessity, required, is_fixed_order)
    best, best_kind = instance.fixed_bytes, -1
    for kind in required:
        alive = _members(made_before[kind] & read_after[kind], instance.num_values)
        alive[necessity.reads[kind]] = True
        alive[necessity.writes[kind]] = False
        total = _own_bytes(instance, kind, int(reuse[kind])) + int(instance.size_bytes[alive].sum())
        if total > best:
            best, best_kind = total, kind
    proof = (
        f"When kind {best_kind} runs for the first time, as it must, what it reads and writes, its workspace and the "
        "values that cannot be made again before their later reads are alive together."
        if best_kind >= 0
        else "The fixed bytes are always there."
    )
    return Bound(best, "fixed" if is_fixed_order else "free", proof)


def _unique_values_around(
    instance: Instance, necessity: Necessity, required: list[int], is_fixed_order: bool
) -> tuple[dict[int, int], dict[int, int]]:
    """For each required kind, values made only once: those surely made before its first run, those surely read after.

    A set of values is a whole number, value v at bit v, so that unions over thousands of kinds are fast.
    """
    unique = 0
    for value, is_unique in enumerate(necessity.is_unique):
        unique |= is_unique << value
    initial = _set_of(instance.initial.tolist()) & unique
    targets = _set_of(instance.targets.tolist()) & unique
    made_before: dict[int, int] = {}
    read_after: dict[int, int] = {}
    made_so_far = initial
    for kind in required:
        made_before[kind] = made_so_far if is_fixed_order else initial
        if not is_fixed_order:
            for other in necessity.needs[kind]:
                made_before[kind] |= made_before[other] | (_set_of(necessity.writes[other]) & unique)
        made_so_far |= _set_of(necessity.writes[kind]) & unique
    read_so_far = targets
    for kind in reversed(required):
        read_after[kind] = read_so_far if is_fixed_order else targets
        if not is_fixed_order:
            for other in necessity.needed_by[kind]:
                if other in read_after:
                    read_after[kind] |= read_after[other] | (_set_of(necessity.reads[other]) & unique)
        read_so_far |= _set_of(necessity.reads[kind]) & unique
    return made_before, read_after


def _set_of(items: Iterable[int]) -> int:
    found = 0
    for item in items:
        found |= 1 << item
    return found


def _members(items: int, count: int) -> np.ndarray:
    """The set as one boolean per item."""
    bits = np.frombuffer(items.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(bits, count=count, bitorder="little").view(np.bool_)


def lower_bound_time(instance: Instance, budget_bytes: int, is_fixed_order: bool) -> Bound:
    """Time that every valid schedule within the budget takes."""
    necessity = Necessity(instance)
    simple = Bound(
        int(instance.duration[sorted(necessity.required)].sum()), "free", "Every required kind runs at least once."
    )
    if necessity.has_choice():
        amount = _Relaxation(instance, necessity, (), is_fixed_order).solve(budget_bytes)
        proof = "Every required kind runs at least once, and so does a writer of every other value that is needed."
        simple = Bound(max(amount, simple.amount), "free", proof)
    best = simple
    for count in MOMENT_COUNTS:
        is_too_large = count * (instance.num_kinds + instance.num_values) > MAXIMUM_STAGE_ITEMS[is_fixed_order]
        if count > 1 and (is_too_large or best is simple):
            break
        moments = _moments(instance, necessity, budget_bytes, is_fixed_order, count)
        if not moments:
            break
        amount = _Relaxation(instance, necessity, moments, is_fixed_order).solve(budget_bytes)
        if amount > best.amount:
            proof = (
                f"At the first runs of the kinds {moments}, what is alive fits the budget. What later runs need and is "
                "not alive must run again in between. The dual of the linear relaxation of this gives the number."
            )
            best = Bound(amount, "fixed" if is_fixed_order else "free", proof)
        if len(moments) < count:
            break
    return best


def _moments(
    instance: Instance, necessity: Necessity, budget_bytes: int, is_fixed_order: bool, count: int
) -> list[int]:
    """Required kinds in a known order, spread over the part of the base order that exceeds the budget."""
    base = instance.order.tolist()
    profile = replay(instance, base).run_bytes
    usable = [position for position, kind in enumerate(base) if kind in necessity.required]
    if not is_fixed_order:
        usable = _heaviest_path(base, necessity, np.maximum(profile - int(0.8 * budget_bytes), 1))
    over = [position for position in usable if profile[position] > budget_bytes]
    if not over:
        return []
    # The largest of each of `count` equal parts: moments are then both high and spread out.
    parts = np.array_split(np.array(over), min(count, len(over)))
    return [base[int(part[np.argmax(profile[part])])] for part in parts]


def _heaviest_path(base: list[int], necessity: Necessity, weights: np.ndarray) -> list[int]:
    """Positions in the base order of kinds, each necessarily before the next, with the largest total weight."""
    position_of = {kind: position for position, kind in enumerate(base)}
    total: dict[int, int] = {}
    previous: dict[int, int] = {}
    for position, kind in enumerate(base):
        if kind not in necessity.required:
            continue
        best, source = 0, -1
        for other in necessity.needs[kind]:
            if other in total and position_of[other] < position and total[other] > best:
                best, source = total[other], other
        total[kind], previous[kind] = best + int(weights[position]), source
    if not total:
        return []
    kind = max(total, key=lambda other: (total[other], -position_of[other]))
    path = []
    while kind >= 0:
        path.append(position_of[kind])
        kind = previous[kind]
    return path[::-1]


class _Relaxation:
    """The linear program over stages; rows are  coefficients . x <= right  with 0 <= x <= 1."""

    def __init__(self, instance: Instance, necessity: Necessity, moments: Sequence[int], is_fixed_order: bool) -> None:
        self.instance, self.necessity, self.moments = instance, necessity, moments
        self.num_stages = len(moments) + 1
        self.columns: dict[tuple[str, int, int], int] = {}
        self.costs: list[int] = []
        self.constant = 0
        self.rows: list[int] = []
        self.items: list[int] = []
        self.coefficients: list[int] = []
        self.rights: list[int] = []
        self._find_stages(is_fixed_order)
        self._stage_constraints()

    def _find_stages(self, is_fixed_order: bool) -> None:
        """The earliest stage of every kind, and for required kinds the latest stage of the first run."""
        self.earliest = [0] * self.instance.num_kinds
        self.latest = [self.num_stages - 1] * self.instance.num_kinds
        for stage, moment in enumerate(self.moments):
            for kind in self.necessity.after(moment) | {moment}:
                self.earliest[kind] = stage + 1
        for stage, moment in reversed(list(enumerate(self.moments))):
            for kind in self.necessity.before(moment):
                self.latest[kind] = stage
            self.latest[moment] = stage + 1
        if is_fixed_order:
            stage, following = 0, list(self.moments)
            for kind in self.instance.order.tolist():
                if following and kind == following[0]:
                    following.pop(0)
                    stage += 1
                self.earliest[kind] = self.latest[kind] = stage

    def _is_forced(self, stage: int, kind: int) -> bool:
        has_one_stage = self.earliest[kind] == self.latest[kind] == stage
        return has_one_stage and kind in self.necessity.required

    def _column(self, what: str, stage: int, index: int) -> int:
        key = (what, stage, index)
        if key not in self.columns:
            self.columns[key] = len(self.costs)
            self.costs.append(int(self.instance.duration[index]) if what == "run" else 0)
        return self.columns[key]

    def _add_row(self, terms: list[tuple[int, int]], right: int) -> None:
        number = len(self.rights)
        for column, coefficient in terms:
            self.rows.append(number)
            self.items.append(column)
            self.coefficients.append(coefficient)
        self.rights.append(right)

    def _sources(self, stage: int, value: int, but: int = -1) -> list[tuple[int, int]] | None:
        """Terms that say the value is present in a stage; None when the stage certainly makes it."""
        terms = []
        if value in self.possible[stage]:
            terms.append((self._column("alive", stage, value), -1))
        for kind in self.necessity.writers[value]:
            if kind == but or self.earliest[kind] > stage:
                continue
            if self._is_forced(stage, kind):
                return None
            terms.append((self._column("run", stage, kind), -1))
        return terms

    def _stage_constraints(self) -> None:
        instance, necessity = self.instance, self.necessity
        initial, targets = set(instance.initial.tolist()), instance.targets.tolist()
        self.possible = [set(initial)]
        for stage in range(1, self.num_stages):
            made = {
                value
                for kind in range(instance.num_kinds)
                if self.earliest[kind] < stage
                for value in necessity.writes[kind]
            }
            self.possible.append((initial | made) - set(necessity.writes[self.moments[stage - 1]]))
        for kind in sorted(necessity.required):
            first, last = self.earliest[kind], self.latest[kind]
            if first == last:
                self.constant += int(instance.duration[kind])
            else:  # A required kind runs for the first time in one of the stages that its order allows.
                self._add_row([(self._column("run", stage, kind), -1) for stage in range(first, last + 1)], -1)
        for stage in range(self.num_stages):
            for kind in range(instance.num_kinds):
                if self.earliest[kind] <= stage:
                    self._reads_are_present(stage, kind)
            if stage + 1 < self.num_stages:
                for value in sorted(self.possible[stage + 1]):
                    # What is alive at a moment was alive at the one before, or was written in between.
                    terms = self._sources(stage, value)
                    if terms is not None:
                        self._add_row([(self._column("alive", stage + 1, value), 1), *terms], 0)
        for stage in range(1, self.num_stages - 1):
            self._runs_from(stage)
        for value in targets:
            # A target is present at the end.
            terms = self._sources(self.num_stages - 1, value)
            if terms is not None:
                self._add_row(terms, -1)
        for kind in range(instance.num_kinds):
            if not instance.can_repeat[kind]:
                # A kind that may run once runs in one stage.
                stages = [stage for stage in range(self.num_stages) if ("run", stage, kind) in self.columns]
                self._add_row([(self.columns["run", stage, kind], 1) for stage in stages], 1)

    def _reads_are_present(self, stage: int, kind: int) -> None:
        is_forced = self._is_forced(stage, kind)
        is_moment = stage > 0 and kind == self.moments[stage - 1]
        for value in self.necessity.reads[kind]:
            if is_moment:
                # What a moment's kind reads is alive when it runs.
                if value in self.possible[stage]:
                    self._add_row([(self._column("alive", stage, value), -1)], -1)
                continue
            # What a kind reads in a stage is alive at the stage's moment, or is written in the stage.
            terms = self._sources(stage, value, kind)
            if stage > 0 and value in self.necessity.writes[self.moments[stage - 1]]:
                continue
            if terms is not None:
                own = [] if is_forced else [(self._column("run", stage, kind), 1)]
                self._add_row([*own, *terms], -1 if is_forced else 0)

    def _runs_from(self, stage: int) -> None:
        """Tie the stages together: "from" variables say that a kind runs in this stage or a later one.

        Whole numbers imply these rows, fractions do not: half a run in each of two stages would pass for one.
        """
        kinds = range(self.instance.num_kinds)
        is_sure = [self.earliest[kind] >= stage and kind in self.necessity.required for kind in kinds]
        written_at_moment = set(self.necessity.writes[self.moments[stage - 1]])
        for kind in kinds:
            own = [] if is_sure[kind] else [(self._column("from", stage, kind), 1)]
            if own:
                # A kind that runs from this stage on runs in one of the stages.
                stages = range(max(stage, self.earliest[kind]), self.num_stages)
                self._add_row(own + [(self._column("run", later, kind), -1) for later in stages], 0)
            for value in self.necessity.reads[kind]:
                # What it reads is alive at the stage's moment, or is written in this stage or later.
                writers = [other for other in self.necessity.writers[value] if other != kind]
                if value in written_at_moment or any(is_sure[other] for other in writers):
                    continue
                terms = [(self._column("from", stage, other), -1) for other in writers]
                if value in self.possible[stage]:
                    terms.append((self._column("alive", stage, value), -1))
                self._add_row(own + terms, 0 if own else -1)

    def solve(self, budget_bytes: int) -> int:
        """The weak-duality value of the solver's multipliers, rounded up because times are whole numbers."""
        instance = self.instance
        reuse = instance.reuse_bytes()
        total = max(1, int(instance.size_bytes.sum()))
        for stage, moment in enumerate(self.moments, start=1):
            # What is alive at a moment, with what its kind writes and its workspace, fits the budget.
            room = budget_bytes - _own_bytes(instance, moment, int(reuse[moment]))
            terms = [
                (self._column("alive", stage, value), int(instance.size_bytes[value]))
                for value in sorted(self.possible[stage])
                if instance.size_bytes[value]
            ]
            self._add_row(terms, room)
        matrix = csr_array(
            (np.array(self.coefficients, float), (self.rows, self.items)), shape=(len(self.rights), len(self.costs))
        )
        rights = np.array(self.rights, float)
        # Rows in bytes are scaled to the size of the others, because the solver's tolerances are absolute.
        scale = np.ones(len(rights))
        scale[len(rights) - len(self.moments) :] = 1000.0 / total
        scaled = matrix.multiply(scale[:, None]).tocsr()
        costs = np.array(self.costs, float)
        unit = max(1.0, float(costs.mean()))
        result = linprog(costs / unit, A_ub=scaled, b_ub=rights * scale, bounds=(0, 1), method="highs-ds")
        if result.status == 2:
            return 0
        multipliers = np.maximum(-result.ineqlin.marginals, 0.0) * scale * unit
        reduced = costs + matrix.T @ multipliers
        dual = self.constant - float(rights @ multipliers) + float(np.minimum(reduced, 0.0).sum())
        magnitude = abs(self.constant) + float(np.abs(rights * multipliers).sum()) + float(np.abs(reduced).sum())
        return math.ceil(dual - 1e-12 * magnitude)
