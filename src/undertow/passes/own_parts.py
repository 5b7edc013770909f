"""Each rank updates its own part of the parameters, and the others get what it updated.

In: the Program of a rank's last shard, with the sum of each gradient over each block of the rank's shards, and how the
optimizer updates. Out: the Program in which the sum of a bucket comes to each rank only for its own part, that part is
updated, and the parameters are sent. All gradients are used up.

Transfers start in one order on all ranks, whatever each completes when. So a bucket's parameters are sent after its sum
was waited for, before the next bucket starts, and where a rank is not ready for that, its next bucket waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from undertow.ir import Node, OpaqueType, Origin, Phase, Program, TensorType, Value
from undertow.ir.pytorch import operation_of
from undertow.memory.lifetimes import find_lifetimes
from undertow.ops.communication import LINK, Link
from undertow.ops.gathering import END_GATHERING, update_divided_part_by
from undertow.ops.own_updates import (
    ADD_OWN,
    ARRIVE,
    FINISH_PARAMETERS,
    FINISH_SCATTER,
    START_NORMS,
    START_PARAMETERS,
    START_SCATTER,
    STEP_OWN,
    norms_bytes,
    own_parts_of,
    update_part_by,
)
from undertow.ops.updates import LATER_STEP, OPTIMIZER
from undertow.passes.reduction import Bucket, find_buckets, start_bucket
from undertow.ranks.link_speed import MOST_ON_THEIR_WAY

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Updating:
    """How parameters are updated: one by one as their gradients are there, or all at the end.

    `clip_norm` asks for the norm of all gradients, and `accumulate` for the sums of so many calls: both are at the end.
    """

    optimizer: torch.optim.Optimizer
    is_at_end: bool
    clip_norm: float | None
    accumulate: int


@dataclass(eq=False)
class _Weaving:
    """The Program that comes to be: what is inserted after which node, and where what was inserted last stands."""

    program: Program
    link: Link
    updating: Updating
    inserted: dict[int, list[Node]] = field(default_factory=dict)
    position: int = 0
    sums: dict[int, Value] = field(default_factory=dict)  # at the end: of this rank's part of each bucket

    def insert(self, nodes: list[Node], position: int) -> None:
        """After the node at `position`, and after all that was inserted before."""
        self.position = max(self.position, position)
        self.inserted.setdefault(self.position, []).extend(nodes)

    def woven(self) -> Program:
        """The whole Program."""
        pieces = [[node, *self.inserted.get(position, ())] for position, node in enumerate(self.program.nodes)]
        return replace(self.program.with_pieces(pieces), gradients=())


def update_own_parts(
    program: Program, blocks: Mapping[Value, tuple[Value, ...]], link: Link, updating: Updating
) -> Program:
    """The Program that updates its part. `blocks` are the sums of each input's gradient so far."""
    own, end = own_parts_of(link), len(program.nodes) - 1
    weaving = _Weaving(program, link, updating)
    first_reads, last_reads = find_reads(program)
    buckets = find_buckets(program, blocks, link)
    started: list[tuple[Bucket, Value]] = []
    for bucket in buckets:
        own.divide(bucket.number, bucket.names, bucket.sizes, bucket.cuts(link))
        nodes, transfer, _ = start_bucket(START_SCATTER, bucket, blocks, link)
        weaving.insert([*_end_gathering(bucket, link), *nodes], bucket.ready)
        started.append((bucket, transfer))
        if len(started) > MOST_ON_THEIR_WAY:
            _finish(weaving, *started.pop(0), first_reads, last_reads)
    weaving.insert([], end)
    for bucket, transfer in started:
        _finish(weaving, bucket, transfer, first_reads, last_reads)
    if updating.is_at_end:
        _step_at_end(weaving, buckets, first_reads)
    if not own.is_late:
        weaving.insert([Node(FINISH_PARAMETERS, (LINK,), {}, (), Origin(), Phase.UPDATE)], end)
    return weaving.woven()


