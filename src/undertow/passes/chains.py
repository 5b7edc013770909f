"""`fold_chains`: elementwise operations whose results are each read once, by the next, become one pass over memory.

In: a Program whose kernels are chosen, and a function that measures nodes. Out: the Program with a generated loop
instead of each such tree of operations, where the loop was measured to be faster. The operands are numbers and float32
tensors of one dense layout; an operation that broadcasts stays. REORDERS: multiplications and additions are fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from undertow.fast.chains import chain
from undertow.ir import Node, Program, TensorType, Value
from undertow.ir.cost import Cost
from undertow.kernels.compiler import HAS_NUMBA
from undertow.memory.lifetimes import is_dense

aten = torch.ops.aten

LEAST_ELEMENTS = 1 << 14  # a smaller tensor stays in the cache between its operations
MOST_INPUTS = 6  # more streams than that are not prefetched

Operand = Any  # a Value, a number, or the position of an earlier step
Steps = list[tuple[str, tuple[Operand, ...]]]


def _gelu(x: Value, approximate: str = "none") -> Steps:
    return [("gelu" if approximate == "none" else "gelu_tanh", (x,))]


def _gelu_backward(ct: Value, x: Value, approximate: str = "none") -> Steps:
    return [("gelu_derivative" if approximate == "none" else "gelu_tanh_derivative", (x,)), ("mul", (ct, _Step(0)))]


@dataclass(frozen=True)
class _Step:
    """The result of an earlier step of the same operation."""

    place: int


# The steps that an operation consists of, with its arguments as in the node.
_STEPS: dict[Any, Callable[..., Steps]] = {
    aten.add.Tensor: lambda x, y: [("add", (x, y))],
    aten.sub.Tensor: lambda x, y: [("sub", (x, y))],
    aten.mul.Tensor: lambda x, y: [("mul", (x, y))],
    aten.div.Tensor: lambda x, y: [("div", (x, y))],
    aten.mul.Scalar: lambda x, y: [("mul", (x, y))],
    aten.div.Scalar: lambda x, y: [("div", (x, y))],
    aten.neg.default: lambda x: [("neg", (x,))],
    aten.relu.default: lambda x: [("relu", (x,))],
    aten.sigmoid.default: lambda x: [("sigmoid", (x,))],
    aten.tanh.default: lambda x: [("tanh", (x,))],
    aten.exp.default: lambda x: [("exp", (x,))],
    aten.hardtanh.default: lambda x, low=-1.0, high=1.0: [
        ("maximum", (x, float(low))),
        ("minimum", (_Step(0), float(high))),
    ],
    aten.silu.default: lambda x: [("sigmoid", (x,)), ("mul", (x, _Step(0)))],
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.threshold_backward.default: lambda ct, y, threshold: [("relu_backward", (ct, y))] if threshold == 0 else [],
}


def fold_chains(program: Program, measure: Callable[[Sequence[Node]], Callable[[Node], Cost]]) -> Program:
    """The Program with its chains folded where that is faster."""
    if not HAS_NUMBA:
        return program
    chains = [(item, item.as_node()) for item in _find_chains(program)]
    if not chains:
        return program
    cost_of = measure([node for item, joined in chains for node in (joined, *item.nodes)])
    pieces: list[tuple[Node, ...]] = [(node,) for node in program.nodes]
    for item, joined in chains:
        if cost_of(joined).duration_ns < sum(cost_of(node).duration_ns for node in item.nodes):
            for place in item.places:
                pieces[place] = ()
            pieces[item.places[-1]] = (joined,)
    return program.with_pieces(pieces)


@dataclass(eq=False)
class _Chain:
    """Nodes that run as one, in order; the last makes the result."""

    nodes: list[Node]
    places: list[int]

    def as_node(self) -> Node:
        """The chain as one node."""
        inputs, steps = self._steps()
        return replace(self.nodes[-1], operation=chain(steps, len(inputs)), args=tuple(inputs), kwargs={})

    def _steps(self) -> tuple[list[Value], tuple[tuple[str, tuple[int | float, ...]], ...]]:
        made = {value for node in self.nodes[:-1] for value in node.named_outputs}
        inputs = list(dict.fromkeys(value for node in self.nodes for value in node.inputs if value not in made))
        places: dict[Value, int] = {value: place for place, value in enumerate(inputs)}
        steps: list[tuple[str, tuple[int | float, ...]]] = []
        for node in self.nodes:
            first = len(inputs) + len(steps)
            for operation, operands in _STEPS[node.target](*node.args, **node.kwargs):
                steps.append((operation, tuple(_place(operand, places, first) for operand in operands)))
            places[node.named_outputs[0]] = len(inputs) + len(steps) - 1
        return inputs, tuple(steps)


def _place(operand: Operand, places: dict[Value, int], first: int) -> int | float:
    if isinstance(operand, Value):
        return places[operand]
    return first + operand.place if isinstance(operand, _Step) else float(operand)


def _find_chains(program: Program) -> list[_Chain]:
    """Trees of at least two nodes, each as large as possible, within one pass."""
    readers = program.readers
    maker = {value: place for place, node in enumerate(program.nodes) for value in node.named_outputs}
    taken: set[int] = set()
    found = []
    for last in range(len(program.nodes) - 1, -1, -1):
        if last in taken or not _is_foldable(program.nodes[last]):
            continue
        kind = program.nodes[last].named_outputs[0].type
        is_backward = last >= program.boundary
        places, waiting, inputs = [last], list(program.nodes[last].inputs), set(program.nodes[last].inputs)
        while waiting:
            value = waiting.pop()
            place = maker.get(value, -1)
            if place < 0 or len(readers[value]) != 1 or place in taken or value.type != kind:
                continue
            node = program.nodes[place]
            inside = inputs - {value} | set(node.inputs)
            is_same_pass = (place >= program.boundary) == is_backward
            if is_same_pass and _is_foldable(node) and len(inside) <= MOST_INPUTS:
                places.append(place)
                waiting += node.inputs
                inputs = inside
        if len(places) > 1:
            taken.update(places)
            places.sort()
            found.append(_Chain([program.nodes[place] for place in places], places))
    return found


def _is_foldable(node: Node) -> bool:
    if node.target not in _STEPS or len(node.named_outputs) != 1:
        return False
    kind = node.named_outputs[0].type
    if not isinstance(kind, TensorType) or kind.dtype is not torch.float32 or kind.device.type != "cpu":
        return False
    is_plain = kind.num_elements >= LEAST_ELEMENTS and is_dense(node.named_outputs[0])
    try:
        has_steps = bool(_STEPS[node.target](*node.args, **node.kwargs))
    except TypeError:  # an argument that the record does not have, such as alpha
        return False
    return is_plain and has_steps and all(value.type == kind for value in node.inputs)
