"""The sums of gradients over the ranks, in buckets, while the backward pass still runs.

In: the Program of a rank's last shard, with the sum of each gradient over each block of the rank's shards. Out: the
Program whose gradients are sums over all shards of all ranks. A bucket holds gradients that are completed one after the
other (`bucket_sizes.py`). It is packed and sent when the last of them is there, and waited for when the next buckets
are on their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import torch

from undertow.costs.links import find_link_speed
from undertow.costs.table import find_costs
from undertow.errors import CaptureError
from undertow.ir import Gradient, Node, OpaqueType, Operation, Origin, Phase, Program, TensorType, Value
from undertow.ir.live import Live
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
from undertow.ops.interpret import NO_LIVE
from undertow.ops.shards import KEEP_RECORD, SHARDS
from undertow.passes.bucket_sizes import Ready, choose_sizes, smallest_sizes
from undertow.passes.factors import choose_products, find_products, send_factors
from undertow.ranks.link_speed import MOST_ON_THEIR_WAY
from undertow.ranks.reduction import cut_bucket
from undertow.terms import Terms

MOST_LATE = 64  # buckets, about, whose parameters are on their way at once

aten = torch.ops.aten


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together, with the position of the node after which all are there."""

    number: int
    gradients: tuple[Gradient, ...]
    ready: int

    @property
    def names(self) -> list[str]:
        """Of its parameters."""
        return [item.input.name for item in self.gradients]

    @property
    def sizes(self) -> list[int]:
        """The elements of its parameters."""
        return [_type_of(item).num_elements for item in self.gradients]

    @property
    def origin(self) -> Origin:
        """What its operations are for."""
        return Origin(", ".join(self.names[:3]))

    def cuts(self, link: Link) -> tuple[int, ...]:
        """Where the parts of the ranks begin and end."""
        return cut_bucket(self.sizes, len(link.division.spans), BLOCK)


def reduce_gradients(program: Program, blocks: Mapping[Value, tuple[Value, ...]], link: Link, is_even: bool) -> Program:
    """The Program that sums its gradients over the ranks. `blocks` are the sums of each input's gradient so far.

    `is_even`: all shards have as many examples.
    """
    inserted: dict[int, list[Node]] = {}
    reduced: dict[Value, Value] = {}
    started: list[list[Node]] = []  # what finishes each
    products = find_products(program, blocks, link) if is_even else {}
    for bucket in find_buckets(program, blocks, link):
        first = bucket.gradients[0]
        if first.input.name in link.factored and first.input in products:
            product, (total,) = products[first.input], blocks[first.input]
            nodes, finish, reduced[first.input] = send_factors(bucket.number, first, total, product, link)
        else:
            nodes, transfer, flat = start_bucket(START_REDUCTION, bucket, blocks, link)
            finish = _finish(bucket, transfer, flat, reduced)
        here = inserted.setdefault(bucket.ready, [])
        here += nodes
        started.append(finish)
        if len(started) > MOST_ON_THEIR_WAY:
            here += started.pop(0)
    end = inserted.setdefault(len(program.nodes) - 1, [])
    for finish in started:
        end += finish
    pieces = [[node, *inserted.get(position, ())] for position, node in enumerate(program.nodes)]
    gradients = tuple(replace(item, value=reduced.get(item.input, item.value)) for item in program.gradients)
    return replace(program.with_pieces(pieces), gradients=gradients)


def plan_buckets(
    program: Program, blocks: Mapping[Value, tuple[Value, ...]], link: Link, terms: Terms, is_even: bool
) -> None:
    """Choose the buckets, if nobody has: who comes first does, and the others are told. So are the gradients that are
    sent as factors, each of which is a bucket.
    """
    if link.buckets is not None:
        return
    completed = _find_completed(program, blocks)
    # What is bound to live things cannot be measured yet.
    plain = [node for node in program.nodes if not any(isinstance(item, Live) for item in node.args)]
    cost_of = find_costs(plain, terms, NO_LIVE)
    ends_ns = list(accumulate(cost_of(node).duration_ns for node in program.nodes))
    speed, share = find_link_speed(terms.table), _sent_share(link)
    if is_even and link.is_uniform:
        ready_ns = {item.input: ends_ns[position] for item, position in completed.items()}
        sent_bytes = {item.input: round(share * _type_of(item).num_bytes) for item in completed}
        products = find_products(program, blocks, link)
        num_ranks = len(link.division.spans)
        link.factored = frozenset(choose_products(products, ready_ns, sent_bytes, num_ranks, cost_of, speed))
    packed = [item for item in completed if item.input.name not in link.factored]
    gradients = [
        Ready(ends_ns[completed[item]], kind.num_bytes, (kind.dtype, kind.device))
        for item in packed
        for kind in [_type_of(item)]
    ]
    # Where parameters arrive late, all buckets are on their way at once, and each has a thread that waits for it.
    is_late = link.own is not None and link.own.is_late
    least_bytes = sum(item.num_bytes for item in gradients) // MOST_LATE if is_late else 0
    if link.has_smallest_buckets:
        sizes = smallest_sizes(gradients)
    else:
        sizes = choose_sizes(gradients, share, speed, least_bytes) if gradients else []
    waiting = iter(packed)
    buckets = [tuple(islice(waiting, size)) for size in sizes]
    buckets += [(item,) for item in completed if item.input.name in link.factored]
    buckets.sort(key=lambda bucket: max(completed[item] for item in bucket))
    link.buckets = tuple(tuple(item.input.name for item in bucket) for bucket in buckets)


