"""What the search for a cut has to know of a model: times, values that cross, and what is held, as numbers.

In: the derived Program of a shard, what its operations cost, and what is held for each parameter. Out: a Profile over
its forward operations. Views, and what is cheaply made again, cross nowhere: what they come from does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from undertow.ir import InputKind, Node, Program, TensorType, Value
from undertow.ir.cost import Cost
from undertow.memory.lifetimes import find_lifetimes, kept_values
from undertow.ops.shards import KEEP_RECORD
from undertow.passes.shards import SHARE_SEED
from undertow.passes.stages import CheapOperations, halve
from undertow.passes.updates import seed_loss
from undertow.stages.cutting import Flow, Held, Profile


def find_profile(
    program: Program, cost_of: Callable[[Node], Cost], owned_bytes: Mapping[str, int], in_halves: bool
) -> Profile:
    """The profile of a Program. `owned_bytes` is what is held for a parameter where it is updated, by its name."""
    program = seed_loss(program, SHARE_SEED)
    forward = [node for node in program.first_pass if node.operation is not KEEP_RECORD]
    positions = {node: position for position, node in enumerate(program.first_pass)}
    count = len(program.first_pass)
    loss_at = positions[program.makers[program.outputs[0]]]
    forward_ns = [0] * count
    for node in forward:
        forward_ns[positions[node]] = cost_of(node).duration_ns
    first, second = halve(program.second_pass, program.gradients) if in_halves else (list(program.second_pass), [])
    rows = [[0] * count, [0] * count]
    at = {value.name: positions[node] for node in forward for value in node.named_outputs}
    for row, nodes in zip(rows, (first, second), strict=True):
        for node in nodes:
            row[at.get(node.origin.derived_from, loss_at)] += cost_of(node).duration_ns
    readers = _find_readers(program, forward, positions)
    kept = {item.value: item.num_bytes for item in kept_values(program, find_lifetimes(program))}
    kept_bytes = [0] * count
    for value, num_bytes in kept.items():
        maker = program.makers[value]
        kept_bytes[positions.get(maker, loss_at)] += num_bytes
    return Profile(
        names=[_describe(node) for node in program.first_pass],
        forward_ns=forward_ns,
        backward_ns=rows[0],
        weight_ns=rows[1],
        flows=_find_flows(program, positions, readers),
        held=_find_held(program, readers, owned_bytes),
        kept_bytes=kept_bytes,
        places=_find_places(program, forward, positions, loss_at),
    )


def _describe(node: Node) -> str:
    return node.origin.module_path or node.name


def _find_readers(program: Program, forward: list[Node], positions: Mapping[Node, int]) -> dict[Value, list[int]]:
    """For each value and input the operations that read it, also through views and what is made again."""
    cheap = CheapOperations(program)
    found: dict[Value, list[int]] = {}
    sources: dict[Value, tuple[Value, ...]] = {}
    for node in forward:
        read = tuple(dict.fromkeys(item for value in node.inputs for item in sources.get(value, (value,))))
        if node.operation.is_view or cheap.is_cheap(node):
            sources.update(dict.fromkeys(node.named_outputs, read))
            continue
        for value in read:
            found.setdefault(value, []).append(positions[node])
    return found


def _find_flows(program: Program, positions: Mapping[Node, int], readers: Mapping[Value, list[int]]) -> list[Flow]:
    inputs = {item.value for item in program.inputs}
    has_gradient = {item.input for item in program.gradients if item.value is not None}
    flows = []
    for value, places in readers.items():
        if not isinstance(value.type, TensorType):
            continue
        num_bytes = value.type.num_bytes
        if value in inputs:
            if value in has_gradient and len(places) > 1:
                flows.append(Flow(places[0], tuple(places[1:]), 0, num_bytes))
        else:
            back = num_bytes if value in program.differentiable else 0
            flows.append(Flow(positions[program.makers[value]], tuple(places), num_bytes, back))
    return flows


def _find_held(program: Program, readers: Mapping[Value, list[int]], owned_bytes: Mapping[str, int]) -> list[Held]:
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    return [
        Held(tuple(readers[item.value]), item.value.type.num_bytes, owned_bytes.get(item.path, 0))
        for item in program.inputs
        if item.kind in kinds and readers.get(item.value)
    ]


def _find_places(program: Program, forward: list[Node], positions: Mapping[Node, int], loss_at: int) -> tuple[int, ...]:
    """Where a stage may begin: at what computes something, after something was computed, up to the loss."""
    cheap = CheapOperations(program)
    computing = [
        positions[node]
        for node in forward
        if not node.operation.is_view and not cheap.is_cheap(node) and positions[node] <= loss_at
    ]
    return tuple(computing[1:])
