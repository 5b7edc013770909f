"""What one operation costs: arithmetic, memory traffic, energy. In: a node of a Program. Out: its Work.

Flops are the multiplications and additions of matrix products and convolutions, by PyTorch's own formulas
(`torch.utils.flop_counter`), or by the formulas below where PyTorch has none or a wrong one. Every other operation
counts one element operation per element of its largest tensor, read or written. These are counted separately, because
a flop and an element operation differ by orders of magnitude in cost. Views and allocations cost nothing.

Every argument is counted as read from memory once, and every output as written once. Caches that hold a tensor from one
operation to the next are not modelled, so bytes and energy are upper bounds, except for workspace inside kernels, which
is not counted. What runs inside a custom autograd Function is not seen, nor what runs inside the derivative of an
operation that has no rule and needs real tensors: each counts as one elementwise operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from undertow.ir import Node, Operation, TensorType, Value, map_values
from undertow.ir.pytorch import operation_of
from undertow.ir.schema import flatten_outputs, functional_of
from undertow.ops.interpret import without_live
from undertow.torch_internals import FakeTensorMode, OpOverloadPacket, TorchDispatchMode, disable_current_modes

aten = torch.ops.aten

# 32 bits from DRAM in a 45 nm process: Horowitz's figures as tabulated by Han et al., NIPS 2015.
JOULES_PER_DRAM_ACCESS = 640e-12
BYTES_PER_DRAM_ACCESS = 4


@dataclass(frozen=True)
class Work:
    """The cost of some operations."""

    flops: int = 0
    element_operations: int = 0
    moved_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.element_operations + other.element_operations,
            self.moved_bytes + other.moved_bytes,
        )

    @property
    def operations_per_byte(self) -> float:
        """Arithmetic intensity, element operations included."""
        return (self.flops + self.element_operations) / self.moved_bytes if self.moved_bytes else 0.0

    @property
    def dram_joules(self) -> float:
        """Energy of the memory traffic if all of it goes to DRAM."""
        return self.moved_bytes / BYTES_PER_DRAM_ACCESS * JOULES_PER_DRAM_ACCESS

    def to_dict(self) -> dict[str, float]:
        """The numbers by name."""
        return {
            "flops": self.flops,
            "element_operations": self.element_operations,
            "moved_bytes": self.moved_bytes,
            "operations_per_byte": self.operations_per_byte,
            "dram_joules": self.dram_joules,
        }


def total_work(nodes: Iterable[Node]) -> Work:
    """The cost of all `nodes`."""
    return sum((work_of(node) for node in nodes), Work())


def work_of(node: Node) -> Work:
    """The cost of one node."""
    if node.operation.derivative_of is not None:
        work = _work_through_autograd(node)
        if work is not None:
            return work
    tensors = {value: _without_data(value) for value in (*node.inputs, *node.named_outputs)}
    args = map_values(node.args, tensors.__getitem__)
    kwargs = {name: map_values(item, tensors.__getitem__) for name, item in node.kwargs.items()}
    outputs = tuple(None if value is None else tensors[value] for value in node.outputs)
    return _work_of_call(node.operation, args, kwargs, outputs)


def _work_of_call(operation: Operation, args: Any, kwargs: dict[str, Any], outputs: tuple[Any, ...]) -> Work:
    operation = operation.functional_of or operation
    if operation.is_view or operation.is_empty:
        return Work()
    read = _tensors((args, tuple(kwargs.values()))) if operation.reads_elements else []
    written = _tensors(outputs)
    limit = sum(map(_num_bytes, written)) if operation.is_gather else None
    moved = sum(_num_bytes(tensor) if limit is None else min(_num_bytes(tensor), limit) for tensor in read)
    moved += sum(map(_num_bytes, written))
    flops = _count_flops(operation, args, kwargs, outputs)
    if flops is not None:
        return Work(flops=flops, moved_bytes=moved)
    counted = written if operation.is_gather else [*read, *written]
    return Work(element_operations=max((tensor.numel() for tensor in counted), default=0), moved_bytes=moved)


def _count_flops(operation: Operation, args: Any, kwargs: dict[str, Any], outputs: tuple[Any, ...]) -> int | None:
    """By the formula of the operation; None if there is none."""
    if operation.repeats is not None:
        return _count_flops(operation.repeats.functional_of or operation.repeats, args[1:], kwargs, outputs)
    if operation.flops is not None:
        return operation.flops(*args, **kwargs)
    overload = operation.overload
    if overload is None:
        return None
    if operation.writes_over:
        overload = functional_of(overload) or overload
    packet = overload.overloadpacket
    if packet in _FORMULAS:
        return _FORMULAS[packet](*args)
    formula = flop_registry.get(_SAME_AS.get(packet, packet))
    return None if formula is None else formula(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else outputs)


# The cotangents of a convolution's input and of its weight each cost as much as the convolution: every weight is used
# once for every output pixel. PyTorch's formula for the weight ignores groups, and counts that many times too much.
def _convolution_backward(ct: Any, input: Any, weight: Any, *rest: Any) -> int:
    transposed, output_mask = rest[4], rest[7]
    positions = math.prod((input if transposed else ct).shape[2:])
    return 2 * ct.shape[0] * positions * weight.numel() * sum(output_mask[:2])


# A recurrent layer multiplies every weight matrix with every element of the sequence; biases are not matrices.
def _recurrent(input: Any, *rest: Any) -> int:
    matrices = [tensor for tensor in _tensors(rest[:4]) if tensor.dim() == 2]
    return 2 * math.prod(input.shape[:-1]) * sum(matrix.numel() for matrix in matrices)


def _recurrent_backward(input: Any, *rest: Any) -> int:
    return 2 * _recurrent(input, *rest)


_FORMULAS: dict[OpOverloadPacket, Callable[..., int]] = {
    aten.convolution_backward: _convolution_backward,
    aten._cudnn_rnn: _recurrent,
    aten._cudnn_rnn_backward: _recurrent_backward,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    aten.mv: lambda matrix, vector: 2 * matrix.numel(),
    aten.addmv: lambda bias, matrix, vector, *scales: 2 * matrix.numel(),
    aten.dot: lambda left, right: 2 * left.numel(),
}

_SAME_AS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def _work_through_autograd(node: Node) -> Work | None:
    """The work of taking the derivative on tensors without data, the operation's second run included."""
    # Without the generator state, since tensors without data need none.
    args = (*node.args[:-1], None)
    with disable_current_modes(), FakeTensorMode(), _Counter() as counter:
        try:
            node.operation(*without_live(map_values(args, _fake)))
        except Exception:  # the operation needs real tensors
            return None
    return counter.work


class _Counter(TorchDispatchMode):
    """Adds up the work of what runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions about a tensor
            self.work += _work_of_call(operation_of(func), args, kwargs or {}, tuple(flatten_outputs(result)))
        return result


def _without_data(value: Value) -> Any:
    """A meta tensor of the value's type; None for what is no tensor."""
    kind = value.type
    if not isinstance(kind, TensorType):
        return None
    return torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device="meta")


def _fake(value: Value) -> torch.Tensor:
    kind = value.tensor_type
    return torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device)


def _tensors(arguments: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, each once."""
    found: dict[int, torch.Tensor] = {}

    def collect(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            found[id(item)] = item
        elif isinstance(item, tuple | list):
            for part in item:
                collect(part)

    collect(arguments)
    return list(found.values())


def _num_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor that an operation touches: without gaps between strides, expanded elements once."""
    span = TensorType.of(tensor).num_bytes
    return min(span, tensor.numel() * tensor.element_size())
