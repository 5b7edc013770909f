"""Divided parameters become values: gathered before they are first read, and free after they are last read.

In: a Program that reads parameters. Out: one in which those that the plan divides are made by `start_gather` and
`finish_gather` from this rank's elements, which are its inputs instead. In this Program each is gathered once and
stays; the planner may let it be freed and gathered again. Its start is where the parameter before it is first read, so
that the link works while that one is computed with.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from undertow.ir import InputKind, Node, OpaqueType, Origin, Program, TensorType, Value
from undertow.ir.printer import format_bytes
from undertow.ops.communication import LINK, Link
from undertow.ops.gathering import FINISH_GATHER, START_GATHER
from undertow.ops.own_updates import own_parts_of
from undertow.passes.own_parts import find_divided, find_reads


def gather_parameters(program: Program, link: Link) -> Program:
    """The Program that gathers each divided parameter before its first read."""
    divided = find_divided([item.input for item in program.gradients if item.value is not None], link)
    first_reads, _ = find_reads(program)
    before: dict[int, list[Node]] = {}
    gathered: dict[Value, Value] = {}
    start_at = 0
    for value in sorted(divided, key=first_reads.__getitem__):
        name, origin = divided[value], Origin(value.name)
        transfer = Value(f"{value.name}_transfer", OpaqueType("transfer"))
        whole, found = Value(f"{value.name}_whole", value.type), Value(f"{value.name}_gathered", value.type)
        sent_bytes = own_parts_of(link).sent_bytes(name)
        start = Node(START_GATHER, (value, LINK, name, sent_bytes), {}, (whole, transfer), origin)
        finish = Node(FINISH_GATHER, (whole, transfer, LINK, name), {}, (found,), origin)
        before.setdefault(start_at, []).append(start)
        before.setdefault(first_reads[value], []).append(finish)
        start_at, gathered[value] = first_reads[value], found
    pieces = [
        [*before.get(position, ()), node.with_values(lambda value: gathered.get(value, value))]
        for position, node in enumerate(program.nodes)
    ]
    return program.with_pieces(pieces)


def keep_own_elements(program: Program, link: Link) -> Program:
    """The Program whose inputs are this rank's elements of divided parameters, where it had whole parameters."""
    own = own_parts_of(link)
    changed: dict[Value, Value] = {}
    inputs = [item.value for item in program.inputs if item.kind is InputKind.PARAMETER]
    for value, name in find_divided(inputs, link).items():
        piece, kind = own.divided.pieces[name][own.ranks.rank], value.tensor_type
        row = TensorType(kind.dtype, (0 if piece is None else piece.num_elements,), (1,), kind.device)
        changed[value] = Value(value.name, row)

    def change(value: Value) -> Value:
        return changed.get(value, value)

    program = program.with_pieces([(node.with_values(change),) for node in program.nodes])
    return replace(
        program,
        inputs=tuple(replace(item, value=change(item.value)) for item in program.inputs),
        gradients=tuple(replace(item, input=change(item.input)) for item in program.gradients),
        differentiable=frozenset(map(change, program.differentiable)),
    )


def describe_buckets(program: Program, link: Link) -> tuple[str, ...]:
    """Which buckets of parameters are held whole, and which are divided; how often a shard gathers of each."""
    own = own_parts_of(link)
    if not own.divided_buckets:
        return ()
    gathers = Counter(node.args[2] for node in program.nodes if node.operation is START_GATHER)
    held = [bucket for bucket in own.pieces if bucket not in own.divided_buckets]
    lines = []
    if held:
        num_bytes = sum(own.bucket_bytes(bucket) for bucket in held)
        lines.append(f"parameters held whole: bucket {', '.join(map(str, held))}, {format_bytes(num_bytes)}")
    for bucket in own.divided_buckets:
        found = own.find_divisible(bucket)
        num_gathers = sum(gathers[name] for name in found)
        saved_bytes, whole_bytes = own.divisible_bytes(bucket), own.bucket_bytes(bucket)
        lines.append(
            f"parameters divided: bucket {bucket}, {format_bytes(whole_bytes - saved_bytes)} of "
            f"{format_bytes(whole_bytes)} here, {num_gathers} gathers of {len(found)} parameters"
        )
    return tuple(lines)
