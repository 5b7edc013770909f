"""Communication between ranks as operations: gradients of a bucket are reduced, records of shards are gathered.

Each has a start and a finish, and computing goes on between them. They run once, in one order on all ranks: they are
one chain. What a start was given is in use until its finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from undertow.hashing import as_bytes
from undertow.ir.live import Live
from undertow.ir.operation import Destination, Operation, register_operation
from undertow.ops.clipping import in_memory_order
from undertow.ops.shards import RECORDS_CHAIN, Shards
from undertow.ranks.lane import Transfer
from undertow.ranks.ranks import Ranks
from undertow.ranks.reduction import Division, gather, reduce

LINK = Live("link")  # a Link
LINK_LANE = "link"
_ON_CPU = "gradients are sent by the CPU"  # why a step is no CUDA graph


@dataclass(eq=False)
class Link:
    """What the communication of a step is bound to.

    `buckets` are the parameters whose gradients are reduced together, by name, in the order in which they are sent.
    Rank 0 finds them, since the order in which gradients are completed may depend on the size of a shard.
    """

    ranks: Ranks
    division: Division
    buckets: tuple[tuple[str, ...], ...] | None = None


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


def _start_reduction(link: Link, bucket: int, cuts: Sequence[int], *flats: torch.Tensor) -> Transfer:
    ranks = link.ranks
    return ranks.lane.start(f"the sum of bucket {bucket}", reduce(ranks.messages, link.division, cuts, bucket, flats))


def _finish(flat: torch.Tensor, transfer: Transfer, link: Link) -> torch.Tensor:
    link.ranks.finish(transfer)
    return flat.clone()


def _finish_in_place(flat: torch.Tensor, transfer: Transfer, link: Link) -> torch.Tensor:
    link.ranks.finish(transfer)
    return flat


_FACTS: dict[str, Any] = {
    "must_run": True,
    "chains": lambda node: (LINK_LANE,),
    "can_repeat": False,
    "is_measurable": False,
    "assumed_workspace": lambda node: 0,
    "releases_arguments": False,
    "needs_all_ranks": True,
    "why_not_captured": lambda node: _ON_CPU,
}

# (link, bucket, cuts, a flat tensor for each block of this rank) -> the transfer.
START_REDUCTION = register_operation(
    Operation("start_reduction", _start_reduction, borrows=True, lane=LINK_LANE, **_FACTS)
)

# (the first flat tensor, transfer, link) -> the sum over all shards, in the memory where it came to lie.
FINISH_REDUCTION_IN_PLACE = register_operation(
    Operation("finish_reduction_", _finish_in_place, shares=0, writes=lambda node: (node.args[0],), **_FACTS)
)

# The same in new memory; it is replaced by the one above, since nobody else reads the flat tensor.
FINISH_REDUCTION = register_operation(
    Operation("finish_reduction", _finish, is_fresh=True, in_place=FINISH_REDUCTION_IN_PLACE, **_FACTS)
)


def _start_records(link: Link, shards: Shards) -> tuple[Transfer, list[torch.Tensor]]:
    ranks, spans = link.ranks, link.division.spans
    own = torch.cat([as_bytes(item) for shard in shards.held.shards() for item in shards.records[shard]])
    record_bytes = len(own) // len(shards.held)
    received = [torch.empty(len(span) * record_bytes, dtype=torch.uint8) for span in spans]
    return ranks.lane.start("records of shards", gather(ranks.messages, RECORDS_TAG, own, received)), received


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

# (link, shards) -> the transfer. It starts when this rank's records are there.
START_RECORDS = register_operation(
    Operation("start_records", _start_records, lane=LINK_LANE, **(_FACTS | {"chains": lambda node: (RECORDS_CHAIN,)}))
)

# (transfer, link, shards): the records of all shards are there.
FINISH_RECORDS = register_operation(
    Operation("finish_records", _finish_records, **(_FACTS | {"chains": lambda node: (RECORDS_CHAIN,)}))
)
