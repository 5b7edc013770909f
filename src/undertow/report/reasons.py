"""Finds what a Plan decided and why. In: a Plan. Out: Decisions.

The plan's own bytes tell whether the budget forces a value out of memory. Would the step still fit if the value stayed
alive, alone or together with all others that were given up? If both would fit, nothing forced it.

The extra time of a code is the time of encoding and decoding. An operation that reads a code counts as it is, because a
Plan does not have the time of the operation that it replaces. The time to make a kept value again is the time of its
last operation, with its arguments present: a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from undertow.ir import Phase, Plan, Task, Value, format_bytes
from undertow.report.columns import format_us
from undertow.report.decisions import Decisions, Encoded, Kept, LayerDecisions, Reason, Recomputed, WrittenOver
from undertow.report.inspection import Site
from undertow.report.peak import find_peak, list_names
from undertow.report.timeline import Life, Role, Timeline, describe, is_written_over, site_of


def find_decisions(plan: Plan) -> Decisions:
    """What the plan decided, and why."""
    timeline = Timeline(plan)
    finder = _Finder(timeline)
    total = LayerDecisions(
        "",
        tuple(finder.kept()),
        tuple(finder.recomputed()),
        tuple(finder.encoded()),
        tuple(finder.written_over()),
    )
    # The forward pass decides the order: the backward pass meets the modules from the last to the first. It is that of
    # the Program, since a plan moves nodes.
    in_order = sorted((*plan.base.nodes, *plan.nodes), key=lambda node: node.phase is not Phase.FORWARD)
    modules = tuple(dict.fromkeys(node.origin.module_path for node in in_order))
    return Decisions(total, find_peak(timeline), modules)


@dataclass
class _Group:
    """Second runs that write the same storages, one after the other."""

    positions: list[int] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Absence:
    """Bytes that are not there from after one operation to before another."""

    num_bytes: int
    released_after: int
    back_at: int


class _Finder:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.plan = timeline.plan
        self.live = np.array(self.plan.live_bytes, np.int64)
        self.versions: dict[
            Value, list[tuple[int, Life]]
        ] = {}  # for each value, at which positions and in which storages it was made
        for position, node in enumerate(timeline.nodes):
            if not node.operation.is_view:
                for value in node.named_outputs:
                    made = (position, timeline.life_of(value))
                    self.versions.setdefault(timeline.original(value), []).append(made)
        self.groups = self._find_groups()
        self.codes = [life for life in timeline.lives if self._task_of(life) is Task.ENCODE]
        self.with_absent = self._add_absent()

    def kept(self) -> Iterator[Kept]:
        """What the forward pass leaves for the backward pass as it is."""
        timeline = self.timeline
        outputs = {timeline.life_of(value) for value in self.plan.program.outputs}
        for life in timeline.lives:
            if timeline.roles[life.number] is not Role.KEPT:
                continue
            value = timeline.content_before(life, timeline.boundary)
            maker = max(position for position in life.writers if position < timeline.boundary)
            askers = self._askers(position for position in life.readers if position >= timeline.boundary)
            recompute_us = timeline.duration_us(maker)
            is_source = timeline.is_source(life)
            reason = Reason.RECOMPUTATION_READS_IT if is_source else Reason.DERIVATIVE_READS_IT
            reason = Reason.IS_OUTPUT if life in outputs else reason
            names = list_names([describe(site) for site in askers])
            sentence = f"kept during {life.num_nodes_alive} operations because "
            sentence += f"{names} runs again from it" if is_source else f"the derivative of {names} reads it"
            sentence += "; the user gets it anyway" if reason is Reason.IS_OUTPUT else ""
            sentence += f"; making it again would take {format_us(recompute_us)} or more" if recompute_us else ""
            yield Kept(
                value=value.name,
                type=str(value.type),
                made_by=site_of(timeline.nodes[maker]),
                num_bytes=life.num_bytes,
                first=life.first,
                last=life.last,
                num_nodes_alive=life.num_nodes_alive,
                asked_for_by=askers,
                recompute_us=recompute_us,
                reason=reason,
                sentence=sentence,
            )

    def recomputed(self) -> Iterator[Recomputed]:
        """What runs a second time."""
        timeline = self.timeline
        for group in self.groups:
            lives = [timeline.lives[number] for number in group.storages]
            largest = max(lives, key=lambda life: life.num_bytes)
            last_writer = max(position for position in group.positions if position in largest.writers)
            value = timeline.content_before(largest, last_writer + 1)
            absence = self._absence_of(group)
            reason, why = self._reason(absence) if absence.num_bytes else (Reason.PART_OF_CHAIN, "")
            later = sorted({position for life in lives for position in life.readers} - set(group.positions))
            askers = self._askers(later) if absence.num_bytes else self._sites(later)
            states = [
                timeline.life_of(read).num_bytes
                for position in group.positions
                for read in timeline.nodes[position].inputs
                if self._task_of(timeline.life_of(read)) is Task.RECORD_STATE
            ]
            extra_us = sum(map(timeline.duration_us, group.positions))
            sentence = f"runs again at operation {group.positions[0]} ({format_us(extra_us)})"
            if reason is Reason.PART_OF_CHAIN:
                sentence += f" because {list_names([describe(site) for site in askers])} is made again from it"
            else:
                sentence += f", given up after operation {absence.released_after}; {why}"
            sentence += f"; the generator's state is recorded in {format_bytes(sum(states))}" if states else ""
            yield Recomputed(
                value=timeline.original(value).name,
                type=str(value.type),
                made_by=site_of(timeline.nodes[last_writer]),
                num_bytes=sum(life.num_bytes for life in lives),
                saved_bytes=absence.num_bytes,
                released_after=absence.released_after,
                made_again_at=group.positions[0],
                num_operations=len(group.positions),
                extra_us=extra_us,
                state_bytes=sum(states),
                asked_for_by=askers,
                reason=reason,
                sentence=sentence,
            )

    def encoded(self) -> Iterator[Encoded]:
        """What is stored as a code."""
        timeline = self.timeline
        for life in self.codes:
            encode = life.writers[0]
            node = timeline.nodes[encode]
            value = node.inputs[0]
            original = timeline.life_of(value)
            absence = self._absence_of_code(life)
            decodes = [position for position in life.readers if timeline.nodes[position].task is Task.DECODE]
            extra_us = sum(map(timeline.duration_us, [encode, *decodes]))
            reason, why = self._reason(absence)
            maker = timeline.makers.get(value.name, node)
            sentence = (
                f"held as {format_bytes(life.num_bytes)} instead of {format_bytes(original.num_bytes)} from operation "
                f"{encode} to {life.last} ({format_us(extra_us)}); {why}"
            )
            yield Encoded(
                value=timeline.original(value).name,
                type=str(value.type),
                made_by=site_of(maker),
                encoding=node.name,
                num_bytes=original.num_bytes,
                code_bytes=life.num_bytes,
                encoded_at=encode,
                read_at=life.readers[0] if life.readers else encode,
                extra_us=extra_us,
                asked_for_by=self._askers(life.readers),
                reason=reason,
                sentence=sentence,
            )

    def written_over(self) -> Iterator[WrittenOver]:
        """Results that take the memory of an argument."""
        for position, node in enumerate(self.timeline.nodes):
            if not is_written_over(node) or not node.named_outputs:
                continue
            value, over = node.named_outputs[0], node.inputs[0]
            size = format_bytes(value.type.num_bytes)
            yield WrittenOver(
                value=value.name,
                made_by=site_of(node),
                over=over.name,
                num_bytes=value.type.num_bytes,
                position=position,
                reason=Reason.READ_NO_MORE,
                sentence=f"takes the memory of %{over.name}, which nothing reads again: {size} saved",
            )

    def _find_groups(self) -> list[_Group]:
        groups: list[_Group] = []
        group_of: dict[int, _Group] = {}
        for position, node in enumerate(self.timeline.nodes):
            if node.task is not Task.AGAIN or node.operation.is_view:
                continue
            storages = list(dict.fromkeys(self.timeline.life_of(value).number for value in node.named_outputs))
            group = next((group_of[number] for number in storages if number in group_of), None)
            if group is None:
                group = _Group()
                groups.append(group)
            group.positions.append(position)
            for number in storages:
                if number not in group.storages:
                    group.storages.append(number)
                    group_of[number] = group
        return groups

    def _absence_of(self, group: _Group) -> _Absence:
        """The bytes that would stay alive until the group runs again; none if only second runs read them."""
        timeline, start = self.timeline, group.positions[0]
        num_bytes, released_after = 0, -1
        for number in group.storages:
            life = timeline.lives[number]
            last_writer = max(position for position in group.positions if position in life.writers)
            value = timeline.original(timeline.content_before(life, last_writer + 1))
            earlier = [_last_position(*made) for made in self.versions[value] if made[0] < start]
            last = max(earlier, default=start)
            released_after = max(released_after, min(last, start))
            if last < start and self._is_read_by_others(life, group):
                num_bytes += life.num_bytes
        return _Absence(num_bytes, released_after, start)

    def _is_read_by_others(self, life: Life, group: _Group) -> bool:
        """Whether something that does not run again itself reads the storage, or an encoding of it does."""
        rest = [position for position in life.readers if position not in group.positions]
        return not rest or any(self.timeline.nodes[position].task is not Task.AGAIN for position in rest)

    def _absence_of_code(self, life: Life) -> _Absence:
        original = self.timeline.life_of(self.timeline.nodes[life.writers[0]].inputs[0])
        return _Absence(
            max(original.num_bytes - life.num_bytes, 0), original.last, max(life.readers, default=life.last)
        )

    def _add_absent(self) -> np.ndarray:
        """The plan's bytes if everything that was given up stayed alive."""
        change = np.zeros(len(self.live) + 1, np.int64)
        absences = [self._absence_of(group) for group in self.groups] + [self._absence_of_code(c) for c in self.codes]
        for absence in absences:
            if absence.released_after + 1 < absence.back_at:
                change[absence.released_after + 1] += absence.num_bytes
                change[absence.back_at] -= absence.num_bytes
        return self.live + np.cumsum(change)[: len(self.live)]

    def _reason(self, absence: _Absence) -> tuple[Reason, str]:
        """Whether the budget forces this absence, and the moment that shows it."""
        size, budget = format_bytes(absence.num_bytes), self.plan.budget_bytes
        start, end = absence.released_after + 1, absence.back_at
        if budget is None or start >= end:
            return Reason.NOT_FORCED, f"no budget forces this; it saves {size}"
        limit = format_bytes(budget)
        fullest = start + int(self.live[start:end].argmax())
        alone = int(self.live[fullest]) + absence.num_bytes
        if alone > budget:
            where = describe(site_of(self.timeline.nodes[fullest]))
            return Reason.OVER_BUDGET, (
                f"with its {size} in memory, {where} would go {format_bytes(alone - budget)} over the budget of {limit}"
            )
        fullest = start + int(self.with_absent[start:end].argmax())
        together = int(self.with_absent[fullest])
        if together > budget:
            where = describe(site_of(self.timeline.nodes[fullest]))
            return Reason.TOGETHER_OVER_BUDGET, (
                f"its {size} alone would fit, but with all that was given up in memory, {where} would go "
                f"{format_bytes(together - budget)} over the budget of {limit}"
            )
        return Reason.NOT_FORCED, f"the budget alone does not force this: its {size} would fit"

    def _task_of(self, life: Life) -> Task | None:
        return self.timeline.nodes[life.writers[0]].task if life.writers else None

    def _askers(self, positions: Iterable[int]) -> tuple[Site, ...]:
        return tuple(dict.fromkeys(site_of(self.timeline.asker(position)) for position in positions))

    def _sites(self, positions: Iterable[int]) -> tuple[Site, ...]:
        return tuple(dict.fromkeys(site_of(self.timeline.nodes[position]) for position in positions))


def _last_position(made_at: int, life: Life) -> int:
    """The last operation before what was written into a storage at `made_at` is freed or written over."""
    overwritten = [position - 1 for position in life.writers if position > made_at]
    return min([life.last, *overwritten])
