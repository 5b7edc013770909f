"""The gradient of a linear layer's weight as its two factors: the ranks send these, and each multiplies them again.

In: on each rank the gradient of its only shard, and the factors whose product it is: the cotangent of the layer's
output, and its input. Out: the sum over all shards. For few examples the factors are much smaller than the gradient
(Chilimbi et al. 2014, Project Adam: fc6 of VGG-16 at 32 images is 3.7 MB, not 411).

The bits stay those of sending gradients. A received factor lies in memory as it did where it was made, the same kernel
multiplies it in one call for each shard, and products are added in the order of the tree. So this needs ranks with the
same kind of processor and as many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from undertow.ir import Node, Origin, TensorType, Value
from undertow.ir.cost import Cost
from undertow.ir.operation import Operation, Parts, register_operation
from undertow.ir.pytorch import operation_of
from undertow.ops.clipping import in_memory_order
from undertow.ops.communication import LINK_FACTS, LINK_LANE, Link
from undertow.ranks.lane import Steps, Transfer
from undertow.ranks.messages import Messages, Pending

aten = torch.ops.aten

Factors = tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class Arriving:
    """The factors of all ranks, when the transfer has ended."""

    transfer: Transfer
    factors: list[Factors]


def _start_factors(link: Link, bucket: int, sent_bytes: int, left: torch.Tensor, right: torch.Tensor) -> Arriving:
    ranks, own = link.ranks, (left, right)
    factors = [own if rank == ranks.rank else (_like(left), _like(right)) for rank in range(ranks.size)]
    flats = [[in_memory_order(item) for item in pair] for pair in factors]
    arriving = [item for rank, pair in enumerate(flats) for item in pair if rank != ranks.rank]

    def exchange(messages: Messages, at: Callable[[torch.Tensor], torch.Tensor]) -> Steps:
        pending: list[Pending] = []
        for other in messages.others:
            for part, item in enumerate(flats[other]):
                pending += messages.receive(at(item), other, bucket, part)
        for other in messages.others:
            for part, item in enumerate(flats[ranks.rank]):
                pending += messages.send(at(item), other, bucket, part)
        yield pending

    about = f"the factors of bucket {bucket}"
    return Arriving(ranks.start(about, exchange, left.device, flats[ranks.rank], arriving), factors)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


# (link, bucket, bytes that are sent, left factor, right factor) -> the transfer.
START_FACTORS = register_operation(
    Operation(
        "start_factors",
        _start_factors,
        borrows=True,
        lane=LINK_LANE,
        sent_bytes=lambda node: node.args[2],
        **LINK_FACTS,
    )
)


def _finish_in_place(gradient: torch.Tensor, arriving: Arriving, link: Link, *types: Any) -> torch.Tensor:
    link.ranks.finish(arriving.transfer)
    own = in_memory_order(gradient)
    add_products(arriving.factors, link.ranks.rank, own, link.division.additions)
    arriving.factors.clear()
    return gradient


def add_products(
    factors: Sequence[Factors], rank: int, own: torch.Tensor, additions: Sequence[tuple[int, int]]
) -> None:
    """The sum of all products comes to lie in `own`, the product of this rank; others are made when they are added."""
    values: dict[int, torch.Tensor] = {rank: own}

    def value_of(place: int) -> torch.Tensor:
        if place not in values:
            values[place] = in_memory_order(torch.mm(*factors[place]))
        return values[place]

    *earlier, (left, right) = additions
    for one, two in earlier:
        value_of(one).add_(value_of(two))
        del values[two]
    torch.add(value_of(left), value_of(right), out=own)


def _finish(gradient: torch.Tensor, arriving: Arriving, link: Link, *types: Any) -> torch.Tensor:
    return _finish_in_place(gradient.clone(memory_format=torch.preserve_format), arriving, link, *types)


def _parts(node: Node, live: Mapping[str, Any]) -> Parts:
    """A product for each other rank, and an addition."""
    gradient, _, _, left, right = node.args
    kind = gradient.tensor_type

    def value(name: str, sizes: Any) -> Value:
        return Value(name, TensorType(kind.dtype, tuple(sizes[0]), tuple(sizes[1]), kind.device))

    row = TensorType(kind.dtype, (kind.num_elements,), (1,), kind.device)
    product = Value("product", row)
    nodes = [
        Node(operation_of(aten.mm.default), (value("left", left), value("right", right)), {}, (gradient,), Origin()),
        Node(operation_of(aten.add_.Tensor), (product, Value("other", row)), {}, (product,), Origin()),
    ]
    num_others = live["link"].ranks.size - 1

    def combine(costs: Sequence[Cost]) -> Cost:
        workspace = _workspace(node, num_others) + max(cost.workspace_bytes for cost in costs)
        return Cost(num_others * sum(cost.duration_ns for cost in costs), workspace)

    return Parts(nodes, combine)


def _workspace(node: Node, num_others: int) -> int:
    """Products that are there at once, while sums are added in the order of the tree."""
    return min(num_others, num_others.bit_length() + 1) * node.args[0].tensor_type.num_bytes


_FINISHING: dict[str, Any] = LINK_FACTS | {"parts": _parts, "assumed_workspace": None}

# (gradient of this rank's shard, transfer, link, sizes and strides of the left factor, of the right one) -> the sum
# over all shards, in the memory of the gradient.
FINISH_FACTORS_IN_PLACE = register_operation(
    Operation("finish_factors_", _finish_in_place, shares=0, writes=lambda node: (node.args[0],), **_FINISHING)
)

# The same in new memory, where something else reads the gradient.
FINISH_FACTORS = register_operation(
    Operation("finish_factors", _finish, is_fresh=True, in_place=FINISH_FACTORS_IN_PLACE, **_FINISHING)
)
