"""The copies of gradients that autograd's accumulation would make, as operations of the Program, so that they count.

In: a derived Program. Out: the Program with these copies. EXACT: the same numbers in the same layout. Autograd keeps
the tensor that it is given if that has its parameter's strides and nothing else holds it. A gradient that a later
operation reads is handed over after that (`code.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from undertow.ir import Gradient, Node, Origin, Phase, Program, TensorType, Value, map_values
from undertow.ir.schema import flatten_outputs
from undertow.ops.own import RESTRIDE


def lay_out_gradients(program: Program, *, is_fast: bool) -> Program:
    """The Program whose gradients have the strides of their inputs, except where the user computed the input.

    Along dims of size 1 the kernel's strides stay if eager runs the same kernel, which `fast` does not.
    """
    leaves = _leaves(program)

    def lies_otherwise(item: Gradient, value: Value) -> bool:
        if item.is_in_rows:
            return False
        has_own_strides = is_fast and value.tensor_type.strides != item.input.tensor_type.packed.strides
        is_copied = has_own_strides or _is_copied_for_layout(item.input.tensor_type, value.tensor_type)
        return item.input in leaves and is_copied

    return _copy_where(program, lies_otherwise)


def part_gradients(program: Program, is_kept: Callable[[Gradient], bool] = lambda item: True) -> Program:
    """The Program in which no gradient shares memory with another gradient that is kept.

    A change in place of one, such as clipping, must not change the other.
    """
    leaves = _leaves(program)
    own = (item for item in program.gradients if not item.is_in_rows)  # those in rows have memory of their own
    others = [item.value for item in own if item.value is not None and item.input not in leaves]
    given = [_find_span(program, value) for value in others]

    def is_given(item: Gradient, value: Value) -> bool:
        if item.input not in leaves or item.is_in_rows:
            return False
        span = _find_span(program, value)
        if is_kept(item) and any(map(span.overlaps, given)):
            return True
        given.append(span)
        return False

    return _copy_where(program, is_given)


def _leaves(program: Program) -> set[Value]:
    return {item.value for item in program.inputs if item.is_leaf}


def _is_copied_for_layout(leaf: TensorType, gradient: TensorType) -> bool:
    """Whether autograd makes a copy because the gradient has other strides than it asks for.

    It ignores dims of size 1, unless one has the stride 0: such a tensor may be an expanded one.
    """
    strides = list(zip(leaf.shape, leaf.packed.strides, gradient.strides, strict=True))
    if leaf.is_dense and any(size == 1 and found == 0 for size, _, found in strides):
        return True
    return any(size > 1 and wanted != found for size, wanted, found in strides)


@dataclass(frozen=True)
class _Span:
    """Bytes of the memory that `root` lies in."""

    root: Value
    first: int
    end: int

    def overlaps(self, other: _Span) -> bool:
        return self.root is other.root and self.first < other.end and other.first < self.end


def _find_span(program: Program, value: Value) -> _Span:
    """Where a value lies in its storage: its views are taken again, of tensors without memory."""
    views: list[tuple[Node, Value]] = []
    root = value
    while (maker := program.makers.get(root)) is not None and maker.shared_input is not None:
        views.append((maker, root))
        root = maker.shared_input
    kind = root.tensor_type
    tensor = torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device="meta")
    for node, made in reversed(views):
        if node.operation.is_view and node.operation.overload is not None:
            outputs: list[Any] = flatten_outputs(node.operation.run(*map_values(node.args, lambda _, it=tensor: it)))
            tensor = outputs[node.outputs.index(made)]
    first = int(tensor.storage_offset()) * tensor.element_size()
    return _Span(root, first, first + value.tensor_type.num_bytes)


def _copy_where(program: Program, is_copied: Callable[[Gradient, Value], bool]) -> Program:
    copies: dict[int, list[Node]] = {}
    gradients = []
    for item in program.gradients:
        if item.value is not None and is_copied(item, item.value):
            kind = item.input.tensor_type.packed
            value = Value(f"{item.value.name}_as_{item.input.name}", kind)
            origin = Origin(item.input.name)
            copied = Node(RESTRIDE, (item.value, kind.strides), {}, (value,), origin, Phase.BACKWARD)
            maker = program.makers.get(item.value)
            position = program.boundary - 1 if maker is None else program.positions[maker]
            copies.setdefault(max(position, program.boundary - 1), []).append(copied)
            item = replace(item, value=value)
        gradients.append(item)
    if not copies:
        return program
    nodes = list(program.first_pass) + copies.get(program.boundary - 1, [])
    for position, node in enumerate(program.second_pass, start=program.boundary):
        nodes += [node, *copies.get(position, ())]
    return replace(program, nodes=tuple(nodes), gradients=tuple(gradients))
