"""How a step in stages is planned: the cut, and each stage's plan within its rank's budget.

In: a request, who does what, and the shards of a batch. Out: StagePlans. Rank 0 measures, finds the cut, and sends both
with its costs. Where there is a budget it also plans the stages of its row, since a cut is good only if each rank can
keep to it; the others check these plans.

What a shard keeps between its pieces counts as often as shards are in flight. So a stage is planned by the curve of its
Program: the fastest point is taken whose peak, with what the other shards keep at that point, fits.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from undertow.api.batch_division import count_examples
from undertow.api.stage_memory import find_rank_held, plan_as_derived, plan_within
from undertow.api.stage_profile import Estimate, profile_of
from undertow.api.stage_programs import (
    Kind,
    Parts,
    Recorded,
    StageContext,
    divide_recorded,
    record_shard,
    stage_program,
)
from undertow.api.stage_tensors import StageTensors
from undertow.errors import CallError, InfeasibleBudget, PlanError, RankLost
from undertow.ir import InputKind, Plan, Program, TensorType
from undertow.ir.check_plan import check_plan
from undertow.ir.cost import read_cost
from undertow.ir.saving import pack_plan, unpack_plan
from undertow.ir.structure import tensors_in
from undertow.ops.communication import Link
from undertow.ops.shards import Shards
from undertow.passes.stages import starts_in
from undertow.pipeline import Request
from undertow.ranks.group import RankGroup
from undertow.ranks.reduction import Division
from undertow.ranks.tree import Span
from undertow.stages.arrivals import Routes
from undertow.stages.check_schedule import check_schedule
from undertow.stages.cutting import Cut, Profile, find_cut, most_of_a_step
from undertow.stages.schedules import Schedule, make_schedule
from undertow.stages.timing import idle_by_formula

if TYPE_CHECKING:
    from undertow.api.staged_step import Layout


@dataclass(frozen=True, eq=False)
class StagePlans:
    """What a rank knows of a kind of call."""

    schedule: Schedule
    starts: tuple[int, ...]
    divisions: Mapping[int, Parts]  # by the number of examples of a shard
    contexts: Mapping[int, StageContext]  # of this rank's stages
    plans: Mapping[Kind, Plan]
    routes: Routes  # of the shards of this row
    readers: Mapping[str, list[int]]
    with_gradient: Sequence[str]  # parameters, in the model's order
    cut: Cut | None = None  # on rank 0, who has found it
    bound: str = ""  # what bounds the cut

    @cached_property
    def loss_stage(self) -> int:
        """The stage that has the loss."""
        parts = next(iter(self.divisions.values())).parts
        return next(part.stage for part in parts if part.program.seed is not None)

    @cached_property
    def loss_type(self) -> TensorType:
        """The type of the loss."""
        return next(iter(self.divisions.values())).recorded.program.outputs[0].tensor_type

    def kind_of(self, stage: int, num_examples: int, is_last: bool) -> Kind:
        """The kind that a shard is of."""
        return Kind(stage, num_examples, is_last)


def plan_call(
    request: Request, layout: Layout, shards: Shards, parts: Sequence[Any], tensors: StageTensors | None
) -> StagePlans:
    """The plans of this rank; all ranks call this."""
    planning = _Planning(request, layout, shards, parts)
    ranks = layout.ranks
    if ranks.rank == 0:
        try:
            decision = planning.decide()
        except Exception as error:
            ranks.send_bytes(json.dumps({"error": str(error)}).encode())
            raise
        ranks.send_bytes(json.dumps(decision).encode())
    else:
        decision = _read(ranks.send_bytes(None))
    return planning.build(decision)


def _read(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
        if found.get("error") is not None:
            raise RankLost(f"rank 0 could not plan the step: {found['error']}", 0)
        return {
            "starts": tuple(map(int, found["starts"])),
            "costs": {str(key): read_cost(cost) for key, cost in found["costs"].items()},
            "buckets": [
                None if item is None else tuple(tuple(map(str, names)) for names in item) for item in found["buckets"]
            ],
            "plans": [{str(name): str(text) for name, text in item.items()} for item in found["plans"]],
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PlanError(f"what rank 0 sent is not a cut ({error})") from None


def warn_of_few_shards(schedule: Schedule) -> None:
    """Say that most ranks wait most of the time."""
    if schedule.num_shards < schedule.num_ranks:
        stages_a_rank = schedule.num_stages // schedule.num_ranks
        idle = idle_by_formula(schedule.name, schedule.num_ranks, schedule.num_shards, stages_a_rank=stages_a_rank)
        warnings.warn(
            f"{schedule.num_shards} shards run through the stages of {schedule.num_ranks} ranks, which wait {idle:.0%} "
            f"of the time or more; give several shards for each stage",
            stacklevel=2,
        )


@dataclass(eq=False)
class _Planning:
    """One kind of call on this rank."""

    request: Request
    layout: Layout
    shards: Shards
    parts: Sequence[Any]
    recorded: dict[int, Recorded] = field(default_factory=dict)
    divisions: dict[int, Parts] = field(default_factory=dict)
    cut: Cut | None = None
    bound: str = ""

    def __post_init__(self) -> None:
        for part in self.parts:
            size = count_examples(*part)
            if size not in self.recorded:
                self.recorded[size] = record_shard(self.request, *part)

    @property
    def row_schedule(self) -> Schedule:
        """The schedule of this rank's row."""
        return self.schedule_of(self.layout.own_row)

    def schedule_of(self, row: int) -> Schedule:
        """The schedule of a row, which depends on how many shards it has."""
        layout = self.layout
        return check_schedule(make_schedule(layout.schedule, layout.mesh.stages, len(layout.spans[row])))

    # What rank 0 decides.

    def decide(self) -> dict[str, Any]:
        """Costs, the cut, buckets, and with a budget the plans of the first row, as plain data."""
        terms, schedule = self.request.terms, self.schedule_of(0)
        warn_of_few_shards(schedule)
        profile = self.find_profile(schedule)
        cut, plans = self.find_cut(profile, schedule)
        self.cut, self.bound = cut, most_of_a_step(profile, cut)
        self._divide(cut.starts, schedule)
        contexts = [self._make_context(stage, schedule) for stage in range(schedule.num_stages)]
        buckets = [self._find_buckets(context, stage) for stage, context in enumerate(contexts)]
        packed = [{str(kind): pack_plan(plan, {}).decode() for kind, plan in item.items()} for item in plans]
        return {
            "starts": cut.starts,
            "costs": {key: [cost.duration_ns, cost.workspace_bytes] for key, cost in terms.table.items()},
            "buckets": buckets,
            "plans": packed,
        }

    def find_cut(self, profile: Profile, schedule: Schedule) -> tuple[Cut, list[dict[Kind, Plan]]]:
        """The cut; where there is a budget, also the plans of the ranks of a row."""
        budget_bytes = self.request.terms.budget_bytes
        if budget_bytes is not None:
            return self._cut_within(profile, schedule, budget_bytes)
        cut = find_cut(profile, schedule)
        assert cut is not None
        return cut, []

    def find_profile(self, schedule: Schedule) -> Profile:
        """Times, bytes and memory of the largest shard."""
        largest = self.recorded[max(self.recorded)]
        return profile_of(self.request, largest, schedule, self.shards.tree)

    def _cut_within(
        self, profile: Profile, schedule: Schedule, budget_bytes: int
    ) -> tuple[Cut, list[dict[Kind, Plan]]]:
        """The best cut whose ranks keep to the budget, with their plans.

        What a rank needs at least is known when it was planned. Then that is remembered, and other cuts are looked for.
        """
        estimate = Estimate(profile, schedule, budget_bytes, self._batch_bytes())
        refusals: list[InfeasibleBudget] = []
        for _ in range(MOST_CUTS):
            cut = find_cut(profile, schedule, estimate.fits)
            if cut is None:
                break
            try:
                return cut, [self.plan_place(place, cut.starts, schedule) for place in range(schedule.num_ranks)]
            except InfeasibleBudget as refusal:
                refusals.append(refusal)
                estimate.learn(cut.starts, int(refusal.at.split()[1]), refusal.minimum_bytes)
        if not refusals:
            # Not even what is held throughout fits: a plan says so with the figures.
            spread = find_cut(profile, schedule)
            assert spread is not None
            return spread, [self.plan_place(place, spread.starts, schedule) for place in range(schedule.num_ranks)]
        raise min(refusals, key=lambda refusal: refusal.minimum_bytes)

    def _batch_bytes(self) -> int:
        return sum(tensor.nbytes for part in self.parts for tensor in _tensors(part))

    def plan_place(self, place: int, starts: Sequence[int], schedule: Schedule) -> dict[Kind, Plan]:
        """The plans of one rank of the row."""
        self._divide(starts, schedule)
        contexts = {stage: self._make_context(stage, schedule) for stage in schedule.stages_of(place)}
        return self._plan(contexts, schedule, place)

    def _find_buckets(self, context: StageContext, stage: int) -> Any:
        if context.link is None:
            return None
        size = count_examples(*self.parts[self.layout.spans[0].end - 1])
        stage_program(self.divisions[size].parts[stage], context.training_of(True), self.request.terms)
        return context.link.buckets

    # What all ranks do.

    def build(self, decision: Mapping[str, Any]) -> StagePlans:
        """The plans of this rank."""
        self.request.terms.table.update(
            {key: read_cost(cost) if isinstance(cost, list) else cost for key, cost in decision["costs"].items()}
        )
        layout, schedule = self.layout, self.row_schedule
        starts = tuple(decision["starts"])
        self._divide(starts, schedule)
        contexts = {stage: self._make_context(stage, schedule) for stage in schedule.stages_of(layout.place)}
        for stage, context in contexts.items():
            if context.link is not None:
                context.link.buckets = tuple(tuple(names) for names in decision["buckets"][stage])
        given = decision["plans"][layout.place] if decision["plans"] and self._is_like_the_first_row() else None
        plans = self._plan(contexts, schedule, layout.place, given)
        readers = self._find_readers(schedule, self.largest)
        for size, division in self.divisions.items():
            if self._find_readers(schedule, division) != readers:
                raise CallError(
                    f"shards of {size} examples run other operations than those of {max(self.divisions)}, and no cut "
                    f"divides both alike; give a batch that the shards divide evenly"
                )
        names = dict(self.request.model.named_parameters())
        trained = {
            self._known_name(item.input.name)
            for part in self.largest.parts
            for item in part.program.gradients
            if item.value is not None
        }
        return StagePlans(
            schedule=schedule,
            starts=starts,
            divisions=self.divisions,
            contexts=contexts,
            plans={kind: check_plan(plan) for kind, plan in plans.items()},
            routes=self._routes(),
            readers=readers,
            with_gradient=[name for name in names if name in trained],
            cut=self.cut,
            bound=self.bound,
        )

    @property
    def largest(self) -> Parts:
        """The parts of the largest shards."""
        return self.divisions[max(self.divisions)]

    def _routes(self) -> Routes:
        """What the stages send of each shard of this row."""
        return [self.divisions[count_examples(*self.parts[shard])].routes for shard in self.shards.held.shards()]

    def _divide(self, starts: Sequence[int], schedule: Schedule) -> None:
        self.divisions.clear()
        largest = self.recorded[max(self.recorded)]
        for size, item in self.recorded.items():
            self.divisions[size] = divide_recorded(item, starts_in(item.program, largest.program, starts), schedule)

    def _make_context(self, stage: int, schedule: Schedule) -> StageContext:
        layout, link = self.layout, None
        if layout.mesh.data > 1:
            place = schedule.rank_of(stage)
            column = layout.mesh.column_of(layout.row[place])
            # Rank 0 also derives the stages of others in its row, as if it were in their column.
            members = layout.mesh.column_of(layout.ranks.rank) if place != layout.place else column
            group = RankGroup(layout.ranks, members, stage // schedule.num_ranks)
            link = Link(group, Division(self.shards.tree, layout.spans))  # type: ignore[arg-type]
        assert self.request.training is not None
        own = Shards(self.shards.tree, self.shards.held, self.shards.seed, shares=self.shards.shares)
        return StageContext(self.request.training, own, link)

    def _is_like_the_first_row(self) -> bool:
        tree, spans = self.shards.tree, self.layout.spans
        first, own = (list(map(len, tree.blocks(spans[row]))) for row in (0, self.layout.own_row))
        return first == own

    def _plan(
        self,
        contexts: Mapping[int, StageContext],
        schedule: Schedule,
        place: int,
        given: Mapping[str, str] | None = None,
    ) -> dict[Kind, Plan]:
        """The plans of a rank's stages; those that rank 0 has made, or new ones."""
        held_shards = self.shards.held
        kinds = {
            Kind(stage, count_examples(*self.parts[shard]), shard == held_shards.end - 1)
            for stage in contexts
            for shard in held_shards.shards()
        }
        programs: dict[Kind, Program] = {}
        live = {}
        for kind in sorted(kinds):
            training = contexts[kind.stage].training_of(kind.is_last)
            division = self.divisions[kind.num_examples]
            programs[kind] = stage_program(division.parts[kind.stage], training, self.request.terms)
            live[kind] = {**division.recorded.captured.live, **training.live}
        if given is not None:
            found = {}
            for kind, program in programs.items():
                saved = unpack_plan(given[str(kind)].encode(), f"rank 0's plan of {kind}")
                if not saved.is_of(program):
                    raise PlanError(f"{saved.name} is the plan of another Program")
                found[kind] = saved.read(program)
            return found
        training = next(iter(contexts.values())).training_of(True)
        tree, before = self.shards.tree, Span(held_shards.first, held_shards.end - 1)
        num_waiting = max(tree.most_partial_sums(held_shards), len(tree.blocks(before)) if len(before) else 0)
        whole = [tensor for part in self.parts for tensor in _tensors(part)]
        held = find_rank_held(training, programs, (whole, ()), num_waiting)
        terms, routes = self.request.terms, self._routes()
        if terms.budget_bytes is None:
            return plan_as_derived(programs, held, schedule, place, routes, terms)
        return plan_within(programs, held, schedule, place, routes, terms, live.__getitem__)

    def _known_name(self, name: str) -> str:
        """The first name of a parameter or buffer; one that is used in two places has two."""
        return _first_names(self.request.model).get(name, name)

    def _find_readers(self, schedule: Schedule, division: Parts) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for part in division.parts:
            rank = schedule.rank_of(part.stage)
            updated = {item.input for item in part.program.gradients if item.value is not None}
            for item in part.program.inputs:
                if item.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                    places = found.setdefault(self._known_name(item.path), [])
                    if item.value in updated and rank in places:
                        places.remove(rank)
                    if rank not in places:
                        places.insert(0 if item.value in updated else len(places), rank)
        return found


MOST_CUTS = 8


def _tensors(part: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in tensors_in(part)]


def _first_names(model: torch.nn.Module) -> dict[str, str]:
    """The first name of each parameter and buffer, by all its names."""
    found: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        first: dict[int, str] = {}
        for name, item in named(remove_duplicate=False):
            found[name] = first.setdefault(id(item), name)
    return found


@dataclass(frozen=True, eq=False)
class StagesPlan:
    """A step in stages before it runs: the cut, the schedule, and what each rank of a row runs and holds."""

    layout: Layout
    schedule: Schedule
    profile: Profile
    cut: Cut
    bound: str
    parts: Parts
    ranks: tuple[Mapping[Kind, Plan], ...]  # of each place in a row

    def peak_bytes(self, place: int) -> int:
        """The predicted peak of a rank."""
        return max(plan.peak_bytes for plan in self.ranks[place].values())


def plan_absent(request: Request, layout: Layout, shards: Shards, parts: Sequence[Any]) -> StagesPlan:
    """The plan of a job that was not started; raises InfeasibleBudget."""
    planning = _Planning(request, layout, shards, parts)
    schedule = planning.schedule_of(0)
    warn_of_few_shards(schedule)
    profile = planning.find_profile(schedule)
    cut, plans = planning.find_cut(profile, schedule)
    if not plans:
        plans = [planning.plan_place(place, cut.starts, schedule) for place in range(schedule.num_ranks)]
    return StagesPlan(layout, schedule, profile, cut, most_of_a_step(profile, cut), planning.largest, tuple(plans))
