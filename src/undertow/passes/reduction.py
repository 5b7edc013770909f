"""The sums of gradients over the ranks, in buckets, while the backward pass still runs.

In: the Program of a rank's last shard, with the sum of each gradient over each block of the rank's shards. Out: the
Program whose gradients are sums over all shards of all ranks. A bucket holds gradients that are completed one after the
other. It is packed and sent when the last of them is there, and waited for when the next buckets are on their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from undertow.errors import CaptureError
from undertow.ir import Gradient, Node, OpaqueType, Origin, Phase, Program, TensorType, Value
from undertow.ir.pytorch import operation_of
from undertow.ops.clipping import BLOCK
from undertow.ops.communication import (
    FINISH_RECORDS,
    FINISH_REDUCTION,
    FLATTEN,
    LINK,
    PACK,
    START_RECORDS,
    START_REDUCTION,
    Link,
)
from undertow.ops.shards import KEEP_RECORD, SHARDS
from undertow.ranks.reduction import Division, cut_bucket

BUCKET_BYTES = 8 << 20
MOST_ON_THEIR_WAY = 2  # buckets; then the oldest is waited for

aten = torch.ops.aten


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together, with the position of the node after which all are there."""

    number: int
    gradients: tuple[Gradient, ...]
    ready: int


def reduce_gradients(program: Program, blocks: Mapping[Value, tuple[Value, ...]], link: Link) -> Program:
    """The Program that sums its gradients over the ranks. `blocks` are the sums of each input's gradient so far."""
    completed = _find_completed(program, blocks)
    if link.buckets is None:
        link.buckets = _choose_buckets(completed)
    inserted: dict[int, list[Node]] = {}
    reduced: dict[Value, Value] = {}
    started: list[tuple[Bucket, Value, Value]] = []
    for bucket in _find_buckets(completed, link.buckets):
        nodes, transfer, flat = _start(bucket, blocks, link.division, link.ranks.rank)
        here = inserted.setdefault(bucket.ready, [])
        here += nodes
        started.append((bucket, transfer, flat))
        if len(started) > MOST_ON_THEIR_WAY:
            here += _finish(*started.pop(0), reduced)
    end = inserted.setdefault(len(program.nodes) - 1, [])
    for item in started:
        end += _finish(*item, reduced)
    pieces = [[node, *inserted.get(position, ())] for position, node in enumerate(program.nodes)]
    gradients = tuple(replace(item, value=reduced.get(item.input, item.value)) for item in program.gradients)
    return replace(program.with_pieces(pieces), gradients=gradients)


def _find_completed(program: Program, blocks: Mapping[Value, tuple[Value, ...]]) -> dict[Gradient, int]:
    """The gradients, in the order in which they are completed, with the node after which they are."""
    found = {
        item: max(program.positions[program.makers[value]] for value in blocks[item.input])
        for item in program.gradients
        if item.value is not None
    }
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _choose_buckets(completed: Mapping[Gradient, int]) -> tuple[tuple[str, ...], ...]:
    """Gradients that are completed one after the other, as many as fill a bucket."""
    buckets: list[tuple[str, ...]] = []
    waiting: list[Gradient] = []
    for item in completed:
        kind = _type_of(item)
        if waiting and (_type_of(waiting[0]).dtype, _type_of(waiting[0]).device) != (kind.dtype, kind.device):
            buckets.append(tuple(other.input.name for other in waiting))
            waiting = []
        waiting.append(item)
        if sum(_type_of(other).num_bytes for other in waiting) >= BUCKET_BYTES:
            buckets.append(tuple(other.input.name for other in waiting))
            waiting = []
    return (*buckets, tuple(other.input.name for other in waiting)) if waiting else tuple(buckets)


