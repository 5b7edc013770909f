"""A training step whose model is divided over ranks: `train_step(..., shards=8, parallel=Mesh(stages=2))`.

In: a batch, on every rank. Out: its loss, on every rank; each rank has updated the parameters of its own stages. The
shards run through the stages one after the other, as the schedule says. The result is that of one process with the same
shards: each stage runs the operations of that process's step, and sums have the same order.

Between calls a rank holds the parameters of its own stages. `settle` brings all of them to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from undertow.api.batch_division import count_examples, divide_batch, shard_sizes
from undertow.api.sharding import check_shards, shard_seed
from undertow.api.shared_plans import describe_rank
from undertow.api.stage_planning import StagePlans, StagesPlan, plan_absent, plan_call
from undertow.api.stage_programs import Sources
from undertow.api.stage_state import drop_foreign_state, gather_state
from undertow.api.stage_tensors import StageTensors
from undertow.api.stage_updates import exchange_loss, find_norm, step_later
from undertow.api.training import TrainStep
from undertow.errors import CallError
from undertow.ir import Node, Plan
from undertow.ir.saving import SavedPlan
from undertow.ir.structure import list_tensors, structure_key
from undertow.ops.gradient_norms import GRADIENT_NORMS
from undertow.ops.interpret import generators_of
from undertow.ops.own import bind
from undertow.ops.shards import Shards
from undertow.ops.stages import STAGE_LINK, StageLink
from undertow.passes.shards import ShardPart
from undertow.ranks.absent import AbsentRanks
from undertow.ranks.mesh import Mesh
from undertow.ranks.ranks import Ranks, join
from undertow.ranks.tree import Span, Tree, divide
from undertow.runtime.stages import Running, StageProgram, StageRunner, Turn, list_turns
from undertow.stages.arrivals import Ask, order_asks
from undertow.stages.schedules import Pass, Piece, make_schedule


def make_staged(
    make: Callable[..., TrainStep], num_shards: Any, seed: Any, loss_is_sum: bool, mesh: Mesh, schedule: str
) -> StagedStep:
    """The step of this rank. `make` makes the step of a shard."""
    check_shards(num_shards, seed)
    if num_shards < mesh.data:
        raise CallError(
            f"{num_shards} shards cannot be divided over {mesh.data} rows of ranks: each needs one; give more shards, "
            f"or fewer rows"
        )
    make_schedule(schedule, mesh.stages, 1)
    ranks = join(mesh)
    tree = Tree(num_shards)
    spans = divide(num_shards, [1.0] * mesh.data)
    place = mesh.column_of(ranks.rank).index(ranks.rank)
    shards = Shards(tree, spans[place], seed)
    step = StagedStep(make(shards=ShardPart(shards, True)), shards, loss_is_sum, Layout(mesh, ranks, spans, schedule))
    for name, parameter in step.model.named_parameters():
        if parameter.device.type != "cpu":
            raise CallError(
                f"parameter {name} is on {parameter.device}, and stages run on CPUs for now; use data= alone"
            )
    return step


def plan_stages(
    make: Callable[..., TrainStep], num_shards: int, mesh: Mesh, schedule: str, args: tuple[Any, ...], kwargs: Any
) -> StagesPlan:
    """What the ranks of a mesh would run, without any of them."""
    tree, spans = Tree(num_shards), divide(num_shards, [1.0] * mesh.data)
    parts = divide_batch(args, kwargs, num_shards)
    shards = Shards(tree, spans[0], shares=(1 / num_shards,) * num_shards)
    ranks = cast(Ranks, AbsentRanks(mesh.num_ranks))  # planning asks them for nothing but who they are
    layout = Layout(mesh, ranks, spans, schedule)
    return plan_absent(make(shards=ShardPart(shards, True)).request, layout, shards, parts)


@dataclass(frozen=True, eq=False)
class Layout:
    """Who does what: the mesh, this rank, the shards of each row of ranks, and the name of the schedule."""

    mesh: Mesh
    ranks: Ranks
    spans: tuple[Span, ...]
    schedule: str

    @property
    def row(self) -> tuple[int, ...]:
        """The ranks that have the other stages of the same shards."""
        return self.mesh.row_of(self.ranks.rank)

    @property
    def place(self) -> int:
        """This rank's place in its row."""
        return self.row.index(self.ranks.rank)

    @property
    def own_row(self) -> int:
        """Which row this rank is in."""
        return self.mesh.column_of(self.ranks.rank).index(self.ranks.rank)


