"""Communication between ranks as operations: gradients of a bucket are reduced, records of shards are gathered.

Each has a start and a finish, and computing goes on between them. They run once, in one order on all ranks: they are
one chain. What a start was given is in use until its finish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from undertow.ir.live import Live
from undertow.ir.operation import Destination, Operation, register_operation
from undertow.ops.clipping import in_memory_order
from undertow.ops.own_parts import OwnParts
from undertow.ops.shards import RECORDS_CHAIN, Shards
from undertow.ranks.lane import Steps, Transfer
from undertow.ranks.messages import Messages
from undertow.ranks.ranks import Ranks
from undertow.ranks.reduction import Division, gather, reduce

LINK = Live("link")  # a Link
LINK_LANE = "link"
_ON_CPU = "gradients are sent by the CPU"  # why a step is no CUDA graph


@dataclass(eq=False)
class Link:
    """What the communication of a step is bound to.

    `buckets` are the parameters whose gradients are reduced together, by name, in the order in which they are sent.
    Rank 0 finds them, since the order in which gradients are completed may depend on the size of a shard. `factored`
    are the parameters whose gradients are sent as factors; only ranks with the same kind of processor, `is_uniform`, do
    that. `own` says which elements each rank updates, where the optimizer's state is divided.
    """

    ranks: Ranks
    division: Division
    own: OwnParts | None = None
    buckets: tuple[tuple[str, ...], ...] | None = None
    has_smallest_buckets: bool = False  # where larger ones do not fit a budget
    factored: frozenset[str] = frozenset()
    is_uniform: bool = False


def _pack(*tensors: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.cat([in_memory_order(tensor) for tensor in tensors], out=out)


# (*gradients) -> their elements one after the other, each as it lies in memory. Never made again: what is on its way
# is this very tensor.
PACK = register_operation(
    Operation("pack", _pack, is_fresh=True, can_repeat=False, find_destination=lambda: Destination(_pack, ("out",)))
)


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    return in_memory_order(tensor)


# (gradient) -> the same memory, as one row.
FLATTEN = register_operation(Operation("flatten_in_memory", _flatten, shares=0, is_view=True, costs_nothing=True))


def _start_reduction(link: Link, bucket: int, cuts: Sequence[int], sent_bytes: int, *flats: torch.Tensor) -> Transfer:
    ranks = link.ranks
    return ranks.start(
        f"the sum of bucket {bucket}",
        lambda messages, at: reduce(messages, link.division, cuts, bucket, list(map(at, flats))),
        flats[0].device,
        flats,
        flats[:1],
    )


def _finish(flat: torch.Tensor, transfer: Transfer, link: Link) -> torch.Tensor:
    link.ranks.finish(transfer)
    return flat.clone()


def _finish_in_place(flat: torch.Tensor, transfer: Transfer, link: Link) -> torch.Tensor:
    link.ranks.finish(transfer)
    return flat


# What holds for all communication.
LINK_FACTS: dict[str, Any] = {
    "must_run": True,
    "chains": lambda node: (LINK_LANE,),
    "can_repeat": False,
    "is_measurable": False,
    "assumed_workspace": lambda node: 0,
    "releases_arguments": False,
    "needs_all_ranks": True,
    "why_not_captured": lambda node: _ON_CPU,
}

# (link, bucket, cuts, bytes that are sent, a flat tensor for each block of this rank) -> the transfer.
START_REDUCTION = register_operation(
    Operation(
        "start_reduction",
        _start_reduction,
        borrows=True,
        lane=LINK_LANE,
        sent_bytes=lambda node: node.args[3],
        **LINK_FACTS,
    )
)

# (the first flat tensor, transfer, link) -> the sum over all shards, in the memory where it came to lie.
FINISH_REDUCTION_IN_PLACE = register_operation(
    Operation(
        "finish_reduction_",
        _finish_in_place,
        shares=0,
        writes=lambda node: (node.args[0],),
        costs_nothing=True,
        **LINK_FACTS,
    )
)

# The same in new memory; it is replaced by the one above, since nobody else reads the flat tensor.
FINISH_REDUCTION = register_operation(
    Operation(
        "finish_reduction",
        _finish,
        is_fresh=True,
        in_place=FINISH_REDUCTION_IN_PLACE,
        costs_nothing=True,  # in memory of its own it would copy, but nobody else reads the flat tensor
        **LINK_FACTS,
    )
)


def _start_records(link: Link, shards: Shards, sent_bytes: int) -> tuple[Transfer, list[torch.Tensor]]:
    ranks, spans = link.ranks, link.division.spans
    device = shards.records[shards.held.first][0].device
    items = [item for shard in shards.held.shards() for item in shards.records[shard]]
    own = torch.cat([item.contiguous().view(-1).view(torch.uint8).to(device) for item in items])
    record_bytes = len(own) // len(shards.held)
    received = [own.new_empty(len(span) * record_bytes) for span in spans]

    def exchange(messages: Messages, at: Callable[[torch.Tensor], torch.Tensor]) -> Steps:
        return gather(messages, RECORDS_TAG, at(own), list(map(at, received)))

    return ranks.start("records of shards", exchange, device, [own], received), received


def _finish_records(started: tuple[Transfer, list[torch.Tensor]], link: Link, shards: Shards) -> None:
    transfer, received = started
    link.ranks.finish(transfer)
    example = shards.records[shards.held.first]
    for span, content in zip(link.division.spans, received, strict=True):
        if span != shards.held:
            first = 0
            for shard in span.shards():
                record = []
                for item in example:
                    part = content[first : first + item.nbytes].clone().view(item.dtype).view(item.shape)
                    record.append(part.to(item.device))
                    first += item.nbytes
                shards.records[shard] = tuple(record)


RECORDS_TAG = (1 << 20) - 1  # buckets have smaller tags

_OF_RECORDS = LINK_FACTS | {"chains": lambda node: (RECORDS_CHAIN, LINK_LANE)}

# (link, shards, bytes that are sent) -> the transfer. It starts when this rank's records are there.
START_RECORDS = register_operation(
    Operation("start_records", _start_records, lane=LINK_LANE, sent_bytes=lambda node: node.args[2], **_OF_RECORDS)
)

# (transfer, link, shards): the records of all shards are there.
FINISH_RECORDS = register_operation(Operation("finish_records", _finish_records, costs_nothing=True, **_OF_RECORDS))