def find_reads(program: Program) -> tuple[dict[Value, int], dict[Value, int]]:
    """For each differentiated input, the first and the last node that reads its memory."""
    roots = find_lifetimes(program).root
    first: dict[Value, int] = {item.input: 0 for item in program.gradients}
    last: dict[Value, int] = dict(first)
    seen: set[Value] = set()
    for position, node in enumerate(program.nodes):
        for root in {roots[value] for value in node.inputs} & first.keys():
            if root not in seen:
                first[root] = position
                seen.add(root)
            last[root] = position
    return first, last


def _finish(
    weaving: _Weaving,
    bucket: Bucket,
    transfer: Value,
    first_reads: Mapping[Value, int],
    last_reads: Mapping[Value, int],
) -> None:
    """Wait for this rank's part of a bucket, update it, and send the parameters; or keep it for the end."""
    link, updating, number = weaving.link, weaving.updating, bucket.number
    pieces = own_parts_of(link).pieces[number][link.ranks.rank]
    kind = bucket.gradients[0].input.tensor_type
    row = TensorType(kind.dtype, (sum(piece.num_elements for piece in pieces),), (1,), kind.device)
    total = Value(f"own_part_{number}", row)
    weaving.insert([Node(FINISH_SCATTER, (transfer, LINK), {}, (total,), bucket.origin, Phase.BACKWARD)], 0)
    if updating.is_at_end:
        weaving.sums[number] = total
        if updating.accumulate > 1:
            weaving.insert([Node(ADD_OWN, (LINK, number, total), {}, (), bucket.origin, Phase.UPDATE)], 0)
        return
    updates = _update_pieces(bucket, link, updating.optimizer, total)
    weaving.insert([], max((last_reads[value] for value in _whole_inputs(bucket, link)), default=0))
    updated = [value for node in updates if node.phase is Phase.UPDATE for value in node.operation.writes(node)]
    weaving.insert([*updates, *_start_parameters(link, bucket, first_reads, updated)], 0)


def _update_pieces(bucket: Bucket, link: Link, optimizer: torch.optim.Optimizer, total: Value) -> list[Node]:
    """The updates of this rank's pieces of a bucket, each with the view of the sum that is its gradient."""
    own = own_parts_of(link)
    pieces = {piece.name: piece for piece in own.pieces[bucket.number][link.ranks.rank]}
    names = own.names_of(bucket.names)
    group_of = {id(item): index for index, group in enumerate(optimizer.param_groups) for item in group["params"]}
    nodes, start = [], 0
    for item, name in zip(bucket.gradients, names, strict=True):
        if name in pieces:
            piece, origin = pieces[name], Origin(item.input.name)
            row = replace(total.tensor_type, shape=(piece.num_elements,))
            part = Value(f"{item.input.name}_own", row)
            args: tuple[object, ...] = (total, [piece.num_elements], [1], start)
            nodes.append(Node(operation_of(aten.as_strided.default), args, {}, (part,), origin, Phase.BACKWARD))
            index = group_of[id(own.parameters[name])]
            if name in own.divided.pieces:
                update, args = update_divided_part_by(optimizer, index), (OPTIMIZER, index, LINK, name, part)
            else:
                update, args = update_part_by(optimizer, index), (OPTIMIZER, index, item.input, part, piece.first)
            nodes.append(Node(update, args, {}, (), origin, Phase.UPDATE))
            start += piece.num_elements
    return nodes


def _start_parameters(
    link: Link, bucket: Bucket, first_reads: Mapping[Value, int], updated: Sequence[Value]
) -> list[Node]:
    """What sends a bucket's parameters that are whole on all ranks: those that are read first go first."""
    whole = _whole_inputs(bucket, link)
    if not whole:
        return []
    others = tuple(value for value in whole if value not in updated)
    urgency = min(first_reads[value] for value in whole)
    kind = whole[0].tensor_type.dtype
    sent_bytes = link.division.most_bytes(link.division.spread_bytes, bucket.cuts(link), kind.itemsize)
    whole_share = sum(value.tensor_type.num_elements for value in whole) / sum(bucket.sizes)
    names = tuple(value.name for value in updated)
    args = (LINK, bucket.number, urgency, round(sent_bytes * whole_share), names, *others)
    return [Node(START_PARAMETERS, args, {}, (), bucket.origin, Phase.UPDATE)]


