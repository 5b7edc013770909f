"""A training step of a batch in shards: `train_step(..., shards=8)`.

In: a batch. Out: its loss; the parameters are updated. The batch is divided into a fixed number of shards, and each is
computed alone: its own forward and backward pass, its own generator, its own statistics of batch normalisation. The
gradients are added in the order of a tree over the shards' numbers, and there is one update. So the result depends on
the shards, and never on who computes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from undertow.api.batch_division import count_examples, divide_batch, shard_sizes
from undertow.api.mixing import warn_of_mixing
from undertow.api.rank_timeline import record_step
from undertow.api.shared_plans import describe_rank, know_link, share_plans
from undertow.api.state_pieces import cut_whole_state, gather_pieces, join_pieces, own_pieces
from undertow.api.training import TrainStep
from undertow.calls.runner import Runner
from undertow.calls.smaller_batch import offering_smaller_batch
from undertow.errors import CallError, InfeasibleBudget
from undertow.ir import Node, Plan, TensorType
from undertow.ir.saving import SavedPlan
from undertow.ir.structure import structure_key, tensors_in
from undertow.ops.communication import Link
from undertow.ops.own_parts import OwnParts
from undertow.ops.shards import Shards
from undertow.ops.updates import ELEMENTWISE_OPTIMIZERS
from undertow.passes.shards import ShardPart
from undertow.passes.training import Training
from undertow.ranks.mesh import Mesh
from undertow.ranks.ranks import join
from undertow.ranks.reduction import Division
from undertow.ranks.tree import Span, Tree, divide
from undertow.report.rank_times import StepOfRanks


def shard_seed(seed: int, step: int, shard: int, generator: int = 0) -> int:
    """The seed of a shard's generator. `generator` tells apart the generators of one model; PyTorch's own is 0."""
    text = f"{seed} {step} {shard} {generator}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def make_sharded(
    make: Callable[..., TrainStep],
    num_shards: Any,
    seed: Any,
    loss_is_sum: bool,
    mesh: Mesh | None,
    weights: Any = None,
    own: OwnParts | None = None,
) -> ShardedStep:
    """The step of this rank; without a mesh, of the only one. `make` makes the step of a shard.

    `weights` says how many shards each rank takes. With `own` the optimizer's state is divided over the ranks; a rank
    that is alone has all of it.
    """
    check_shards(num_shards, seed)
    weights = _check_weights(weights, mesh)
    tree, held, link = Tree(num_shards), Span(0, num_shards), None
    if mesh is not None and mesh.num_ranks > 1:
        if num_shards < mesh.data:
            raise CallError(
                f"{num_shards} shards cannot be divided over {mesh.data} ranks: each rank needs one; give more shards, "
                f"or fewer ranks"
            )
        ranks = join(mesh)
        division = Division(tree, divide(num_shards, weights))
        held, link = division.spans[ranks.rank], Link(ranks, division, own)
        if own is not None:
            own.ranks = ranks
    shards = Shards(tree, held, seed)
    before, last = (make(shards=ShardPart(shards, is_last, link)) for is_last in (False, True))
    if own is not None:
        _check_parts(last.training)
    return ShardedStep(before, last, shards, loss_is_sum)


def check_shards(num_shards: Any, seed: Any) -> None:
    """Raise CallError unless these are numbers that shards can have."""
    for name, number, least in (("shards", num_shards, 1), ("seed", seed, 0)):
        if type(number) is not int or number < least:
            raise CallError(f"{name} must be a whole number of at least {least}, got {number!r}")


def _check_weights(weights: Any, mesh: Mesh | None) -> list[float]:
    """One number for each rank; raises CallError for anything else."""
    num_ranks = 1 if mesh is None else mesh.data
    if weights is None:
        return [1.0] * num_ranks
    given = list(weights) if isinstance(weights, tuple | list) else []
    are_numbers = all(type(item) in (int, float) and 0 < item < math.inf for item in given)
    if len(given) != num_ranks or not are_numbers:
        raise CallError(
            f"weights must be a positive number for each of the {num_ranks} ranks, such as "
            f"{(2, *[1] * (num_ranks - 1))}, got {weights!r}"
        )
    return [float(item) for item in given]


def _check_parts(training: Training) -> None:
    """Raise CallError unless parts of parameters can be updated with the bits of the whole."""
    optimizer = training.optimizer
    if optimizer is None:
        raise CallError("shard_state divides an optimizer's state; give optimizer= as well")
    if type(optimizer) not in ELEMENTWISE_OPTIMIZERS:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE_OPTIMIZERS)
        raise CallError(
            f"shard_state divides the state of optimizers that treat each element by itself, which are {known}; "
            f"{type(optimizer).__name__} is not known to; train without shard_state"
        )
    if training.has_step_hooks:
        raise CallError("shard_state never calls the optimizer's step(), and it has step hooks; remove them")
    if training.masks is not None:
        raise CallError("masks hold whole parameters, and with shard_state a rank updates parts; leave out one of them")
    trained = set(training.trained())
    devices = sorted({str(parameter.device) for parameter in training.model.parameters()})
    if len(devices) > 1:
        raise CallError(
            f"the parameters lie on {' and '.join(devices)}, and shard_state is for a model on one device; move it, or "
            f"train without shard_state"
        )
    for name, parameter in training.model.named_parameters():
        if parameter.requires_grad and parameter not in trained:
            raise CallError(
                f"parameter {name} requires a gradient and is not the optimizer's, so with shard_state nobody would "
                f"get its gradient; call requires_grad_(False), or add it to the optimizer"
            )
        if not TensorType.of(parameter).is_dense:
            raise CallError(f"parameter {name} has gaps in its memory, and shard_state divides memory; clone it")


@dataclass(frozen=True)
class Kind:
    """Shards that are one step: of so many examples, and whether the rank updates after it; and one of them."""

    is_last: bool
    num_examples: int
    shard: int

    @property
    def name(self) -> str:
        """What tells it apart."""
        return f"{'the last' if self.is_last else 'an earlier'} shard of {self.num_examples} examples"


class ShardedStep(TrainStep):
    """A training step of a batch in shards. It is the step of the last shard, which also updates."""

    def __init__(self, before: TrainStep, last: TrainStep, shards: Shards, loss_is_sum: bool) -> None:
        # They take turns, so their arenas lie in the same memory.
        super().__init__(replace(last.request, memory=before.request.memory))
        self.before, self.shards, self.loss_is_sum = before, shards, loss_is_sum
        assert last.training.shards is not None
        self.link = last.training.shards.link
        self._prepared: set[Any] = set()  # kinds of calls
        self._has_begun = False  # to prepare: what is asked once was asked

    @property
    def peak_bytes(self) -> int:
        """The predicted peak: that of the shard that takes most."""
        steps = [step for step in (self.before.runner.last_step, self.runner.last_step) if step is not None]
        largest_bytes = max(step.arena.num_bytes for step in steps)
        peaks = [step.plan.peak_bytes for step in steps]
        for step in steps:
            if largest_bytes <= step.arena.most_bytes:
                peaks.append(step.plan.peak_bytes + largest_bytes - step.arena.num_bytes)
        return max(peaks)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: SavedPlan | None = None) -> None:
        """Capture and plan the steps of all kinds of shards; raises InfeasibleBudget with what the largest needs.

        One rank plans, and the others check its plans.
        """
        if saved is not None and self.link is not None:
            raise CallError(f"saved_plan is {saved.name}, and ranks get their plans from rank 0; leave it out")
        parts = self._divide(args, kwargs)
        is_first, self._has_begun = not self._has_begun, True
        if is_first and (self.link is None or self.link.ranks.rank == 0):
            with nullcontext() if self.link is None else self.link.ranks.patient():
                warn_of_mixing(self.request, args, kwargs)
        with self._handling_divided():
            self._prepare(args, kwargs, parts, saved, is_first)
        self._prepared.add(self._key(args, kwargs))

    def _prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parts: Sequence[Any],
        saved: SavedPlan | None,
        is_first: bool,
    ) -> None:
        if self.link is None:
            last = self.kinds_of(parts, [self.shards.held])[0]
            self.plan_kinds(parts, [self.shards.held], {} if saved is None else {last.name: saved})
        else:
            with self.link.ranks.reporting("planning"), self.link.ranks.patient():
                if is_first:
                    self.link.ranks.agree(describe_rank(self, self.link.division.spans, args, kwargs))
                    devices = sorted({item.device for item in self.model.parameters()}, key=str)
                    for device in devices:
                        self.link.ranks.use_device(device)
                    know_link(self.link, devices[0], self.request.terms)
                share_plans(self, parts)
        if self.training.own is not None:
            cut_whole_state(self._given_optimizer(), self.training.own)

    def try_plans(self, parts: Sequence[Any], spans: Sequence[Span]) -> list[Plan]:
        """The plans of this rank's shards, one after the other, once the shards of these spans were planned."""
        self.plan_kinds(parts, spans, {}, is_trial=True)
        last = self._held[-1]
        return [self.plan_of(parts, Kind(shard == last, count_examples(*parts[shard]), shard)) for shard in self._held]

    def divide_buckets(self, buckets: Sequence[int]) -> None:
        """Plan with the parameters of these buckets divided, which they are from the next call on."""
        own, link = self.training.own, self.link
        assert own is not None and link is not None
        if tuple(sorted(buckets)) != own.divided_buckets:
            own.divide_all(link.buckets or ())
            own.divide_buckets(buckets)
            self.forget_plans()
            self._prepared.clear()

    def change_buckets(self, buckets: tuple[tuple[str, ...], ...] | None) -> None:
        """Plan with these buckets, or with those that are found next."""
        assert self.training.own is not None and self.link is not None
        if buckets is None or buckets != self.link.buckets:
            self.link.buckets = buckets
            self.training.own.forget_buckets()
            self.forget_plans()

    def forget_plans(self) -> None:
        """Plan again what was planned so far; what was recorded stays."""
        self.runner.forget_plans()
        self.before.runner.forget_plans()

    def kinds_of(self, parts: Sequence[Any], spans: Sequence[Span]) -> list[Kind]:
        """The kinds of shards that ranks with these spans run, each once; the last ones first.

        A step of a last shard finds out what is held during all of them, where ranks own parts.
        """
        kinds: dict[str, Kind] = {}
        for span in spans:
            for shard in span.shards():
                kind = Kind(shard == span.end - 1, count_examples(*parts[shard]), shard)
                kinds.setdefault(kind.name, kind)
        return sorted(kinds.values(), key=lambda kind: not kind.is_last)

    def plan_kinds(
        self, parts: Sequence[Any], spans: Sequence[Span], saved: Mapping[str, SavedPlan], *, is_trial: bool = False
    ) -> None:
        """Plan the shards that ranks with these spans run, or take the plans that were saved.

        A refusal says which smaller batch would fit, which takes as long again: not in a trial.
        """
        refusals: list[InfeasibleBudget] = []
        for kind in self.kinds_of(parts, spans):
            prepare = super().prepare if kind.is_last else self.before.prepare
            args, kwargs = parts[kind.shard]
            try:
                offering = offering_smaller_batch(self.request, args, kwargs, len(parts))
                with nullcontext() if is_trial else offering:
                    prepare(args, kwargs, saved.get(kind.name))
            except InfeasibleBudget as refusal:
                refusals.append(refusal)
        if refusals:
            raise max(refusals, key=lambda refusal: refusal.minimum_bytes)

    def plan_of(self, parts: Sequence[Any], kind: Kind) -> Plan:
        """The plan of a kind of shard that was prepared."""
        runner = self.runner if kind.is_last else self.before.runner
        with torch.enable_grad():
            return runner.variant_for(*parts[kind.shard]).step().plan

    @property
    def is_prepared(self) -> bool:
        """Whether calls of some kind were planned, with the parameters that are divided now."""
        return bool(self._prepared)

    def plans_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Plan], Plan]:
        """The plans of this rank's earlier shards, and that of its last."""
        parts = self._divide(args, kwargs)
        kinds = [Kind(shard == self.shards.held.end - 1, count_examples(*parts[shard]), shard) for shard in self._held]
        *earlier, last = (self.plan_of(parts, kind) for kind in kinds)
        return earlier, last

    def record_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, StepOfRanks | None]:
        """Make a step as a call does, and record what each rank does when; all ranks call this.

        The record is None where there is one rank.
        """
        return record_step(self, args, kwargs)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What tells apart calls that are planned apart; the same on all ranks."""
        return structure_key(args), structure_key(kwargs), self.runner.state_key()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._handling_divided():
            if self.link is not None and self._key(args, kwargs) not in self._prepared:
                self.prepare(args, kwargs)
            if self.link is not None:
                self._settle_others(self.link)
            self.divide_parameters()
            loss = self._run(args, kwargs)
        if self.training.own is not None and self.training.own.has_new_parameters:
            self.training.own.divided.note_update()
        return loss

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The shards of this rank, one after the other."""
        parts = self._divide(args, kwargs)
        *earlier, last = self._held
        doing = f"call {self.shards.num_calls + 1} of the step"
        try:
            with self._reporting(doing), self._own_generators(parts[last]) as generators:
                for shard in earlier:
                    self._begin(shard, generators)
                    self.before(*parts[shard][0], **parts[shard][1])
                self._begin(last, generators)
                loss = super().__call__(*parts[last][0], **parts[last][1])
        finally:
            self.shards.forget()
        self.shards.num_calls += 1
        return loss

    def wait_for_parameters(self) -> None:
        """Wait for parameters that are on their way; those that are divided stay so."""
        if self.training.own is not None:
            self.training.own.wait()

    def divide_parameters(self) -> None:
        if self.training.own is not None:
            with self._handling_divided(), self._reporting("dividing parameters"):
                self.training.own.divided.divide(self.training.own.parameters, self.training.own.ranks)

    def _handling_divided(self) -> AbstractContextManager[None]:
        """Inside, the step itself may handle parameters that have no memory."""
        return nullcontext() if self.training.own is None else self.training.own.divided.opened()

    def _settle_others(self, link: Link) -> None:
        """Wait for what another step of this process left on its way: it may be of the same model."""
        if link.ranks.late is not None and link.ranks.late is not link.own:
            with self._reporting("waiting for the parameters of another step"):
                link.ranks.late.settle()
        link.ranks.late = link.own

    def decide_together(self, answer: bool) -> bool:
        if self.link is None:
            return answer
        ranks = self.link.ranks
        return ranks.send_bytes(bytes([answer]) if ranks.rank == 0 else None) == b"\1"

    def settle(self) -> None:
        with self._reporting("waiting for parameters"):
            super().settle()

    def optimizer_state(self) -> dict[str, Any]:
        own, optimizer = self.training.own, self._given_optimizer()
        if own is None:
            return super().optimizer_state()
        with self._reporting("gathering the optimizer's state"):
            return join_pieces(optimizer, own.parameters, gather_pieces(own, own_pieces(optimizer, own)))

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        super().load_optimizer_state(state)
        if self.training.own is not None:
            cut_whole_state(self._given_optimizer(), self.training.own)

    def walk(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Node, list[Any]]]:
        """Run the shards of a step one operation at a time, giving each with its outputs; nothing is updated."""
        parts = self._divide(args, kwargs)
        with self._handling_divided(), self._own_generators(parts[0]) as generators:
            self.divide_parameters()
            for shard in self._held:
                self._begin(shard, generators)
                yield from self.before.walk(*parts[shard][0], **parts[shard][1])
        self.shards.forget()

    def release(self) -> None:
        self.before.release()
        super().release()

    @property
    def _held(self) -> range:
        return range(self.shards.held.first, self.shards.held.end)

    def _divide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments of each shard; from now on the step is about this batch."""
        parts = divide_batch(args, kwargs, self.shards.tree.num_shards)
        sizes = shard_sizes(count_examples(args, kwargs), len(parts))
        self.shards.shares = tuple(1.0 if self.loss_is_sum else size / sum(sizes) for size in sizes)
        # The last shard is the smallest.
        whole, part = (sum(tensor.nbytes for _, tensor in tensors_in(item)) for item in ((args, kwargs), parts[-1]))
        if whole - part > self.shards.rest_bytes:
            self.shards.rest_bytes = whole - part
            self.runner.forget()
            self.before.runner.forget()
        return parts

    def _reporting(self, doing: str) -> AbstractContextManager[None]:
        return nullcontext() if self.link is None else self.link.ranks.reporting(doing)

    def _begin(self, shard: int, generators: Mapping[int, torch.Generator]) -> None:
        self.shards.begin(shard)
        for place, generator in generators.items():
            generator.manual_seed(shard_seed(self.shards.seed, self.shards.num_calls, shard, place))

    @contextmanager
    def _own_generators(self, part: Any) -> Iterator[Mapping[int, torch.Generator]]:
        """The generators that the model draws from; afterwards they are as they were."""
        generators = find_generators(self.runner, *part)
        states = [generator.get_state() for generator in generators.values()]
        try:
            yield generators
        finally:
            for generator, state in zip(generators.values(), states, strict=True):
                generator.set_state(state)


def find_generators(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, torch.Generator]:
    """The generators that the step draws from, by their places.

    PyTorch's own come first: that of the CPU, whether it is used or not, and those of the GPUs that are used. So a
    shard draws the same on every GPU. Then come the user's.
    """
    with torch.enable_grad():
        used = runner.variant_for(args, kwargs).step().generators
    on_gpus = [generator for generator in torch.cuda.default_generators if generator in used]
    own = [torch.default_generator, *on_gpus]
    others = [generator for generator in used if generator not in own]
    return {place: generator for place, generator in enumerate([*own, *others]) if generator in used}
