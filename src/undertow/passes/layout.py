"""`use_channels_last`: the activations of a convolutional network with the channels innermost in memory.

In: the Program of a forward pass. Out: the Program with four-dimensional values in PyTorch's channels_last layout from
one convolution to the next. Operations that are not known to preserve this layout get their arguments in the old one.
The user sees no difference: arguments are copied to the layout, and outputs are copied back.

REORDERS: kernels add in another order. Random operations get the old layout: a mask drawn in another order of memory
would be another mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from undertow.fast.images import as_channels_last, is_channels_last
from undertow.ir import Node, Origin, Program, TensorType, Value
from undertow.ir.pytorch import operation_of
from undertow.ops.own import RESTRIDE, functional

aten = torch.ops.aten

# Operations whose outputs have the layout of their first argument, as with all pointwise ones.
_KEEPING = {
    aten.convolution.default,
    aten.max_pool2d_with_indices.default,
    aten.avg_pool2d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_bilinear2d.default,
    aten.cat.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
    functional(operation_of(aten.native_batch_norm.default)),
}


def use_channels_last(program: Program) -> Program:
    """The forward pass with channels innermost, if it has a convolution that may gain from it."""
    if any(_is_convolution(node) for node in program.nodes):
        return _Rewriter(program).run()
    return program


def _is_convolution(node: Node) -> bool:
    return node.target is aten.convolution.default and _is_image(node.args[0])


def _is_image(argument: Any) -> bool:
    if not isinstance(argument, Value) or not isinstance(argument.type, TensorType):
        return False
    kind = argument.type
    return len(kind.shape) == 4 and kind.dtype is torch.float32 and kind.device.type == "cpu" and 0 not in kind.shape


def _keeps_layout(node: Node) -> bool:
    if node.target in _KEEPING:
        return True
    overload = node.operation.overload
    is_pointwise = overload is not None and torch.Tag.pointwise in overload.tags
    return is_pointwise and not node.operation.is_random


class _Rewriter:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.relaid: dict[Value, Value] = {}  # values by their channels_last twins
        self.plain = {item.value for item in program.inputs}  # values that exist in their own layout
        self.differentiable = set(program.differentiable)
        self.nodes: list[Node] = []

    def run(self) -> Program:
        for node in self.program.nodes:
            images = [value for value in node.inputs if _is_image(value)]
            is_reached = _is_convolution(node) or any(value in self.relaid for value in images)
            if is_reached and _keeps_layout(node) and any(map(_is_image, node.outputs)):
                self._relay(node)
            else:
                self._keep(node)
        outputs = tuple(self._in_own_layout(value, Origin()) for value in self.program.outputs)
        updates = tuple(replace(item, value=self._in_own_layout(item.value, Origin())) for item in self.program.updates)
        return replace(
            self.program,
            nodes=tuple(self.nodes),
            boundary=len(self.nodes),
            outputs=outputs,
            updates=updates,
            differentiable=frozenset(self.differentiable),
        )

    def _relay(self, node: Node) -> None:
        """Run the node on channels_last arguments; smaller images are broadcast and stay as they are."""
        result = next(value for value in node.outputs if value is not None and _is_image(value))
        is_pointwise = node.target not in _KEEPING
        weight = node.args[1] if node.target is aten.convolution.default else None

        def resolve(value: Value) -> Value:
            is_full = not is_pointwise or value.tensor_type.shape == result.tensor_type.shape
            if _is_image(value) and value is not weight and is_full:
                return self._in_channels_last(value, node.origin)
            return self._in_own_layout(value, node.origin)

        outputs = tuple(
            None if value is None else self._twin(value) if _lies_as(value, result) else self._as_it_is(value)
            for value in node.outputs
        )
        self._append(node, resolve, outputs)

    def _keep(self, node: Node) -> None:
        outputs = tuple(None if value is None else self._as_it_is(value) for value in node.outputs)
        self._append(node, lambda value: self._in_own_layout(value, node.origin), outputs)

    def _append(self, node: Node, resolve: Any, outputs: tuple[Value | None, ...]) -> None:
        self.nodes.append(replace(node.with_values(resolve), outputs=outputs))

    def _as_it_is(self, value: Value) -> Value:
        self.plain.add(value)
        return value

    def _twin(self, value: Value) -> Value:
        if is_channels_last(value.tensor_type):
            return self._as_it_is(value)
        return self._add_twin(value)

    def _add_twin(self, value: Value) -> Value:
        twin = self.relaid[value] = Value(f"{value.name}_nhwc", as_channels_last(value.tensor_type))
        if value in self.differentiable:
            self.differentiable.add(twin)
        return twin

    def _in_channels_last(self, value: Value, origin: Origin) -> Value:
        if value in self.relaid or is_channels_last(value.tensor_type):
            return self.relaid.get(value, value)
        twin = self._add_twin(value)
        self.nodes.append(Node(RESTRIDE, (value, twin.tensor_type.strides), {}, (twin,), origin))
        return twin

    def _in_own_layout(self, value: Value, origin: Origin) -> Value:
        if value not in self.plain and value in self.relaid:
            self.plain.add(value)
            self.nodes.append(Node(RESTRIDE, (self.relaid[value], value.tensor_type.strides), {}, (value,), origin))
        return value


def _lies_as(value: Value, result: Value) -> bool:
    """Whether an output has the layout of the main one: pooling's indices do, a mean per channel has none."""
    kind = value.tensor_type
    return len(kind.shape) == 4 and kind.shape == result.tensor_type.shape
