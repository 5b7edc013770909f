"""Operations that write their results where they are told, so that a plan can say at which byte a value lies.

In: an operation. Out: how it is called with tensors that take its outputs; None where it allocates for itself. And the
values of a Program that may lie where a plan says.

Of PyTorch's `.out` overloads, those made by its code generator compute beside the tensor they are given and copy; they
are registered for every device at once, and the others, which really write there, for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from undertow.ir import Node, Program, Value
from undertow.ops.lifetimes import Lifetimes, is_dense, shared_argument
from undertow.ops.onednn import OnReordered
from undertow.ops.own import Mutating, OwnOperation, Replayed, call_bound
from undertow.ops.registry import bind_arguments, find_op
from undertow.ops.schema import schema_of
from undertow.ops.updates import UpdateParameter
from undertow.ops.views import TakePart

aten = torch.ops.aten

# These expect room for the losses before they are summed up, and resize what they are given; that of
# `binary_cross_entropy` else returns something wrong (torch 2.13).
_WRONG_OVERLOADS = {aten.binary_cross_entropy.default, aten.huber_loss.default}

# Smaller values stay with the allocator, which is quicker for them than passing one more argument.
FEWEST_BYTES = 1 << 16

# Operations that hold on to none of their arguments when they return. Custom Functions may, and a gradient that is
# handed over is the user's.
_LETTING_GO = (OwnOperation, OnReordered, Mutating, Replayed, TakePart, UpdateParameter)


@dataclass(frozen=True, eq=False)
class Destination:
    """`call(*args, **kwargs, name=tensor)` writes each output into the tensor given by its name.

    Without names all are given as `out`, in a tuple, in which None stands for an output that nobody reads.
    """

    call: Callable[..., Any]
    names: tuple[str, ...] | None = None


def destination_of(target: Any) -> Destination | None:
    """How `target` is told where to write; None where it cannot be."""
    if isinstance(target, OwnOperation):
        return Destination(target.run) if target.writes_into else None
    if isinstance(target, Replayed):
        inside = destination_of(target.target)
        return None if inside is None else Destination(partial(_run_replayed, target, inside))
    if isinstance(target, Mutating):
        inner = target.target
        # Some give the tensor another shape instead of other elements.
        is_known = torch.Tag.inplace_view not in inner.tags and (
            schema_of(inner).is_inplace or _out_overload(inner) is not None
        )
        return Destination(partial(_run_mutating, inner)) if is_known else None
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target in _WRONG_OVERLOADS:
        return None
    if target in _WRITTEN_HERE:
        return Destination(_WRITTEN_HERE[target], names=("out",))
    overload = _out_overload(target)
    if overload is None or not _is_compared(target):
        return None
    return Destination(overload._op, tuple(_out_names(overload)))


def _is_compared(target: OpOverload) -> bool:
    """Whether tests hold both ways of calling against each other: for the registry, and what autograd calls for it."""
    return find_op(target) is not None or "_backward" in target._schema.name


def _run_replayed(
    target: Replayed, inside: Destination, *args: Any, out: Sequence[Tensor], **kwargs: Any
) -> tuple[Tensor, ...]:
    kwargs |= {"out": out} if inside.names is None else dict(zip(inside.names, out, strict=True))
    replace(target, target=inside.call)(*args, **kwargs)
    return tuple(out)


def _run_mutating(target: OpOverload, *args: Any, out: Sequence[Tensor], **kwargs: Any) -> tuple[Tensor, ...]:
    """A mutating operation made functional: the arguments it mutates are copied to the end of `out` first."""
    bound = bind_arguments(target, args, kwargs)
    mutated = [name for name in schema_of(target).mutated if bound[name] is not None]
    num_fresh = len(out) - len(mutated)
    for name, tensor in zip(mutated, out[num_fresh:], strict=True):
        bound[name] = tensor.copy_(bound[name])
    overload = _out_overload(target)
    if num_fresh and overload is not None:
        call_bound(overload, bound | dict(zip(_out_names(overload), out, strict=False)))
    else:
        call_bound(target, bound)
    return tuple(out)


@cache
def _out_overload(target: OpOverload) -> OpOverload | None:
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    packet = target.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        written = _out_names(candidate)
        given = [(item.name, str(item.type)) for item in candidate._schema.arguments if item.name not in written]
        if len(written) == len(target._schema.returns) and given == wanted and _is_for_cpu(candidate):
            return candidate
    return None


def _out_names(overload: OpOverload) -> list[str]:
    return [item.name for item in overload._schema.arguments if item.is_out]


def _is_for_cpu(overload: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CPU")


def _copy(x: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    return out.copy_(x)


def _relu(x: Tensor, *, out: Tensor) -> Tensor:
    return aten.clamp_min.out(x, 0, out=out)


def _embedding(weight: Tensor, indices: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    aten.index_select.out(weight, 0, indices.reshape(-1), out=out.view(-1, weight.shape[1]))
    return out


def _masked_fill(x: Tensor, mask: Tensor, value: Any, *, out: Tensor) -> Tensor:
    return out.copy_(x).masked_fill_(mask, value)


def _stack(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor) -> Tensor:
    return aten.cat.out([tensor.unsqueeze(dim) for tensor in tensors], dim, out=out)


# What the generated overloads of these compute and then copy, by the same kernels.
_WRITTEN_HERE: dict[OpOverload, Callable[..., Tensor]] = {
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.relu.default: _relu,
    aten.embedding.default: _embedding,
    aten.masked_fill.Scalar: _masked_fill,
    aten.stack.default: _stack,
    aten.mul.Scalar: aten.mul.out,
    aten.div.Scalar: aten.div.out,
    aten.empty_like.default: lambda x, *, out, **kwargs: out,
    aten.zeros_like.default: lambda x, *, out, **kwargs: out.zero_(),
    aten.ones_like.default: lambda x, *, out, **kwargs: out.fill_(1),
    aten.full_like.default: lambda x, value, *, out, **kwargs: out.fill_(value),
    aten.new_zeros.default: lambda x, size, *, out, **kwargs: out.zero_(),
    aten.zeros.default: lambda size, *, out, **kwargs: out.zero_(),
    aten.full.default: lambda size, value, *, out, **kwargs: out.fill_(value),
}


def find_movable(program: Program, lifetimes: Lifetimes) -> set[Value]:
    """The roots that a plan may place: made and gone within one call, by operations that write where they are told."""
    if program.cotangents:  # between the two passes anything may run, another forward pass among them
        return set()
    kept = {
        lifetimes.root[value]
        for node in program.nodes
        if not _lets_go(node.target)
        for value in lifetimes.read_by(node)
    }
    return {
        root
        for node in program.nodes
        if _can_be_told(node)
        for root in node.kept_outputs
        if root in lifetimes.born
        and lifetimes.last_use[root] < len(program.nodes)
        and root not in kept
        and _is_placeable(root)
    }


def _can_be_told(node: Node) -> bool:
    destination = destination_of(node.target)
    if isinstance(node.target, OwnOperation):
        return destination is not None
    # An overload with names takes all outputs; a copy needs the type of what is copied.
    if destination is None or None in node.outputs:
        return False
    # Batch normalisation of low precision keeps its statistics in another one than fake tensors say.
    is_batch_norm = isinstance(node.target, Mutating) and not schema_of(node.target.target).is_inplace
    low = (torch.bfloat16, torch.float16)
    return not is_batch_norm or not any(value.tensor_type.dtype in low for value in node.inputs)


def _lets_go(target: Any) -> bool:
    return isinstance(target, _LETTING_GO) or (
        isinstance(target, OpOverload) and target.namespace in ("aten", "mkldnn")
    )


def _is_placeable(value: Value) -> bool:
    if not is_dense(value):
        return False
    kind = value.tensor_type
    return kind.device.type == "cpu" and not kind.dtype.is_complex and kind.num_bytes >= FEWEST_BYTES


def assumed_workspace(node: Node) -> int:
    """What a kernel takes for itself, where nobody has measured it: oneDNN copies what it reads and what it makes."""
    if isinstance(node.target, UpdateParameter) or shared_argument(node.target, node.inputs) is not None:
        return 0
    if isinstance(node.target, OpOverload | Mutating) and destination_of(node.target) is not None:
        return 0
    return sum(value.type.num_bytes for value in (*node.inputs, *node.kept_outputs))
