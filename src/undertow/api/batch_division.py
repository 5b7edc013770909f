"""A batch in parts: which examples each shard has, and the arguments for them.

In: the arguments of a call. Out: those of each shard, as views of the batch.
"""

from __future__ import annotations

from typing import Any

import torch

from undertow.errors import CallError
from undertow.ir.structure import replace_tensors, tensors_in


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
        parts.append(take_examples(args, kwargs, first, first + size))
        first += size
    return parts


def take_examples(args: tuple[Any, ...], kwargs: dict[str, Any], first: int, end: int) -> Any:
    """The arguments for some examples of a batch, as views."""
    num_examples = count_examples(args, kwargs)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[first:end] if tensor.dim() and len(tensor) == num_examples else tensor

    return replace_tensors((args, kwargs), cut)


def count_examples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The examples of a batch: the length of its first tensor."""
    for _, tensor in tensors_in((args, kwargs)):
        if tensor.dim():
            return len(tensor)
    raise CallError("a batch in shards needs a tensor whose first dimension is the batch; none was given")
