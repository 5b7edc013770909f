"""A training step of a batch in shards: `train_step(..., shards=8)`.

In: a batch. Out: its loss; the parameters are updated. The batch is divided into a fixed number of shards, and each is
computed alone: its own forward and backward pass, its own generator, its own statistics of batch normalisation. The
gradients are added in the order of a tree over the shards' numbers, and there is one update. So the result depends on
the shards, and never on who computes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from undertow.api.training import TrainStep
from undertow.calls.runner import Runner
from undertow.errors import CallError
from undertow.ir.structure import replace_tensors, tensors_in
from undertow.ops.shards import Shards
from undertow.passes.shards import ShardPart
from undertow.ranks.tree import Span, Tree


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
    make: Callable[..., TrainStep], num_shards: Any, seed: Any, loss_is_sum: bool, held: Span | None = None
) -> ShardedStep:
    """The step of a rank that holds the shards `held`; of all shards without it. `make` makes the step of a shard."""
    for name, number, least in (("shards", num_shards, 1), ("seed", seed, 0)):
        if type(number) is not int or number < least:
            raise CallError(f"{name} must be a whole number of at least {least}, got {number!r}")
    shards = Shards(Tree(num_shards), held or Span(0, num_shards))
    before, last = (make(shards=ShardPart(shards, is_last)) for is_last in (False, True))
    return ShardedStep(before, last, shards, seed, loss_is_sum)


class ShardedStep(TrainStep):
    """A training step of a batch in shards. It is the step of the last shard, which also updates."""

    def __init__(self, before: TrainStep, last: TrainStep, shards: Shards, seed: int, loss_is_sum: bool) -> None:
        super().__init__(last.request)
        self.before, self.shards = before, shards
        self.seed, self.loss_is_sum = seed, loss_is_sum
        self.num_steps = 0  # so far: the generators of a shard follow from it

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: Any = None) -> None:
        parts = divide_batch(args, kwargs, self.shards.tree.num_shards)
        held = range(self.shards.held.first, self.shards.held.end)
        for shard in held[:-1]:
            self.before.prepare(*parts[shard])
        part_args, part_kwargs = parts[held[-1]]
        super().prepare(part_args, part_kwargs, saved)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        num_shards = self.shards.tree.num_shards
        parts = divide_batch(args, kwargs, num_shards)
        sizes = shard_sizes(count_examples(args, kwargs), num_shards)
        self.shards.shares = tuple(1.0 if self.loss_is_sum else size / sum(sizes) for size in sizes)
        held = range(self.shards.held.first, self.shards.held.end)
        try:
            with self._own_generators(parts[held[0]]) as generators:
                for shard in held:
                    self.shards.begin(shard)
                    for place, generator in enumerate(generators):
                        generator.manual_seed(shard_seed(self.seed, self.num_steps, shard, place))
                    part_args, part_kwargs = parts[shard]
                    if shard != held[-1]:
                        self.before(*part_args, **part_kwargs)
                    else:
                        loss = super().__call__(*part_args, **part_kwargs)
        finally:
            self.shards.forget()
        self.num_steps += 1
        return loss

    @contextmanager
    def _own_generators(self, part: Any) -> Iterator[Sequence[torch.Generator]]:
        """The generators that the model draws from; afterwards they are as they were."""
        generators = find_generators(self.runner, *part)
        states = [generator.get_state() for generator in generators]
        try:
            yield generators
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def release(self) -> None:
        self.before.release()
        super().release()

    def release_arena(self) -> None:
        self.before.release_arena()
        super().release_arena()


def find_generators(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    """PyTorch's generators of the devices, then those of the user's that the model draws from."""
    given = [tensor.device for _, tensor in tensors_in((args, kwargs))]
    indices = sorted({device.index for device in given if device.type == "cuda"})
    own = [torch.default_generator, *(torch.cuda.default_generators[index] for index in indices)]
    with torch.enable_grad():
        used = runner.variant_for(args, kwargs).step().generators
    return [*own, *(generator for generator in used if generator not in own)]
