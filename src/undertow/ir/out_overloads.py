"""How PyTorch's operations are told where to write.

In: an overload. Out: how it is called with tensors that take its outputs; None where it allocates for itself.

PyTorch's code generator makes some of the `.out` overloads. These compute into new memory and copy the result to the
tensor they are given; they are registered for every device at once. The others really write there, and are registered
for the CPU. Only overloads that tests compare with the plain call, bit for bit, are used: those of operations with a
rule, and of what autograd calls for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from undertow.ir.operation import Destination
from undertow.torch_internals import OpOverload, has_kernel_for_key

aten = torch.ops.aten

# These expect room for the losses before they are summed, and resize a tensor without it; `binary_cross_entropy`
# returns something wrong instead (torch 2.13).
_WRONG_OVERLOADS = {aten.binary_cross_entropy.default, aten.huber_loss.default}

_COMPARED: set[OpOverload] = set()


def mark_compared(overload: OpOverload) -> None:
    """Say that the tests compare both ways of calling `overload`."""
    _COMPARED.add(overload)


def destination_of_overload(overload: OpOverload) -> Destination | None:
    """How `overload` is told where to write; None where it cannot be."""
    if overload.namespace != "aten" or overload in _WRONG_OVERLOADS:
        return None
    if overload in _WRITTEN_HERE:
        return Destination(_WRITTEN_HERE[overload], names=("out",))
    found = find_out_overload(overload)
    if found is None or (overload not in _COMPARED and "_backward" not in overload._schema.name):
        return None
    return Destination(found._op, tuple(out_names(found)))


@cache
def find_out_overload(target: OpOverload) -> OpOverload | None:
    """The overload that really writes the results of `target` where it is told."""
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    packet = target.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        written = out_names(candidate)
        given = [(item.name, str(item.type)) for item in candidate._schema.arguments if item.name not in written]
        if len(written) == len(target._schema.returns) and given == wanted and _is_for_cpu(candidate):
            return candidate
    return None


def out_names(overload: OpOverload) -> list[str]:
    """The arguments into which an `.out` overload writes."""
    return [item.name for item in overload._schema.arguments if item.is_out]


def _is_for_cpu(overload: OpOverload) -> bool:
    return has_kernel_for_key(overload.name(), "CPU")


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


# The generated overloads of these compute and then copy. Here the same kernels write where they are told.
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