def _sent_share(link: Link) -> float:
    """What the rank that sends most sends of a bucket of one byte, if its parts are equal."""
    division = link.division
    num_ranks = len(division.spans)
    sent = division.payload_bytes if link.own is None else division.scattered_bytes
    return division.most_bytes(sent, range(num_ranks + 1), 1) / num_ranks


def find_buckets(program: Program, blocks: Mapping[Value, tuple[Value, ...]], link: Link) -> list[Bucket]:
    """The buckets, in the order in which they are sent."""
    assert link.buckets is not None
    return _find_named(_find_completed(program, blocks), link.buckets)


def _find_completed(program: Program, blocks: Mapping[Value, tuple[Value, ...]]) -> dict[Gradient, int]:
    """The gradients, in the order in which they are completed, with the node after which they are."""
    found = {
        item: max(program.positions[program.makers[value]] for value in blocks[item.input])
        for item in program.gradients
        if item.value is not None
    }
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _find_named(completed: Mapping[Gradient, int], names: Sequence[Sequence[str]]) -> list[Bucket]:
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


def start_bucket(
    operation: Operation, bucket: Bucket, blocks: Mapping[Value, tuple[Value, ...]], link: Link
) -> tuple[list[Node], Value, Value]:
    """The nodes that pack a bucket and start its transfer; the transfer, and the first tensor that was packed."""
    kind, division, cuts = _type_of(bucket.gradients[0]), link.division, bucket.cuts(link)
    row = TensorType(kind.dtype, (sum(bucket.sizes),), (1,), kind.device)
    nodes, flats = [], []
    for place in range(len(division.blocks[link.ranks.rank])):
        parts = tuple(blocks[item.input][place] for item in bucket.gradients)
        flat = Value(f"bucket_{bucket.number}_{place}", row)
        packing = FLATTEN if len(parts) == 1 else PACK
        nodes.append(Node(packing, parts, {}, (flat,), bucket.origin, Phase.BACKWARD))
        flats.append(flat)
    received_bytes = division.received_bytes(cuts, row.dtype.itemsize)
    transfer = Value(f"transfer_{bucket.number}", OpaqueType("transfer", received_bytes))
    sent = division.payload_bytes if operation is START_REDUCTION else division.scattered_bytes
    args = (LINK, bucket.number, cuts, division.most_bytes(sent, cuts, row.dtype.itemsize), *flats)
    nodes.append(Node(operation, args, {}, (transfer,), bucket.origin, Phase.BACKWARD))
    return nodes, transfer, flats[0]


def _finish(bucket: Bucket, transfer: Value, flat: Value, reduced: dict[Value, Value]) -> list[Node]:
    """The nodes that wait for a bucket, and take it apart."""
    total = Value(f"reduced_{bucket.number}", flat.type)
    nodes = [Node(FINISH_REDUCTION, (flat, transfer, LINK), {}, (total,), bucket.origin, Phase.BACKWARD)]
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


def gather_records(program: Program, link: Link) -> Program:
    """The Program that sends its records when they are there, and ends by waiting for those of all ranks."""
    (record,) = (node for node in program.nodes if node.operation is KEEP_RECORD)
    _, loss, _, _, *statistics = record.args
    record_bytes = sum(value.tensor_type.num_bytes for value in (loss, *statistics))
    spans = link.division.spans
    sent_bytes = record_bytes * max(map(len, spans)) * (len(spans) - 1)
    transfer = Value("transfer_of_records", OpaqueType("transfer"))
    start = Node(START_RECORDS, (LINK, SHARDS, sent_bytes), {}, (transfer,), Origin(), Phase.FORWARD)
    finish = Node(FINISH_RECORDS, (transfer, LINK, SHARDS), {}, (), Origin(), Phase.BACKWARD)
    program = program.map_nodes(lambda node: (node, start) if node.operation is KEEP_RECORD else (node,))
    nodes = (*program.nodes, finish)
    is_whole = program.boundary == len(program.nodes)
    return replace(program, nodes=nodes, boundary=len(nodes) if is_whole else program.boundary)