@dataclass(eq=False)
class _Prepared:
    """What runs for one kind of call."""

    plans: StagePlans
    turns: list[Turn]
    programs: dict[Any, tuple[StageProgram, Sources]]
    generators: list[torch.Generator]
    kinds: dict[int, Any] = field(default_factory=dict)


class StagedStep(TrainStep):
    """A training step of one rank of a mesh with several stages."""

    def __init__(self, last: TrainStep, shards: Shards, loss_is_sum: bool, layout: Layout) -> None:
        super().__init__(last.request)
        self.shards, self.loss_is_sum, self.layout = shards, loss_is_sum, layout
        self.stage_link = StageLink(layout.ranks, ())
        self._prepared: dict[Any, _Prepared] = {}
        self._last: _Prepared | None = None
        self.tensors: StageTensors | None = None
        self.busy_ns = 0  # that this rank computed during the last call
        self._norm: torch.Tensor | None = None  # of all gradients, where updates do not wait for it

    @property
    def plans(self) -> StagePlans:
        """The cut, the schedule, and the plans of this rank's stages."""
        assert self._last is not None
        return self._last.plans

    @property
    def plan(self) -> Plan:
        """The plan that takes most memory, of all that this rank runs."""
        return max(self.plans.plans.values(), key=lambda plan: plan.peak_bytes)

    @property
    def norm(self) -> torch.Tensor | None:
        return super().norm if self._norm is None else self._norm

    @property
    def peak_bytes(self) -> int:
        return self.plan.peak_bytes

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: SavedPlan | None = None) -> None:
        """Record, cut and plan; all ranks call this, and rank 0 decides."""
        if saved is not None:
            raise CallError(f"saved_plan is {saved.name}, and ranks get their plans from rank 0; leave it out")
        ranks = self.layout.ranks
        self.settle()
        with ranks.reporting("planning"), ranks.patient():
            parts = self._divide(args, kwargs)
            ranks.agree({**describe_rank(self, self.layout.spans, args, kwargs), "the schedule": self.layout.schedule})
            plans = plan_call(self.request, self.layout, self.shards, parts, self.tensors)
            self._bind(self._key(args, kwargs), plans)

    def _bind(self, key: Any, plans: StagePlans) -> None:
        schedule, layout = plans.schedule, self.layout
        self.stage_link.rank_of_stage = [layout.row[schedule.rank_of(stage)] for stage in range(schedule.num_stages)]
        modules = dict(self.model.named_modules())
        programs = {}
        for kind, plan in plans.plans.items():
            recorded = plans.divisions[kind.num_examples].recorded
            training = plans.contexts[kind.stage].training_of(kind.is_last)
            live = {**recorded.captured.live, **training.live, STAGE_LINK.name: self.stage_link}
            programs[kind] = StageProgram(plan, live), Sources(recorded.captured, plan.program, modules)
        recorded = next(iter(plans.divisions.values())).recorded
        used = [bind(item, recorded.captured.live) for item in generators_of(recorded.program.first_pass)]
        turns = list_turns(schedule.ranks[layout.place], order_asks(schedule, layout.place, plans.routes))
        self._last = self._prepared[key] = _Prepared(plans, turns, programs, used)
        if self.tensors is None:
            self.tensors = StageTensors(self.model, layout.ranks, layout.row, plans.readers)
        self.tensors.readers = plans.readers

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        modes = tuple(module.training for module in self.model.modules())
        wanted = tuple(parameter.requires_grad for parameter in self.model.parameters())
        return structure_key(args), structure_key(kwargs), modes, wanted, torch.is_autocast_enabled("cpu")

    def _divide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        num_shards = self.shards.tree.num_shards
        parts = divide_batch(args, kwargs, num_shards)
        sizes = shard_sizes(count_examples(args, kwargs), num_shards)
        self.shards.shares = tuple(1.0 if self.loss_is_sum else size / sum(sizes) for size in sizes)
        return parts

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._follow_parameters()
        self._check_untouched()
        key = self._key(args, kwargs)
        if key not in self._prepared:
            self.prepare(args, kwargs)
        prepared = self._last = self._prepared[key]
        assert self.tensors is not None
        self._set_aside()
        ranks, parts = self.layout.ranks, self._divide(args, kwargs)
        with ranks.reporting(f"call {self.shards.num_calls + 1} of the step"), torch.enable_grad():
            loss = self._run(prepared, parts)
        self.shards.num_calls += 1
        if self.optimizer is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedules ask for it
        return loss

    def _run(self, prepared: _Prepared, parts: list[Any]) -> torch.Tensor:
        plans, first = prepared.plans, self.shards.held.first
        last = self.shards.held.end - 1

        def ask(item: Ask) -> None:
            route, shard = item
            value = plans.divisions[count_examples(*parts[first + shard])].values[route.number]
            self.stage_link.ask_for(route.number, shard, route.source, value.tensor_type)

        def begin(piece: Piece) -> None:
            shard = first + piece.shard
            context = plans.contexts[piece.stage]
            context.shards.shares, context.shards.num_calls = self.shards.shares, self.shards.num_calls
            context.shards.begin(shard)
            self.stage_link.shard = piece.shard
            if piece.which is Pass.FORWARD:
                for place, generator in self._places(prepared.generators):
                    generator.manual_seed(shard_seed(self.shards.seed, self.shards.num_calls, shard, place))

        def start(piece: Piece) -> Running:
            part = parts[first + piece.shard]
            kind = plans.kind_of(piece.stage, count_examples(*part), first + piece.shard == last)
            program, sources = prepared.programs[kind]
            return program.start(sources.find(list_tensors(*part)))

        runner = StageRunner(prepared.turns, self.stage_link, ask, begin, start)
        try:
            with self._generators_put_back(prepared.generators):
                runner.run()
            self.busy_ns = runner.busy_ns
            results = {stage: runner.results[stage][0] for stage in plans.contexts}
        finally:
            self.stage_link.forget()
            for context in plans.contexts.values():
                context.shards.forget()
        self._update(plans)
        return exchange_loss(self.layout, plans, results)

    def _update(self, plans: StagePlans) -> None:
        """What needs the gradients of all stages; then ranks that share a parameter get its new value."""
        assert self.tensors is not None
        is_new = True
        if self.training.has_norm and self.training.updates_inside:
            found = self.training.live[GRADIENT_NORMS.name].found
            parameters = dict(self.model.named_parameters())
            own = {name: found[id(parameters[name])] for name in plans.with_gradient if self.tensors.is_own(name)}
            self._norm = find_norm(self.tensors, plans.with_gradient, own)
        if self.optimizer is not None and not self.training.updates_inside:
            is_new = step_later(self.training, self.tensors, plans.with_gradient)
        if is_new and self.optimizer is not None:
            self.tensors.send_updated([name for name in plans.with_gradient if len(plans.readers[name]) > 1])

    def _places(self, generators: list[torch.Generator]) -> Iterator[tuple[int, torch.Generator]]:
        """The generators with their places among all, as in one process."""
        own = [torch.default_generator, *torch.cuda.default_generators]
        others = [generator for generator in generators if generator not in own]
        return ((place, item) for place, item in enumerate([*own, *others]) if item in generators)

    @contextmanager
    def _generators_put_back(self, generators: list[torch.Generator]) -> Iterator[None]:
        states = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def _set_aside(self) -> None:
        assert self.tensors is not None
        if self.tensors.is_whole:
            self.tensors.set_aside()
            if self.optimizer is not None:
                drop_foreign_state(self.optimizer, self.tensors)

    def settle(self) -> None:
        """Bring all parameters, buffers and the whole state of the optimizer to all ranks; all call this.

        The next call sets aside again what belongs to other stages.
        """
        if self.tensors is not None and not self.tensors.is_whole:
            with self.layout.ranks.reporting("gathering the parameters of all stages"):
                self.tensors.gather()
                if self.optimizer is not None:
                    gather_state(self.optimizer, self.tensors)

    def optimizer_state(self) -> dict[str, Any]:
        self.settle()
        return super().optimizer_state()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        super().load_optimizer_state(state)
        if self.tensors is not None and not self.tensors.is_whole:
            drop_foreign_state(self._given_optimizer(), self.tensors)

    def decide_together(self, answer: bool) -> bool:
        ranks = self.layout.ranks
        return ranks.send_bytes(bytes([answer]) if ranks.rank == 0 else None) == b"\1"

    def walk(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Node, list[Any]]]:
        raise CallError("a step in stages cannot run one operation at a time; walk through it in one process")

    def release(self) -> None:
        """Nothing is held between calls but the rank's parameters."""