def _find_buckets(completed: Mapping[Gradient, int], names: Sequence[Sequence[str]]) -> list[Bucket]:
    """The buckets with these names; raises CaptureError where other parameters have gradients here."""
    by_name = {item.input.name: item for item in completed}
    wanted = {name for bucket in names for name in bucket}
    for name in sorted(wanted ^ by_name.keys()):
        raise CaptureError(
            f"parameter {name} has a gradient from some shards and none from others, because the model branches on "
            f"values; ranks cannot add that up: train in one process, or let every shard use the parameter"
        )
    buckets, ready = [], 0
    for number, bucket in enumerate(names):
        gradients = tuple(by_name[name] for name in bucket)
        ready = max(ready, *(completed[item] for item in gradients))  # sent in one order on all ranks
        buckets.append(Bucket(number, gradients, ready))
    return buckets


def _type_of(item: Gradient) -> TensorType:
    assert item.value is not None
    return item.value.tensor_type


def _start(
    bucket: Bucket, blocks: Mapping[Value, tuple[Value, ...]], division: Division, rank: int
) -> tuple[list[Node], Value, Value]:
    """The nodes that pack a bucket and start its reduction; the transfer, and the tensor that the sum will be in."""
    origin = Origin(", ".join(item.input.name for item in bucket.gradients[:3]))
    kinds = [_type_of(item) for item in bucket.gradients]
    sizes = [kind.num_elements for kind in kinds]
    row = TensorType(kinds[0].dtype, (sum(sizes),), (1,), kinds[0].device)
    cuts = cut_bucket(sizes, len(division.spans), BLOCK)
    nodes, flats = [], []
    for place in range(len(division.blocks[rank])):
        parts = tuple(blocks[item.input][place] for item in bucket.gradients)
        flat = Value(f"bucket_{bucket.number}_{place}", row)
        operation = FLATTEN if len(parts) == 1 else PACK
        nodes.append(Node(operation, parts, {}, (flat,), origin, Phase.BACKWARD))
        flats.append(flat)
    received_bytes = division.received_bytes(cuts, row.dtype.itemsize)
    transfer = Value(f"transfer_{bucket.number}", OpaqueType("transfer", received_bytes))
    args = (LINK, bucket.number, cuts, *flats)
    nodes.append(Node(START_REDUCTION, args, {}, (transfer,), origin, Phase.BACKWARD))
    return nodes, transfer, flats[0]


def _finish(bucket: Bucket, transfer: Value, flat: Value, reduced: dict[Value, Value]) -> list[Node]:
    """The nodes that wait for a bucket, and take it apart."""
    origin = Origin(", ".join(item.input.name for item in bucket.gradients[:3]))
    total = Value(f"reduced_{bucket.number}", flat.type)
    nodes = [Node(FINISH_REDUCTION, (flat, transfer, LINK), {}, (total,), origin, Phase.BACKWARD)]
    first = 0
    for item in bucket.gradients:
        kind = _type_of(item)
        value = Value(f"{item.input.name}_reduced", kind)
        args = (total, list(kind.shape), list(kind.strides), first)
        nodes.append(
            Node(operation_of(aten.as_strided.default), args, {}, (value,), Origin(item.input.name), Phase.BACKWARD)
        )
        reduced[item.input] = value
        first += kind.num_elements
    return nodes


def gather_records(program: Program) -> Program:
    """The Program that sends its records when they are there, and ends by waiting for those of all ranks."""
    transfer = Value("transfer_of_records", OpaqueType("transfer"))
    start = Node(START_RECORDS, (LINK, SHARDS), {}, (transfer,), Origin(), Phase.FORWARD)
    finish = Node(FINISH_RECORDS, (transfer, LINK, SHARDS), {}, (), Origin(), Phase.BACKWARD)
    program = program.map_nodes(lambda node: (node, start) if node.operation is KEEP_RECORD else (node,))
    nodes = (*program.nodes, finish)
    is_whole = program.boundary == len(program.nodes)
    return replace(program, nodes=nodes, boundary=len(nodes) if is_whole else program.boundary)