def _end_gathering(bucket: Bucket, link: Link) -> list[Node]:
    """What runs before gradients are sent: the others may then update the parameters that they are of."""
    divided = find_divided(_inputs(bucket), link)
    if not divided:
        return []
    args = (LINK, tuple(divided.values()), *divided)
    return [Node(END_GATHERING, args, {}, (), bucket.origin, Phase.BACKWARD)]


def _step_at_end(weaving: _Weaving, buckets: Sequence[Bucket], first_reads: Mapping[Value, int]) -> None:
    """The update of all pieces when all sums are there, and then all parameters are sent."""
    own, updating = own_parts_of(weaving.link), weaving.updating
    # Sums of several calls are kept by the step.
    sums = () if updating.accumulate > 1 else tuple(weaving.sums.items())
    numbers, values = tuple(number for number, _ in sums), tuple(value for _, value in sums)
    nodes, started = [], None
    if updating.clip_norm is not None:
        started = Value("transfer_of_norms", OpaqueType("transfer", norms_bytes(own)))
        sent_bytes = norms_bytes(own) * (own.ranks.size - 1)
        args: tuple[object, ...] = (LINK, LATER_STEP, updating.accumulate, sent_bytes, numbers, *values)
        nodes.append(Node(START_NORMS, args, {}, (started,), Origin(), Phase.UPDATE))
    inputs = tuple(value for bucket in buckets for value in _whole_inputs(bucket, weaving.link))
    names = tuple(value.name for value in inputs)
    settings = (LINK, LATER_STEP, updating.clip_norm, updating.accumulate)
    args = (*settings, started, names, inputs, numbers, *values)
    nodes.append(Node(STEP_OWN, args, {}, (), Origin(), Phase.UPDATE))
    for bucket in buckets:
        nodes += _start_parameters(weaving.link, bucket, first_reads, _whole_inputs(bucket, weaving.link))
    weaving.insert(nodes, 0)


def _inputs(bucket: Bucket) -> list[Value]:
    return [item.input for item in bucket.gradients]


def _whole_inputs(bucket: Bucket, link: Link) -> list[Value]:
    """Those of its parameters that are whole on all ranks."""
    divided = find_divided(_inputs(bucket), link)
    return [value for value in _inputs(bucket) if value not in divided]


def find_divided(inputs: Sequence[Value], link: Link) -> dict[Value, str]:
    """Those of these parameters that the plan divides, each with the name by which its pieces are known."""
    own = own_parts_of(link)
    if not own.divided.pieces:
        return {}
    names = own.names_of([value.name for value in inputs])
    return {value: name for value, name in zip(inputs, names, strict=True) if name in own.divided.pieces}


def wait_for_parameters(program: Program, link: Link) -> Program:
    """The Program that waits for each whole parameter where it is first read: it may still be on its way."""
    first_reads, _ = find_reads(program)
    divided = find_divided([item.input for item in program.gradients], link)
    arrived: dict[Value, Value] = {}
    inserted: dict[int, list[Node]] = {}
    for item in program.gradients:
        if item.value is not None and item.input not in divided:
            found = Value(f"{item.input.name}_arrived", item.input.type)
            node = Node(ARRIVE, (item.input, LINK, item.input.name), {}, (found,), Origin(item.input.name))
            inserted.setdefault(first_reads[item.input], []).append(node)
            arrived[item.input] = found
    pieces = [
        [*inserted.get(position, ()), node.with_values(lambda value: arrived.get(value, value))]
        for position, node in enumerate(program.nodes)
    ]
    return program.with_pieces(pieces)
