"""A training step of a batch in shards: `train_step(..., shards=8)`.

In: a batch. Out: its loss; the parameters are updated. The batch is divided into a fixed number of shards, and each is
computed alone: its own forward and backward pass, its own generator, its own statistics of batch normalisation. The
gradients are added in the order of a tree over the shards' numbers, and there is one update. So the result depends on
the shards, and never on who computes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from undertow.api.shared_plans import describe_rank, share_plans
from undertow.api.training import TrainStep
from undertow.calls.runner import Runner
from undertow.calls.smaller_batch import offering_smaller_batch
from undertow.errors import CallError, InfeasibleBudget
from undertow.ir import Node, Plan
from undertow.ir.saving import SavedPlan
from undertow.ir.structure import replace_tensors, structure_key, tensors_in
from undertow.ops.communication import Link
from undertow.ops.shards import Shards
from undertow.passes.shards import ShardPart
from undertow.ranks.mesh import Mesh
from undertow.ranks.ranks import join
from undertow.ranks.reduction import Division
from undertow.ranks.tree import Span, Tree, divide


def shard_seed(seed: int, step: int, shard: int, generator: int = 0) -> int:
    """The seed of a shard's generator. `generator` tells apart the generators of one model; PyTorch's own is 0."""
    text = f"{seed} {step} {shard} {generator}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def shard_sizes(num_examples: int, num_shards: int) -> list[int]:
    """How many examples each shard has: as equal as can be, the larger ones first."""
    least, num_larger = divmod(num_examples, num_shards)
    return [least + (shard < num_larger) for shard in range(num_shards)]


def divide_batch(args: tuple[Any, ...], kwargs: dict[str, Any], num_shards: int) -> list[Any]:
    """The arguments of each shard, as views of the batch.

    The first dimension of the first tensor is the batch; all tensors of that length are divided, others are shared.
    """
    num_examples = count_examples(args, kwargs)
    if num_examples < num_shards:
        raise CallError(
            f"the batch has {num_examples} examples and is divided into {num_shards} shards, and each needs one; use "
            f"fewer shards, or a larger batch"
        )
    parts: list[Any] = []
    first = 0
    for size in shard_sizes(num_examples, num_shards):

        def cut(tensor: torch.Tensor, first: int = first, end: int = first + size) -> torch.Tensor:
            return tensor[first:end] if tensor.dim() and len(tensor) == num_examples else tensor

        parts.append(replace_tensors((args, kwargs), cut))
        first += size
    return parts


def count_examples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The examples of a batch: the length of its first tensor."""
    for _, tensor in tensors_in((args, kwargs)):
        if tensor.dim():
            return len(tensor)
    raise CallError("a batch in shards needs a tensor whose first dimension is the batch; none was given")


def make_sharded(
    make: Callable[..., TrainStep], num_shards: Any, seed: Any, loss_is_sum: bool, mesh: Mesh | None
) -> ShardedStep:
    """The step of this rank; without a mesh, of the only one. `make` makes the step of a shard."""
    for name, number, least in (("shards", num_shards, 1), ("seed", seed, 0)):
        if type(number) is not int or number < least:
            raise CallError(f"{name} must be a whole number of at least {least}, got {number!r}")
    tree, held, link = Tree(num_shards), Span(0, num_shards), None
    if mesh is not None and mesh.num_ranks > 1:
        if num_shards < mesh.data:
            raise CallError(
                f"{num_shards} shards cannot be divided over {mesh.data} ranks: each rank needs one; give more shards, "
                f"or fewer ranks"
            )
        ranks = join(mesh)
        division = Division(tree, divide(num_shards, [1.0] * mesh.data))
        held, link = division.spans[ranks.rank], Link(ranks, division)
    shards = Shards(tree, held, seed)
    before, last = (make(shards=ShardPart(shards, is_last, link)) for is_last in (False, True))
    return ShardedStep(before, last, shards, loss_is_sum)


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
        parts = self._divide(args, kwargs)
        if self.link is None:
            last = self.kinds_of(parts, [self.shards.held])[-1]
            self.plan_kinds(parts, [self.shards.held], {} if saved is None else {last.name: saved})
        else:
            with self.link.ranks.reporting("planning"):
                if not self._prepared:
                    self.link.ranks.agree(describe_rank(self, args, kwargs))
                share_plans(self, parts)
        self._prepared.add(self._key(args, kwargs))

    def kinds_of(self, parts: Sequence[Any], spans: Sequence[Span]) -> list[Kind]:
        """The kinds of shards that ranks with these spans run, each once."""
        kinds: dict[str, Kind] = {}
        for span in spans:
            for shard in span.shards():
                kind = Kind(shard == span.end - 1, count_examples(*parts[shard]), shard)
                kinds.setdefault(kind.name, kind)
        return sorted(kinds.values(), key=lambda kind: kind.is_last)

    def plan_kinds(self, parts: Sequence[Any], spans: Sequence[Span], saved: Mapping[str, SavedPlan]) -> None:
        """Plan the shards that ranks with these spans run, or take the plans that were saved."""
        refusals: list[InfeasibleBudget] = []
        for kind in self.kinds_of(parts, spans):
            prepare = super().prepare if kind.is_last else self.before.prepare
            args, kwargs = parts[kind.shard]
            try:
                with offering_smaller_batch(self.request, args, kwargs, len(parts)):
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

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What tells apart calls that are planned apart; the same on all ranks."""
        return structure_key(args), structure_key(kwargs), self.runner.state_key()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.link is not None and self._key(args, kwargs) not in self._prepared:
            self.prepare(args, kwargs)
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

    def walk(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Node, list[Any]]]:
        """Run the shards of a step one operation at a time, giving each with its outputs; nothing is updated."""
        parts = self._divide(args, kwargs)
        with self._own_generators(parts[0]) as generators:
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
    """The generators that the step draws from, by their place among all.

    PyTorch's own come first, of the CPU and of each GPU; then the user's.
    """
    own = [torch.default_generator, *torch.cuda.default_generators]
    with torch.enable_grad():
        used = runner.variant_for(args, kwargs).step().generators
    others = [generator for generator in used if generator not in own]
    return {place: generator for place, generator in enumerate([*own, *others]) if generator in used}
