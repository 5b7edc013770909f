"""Writing through a view: the new value of the whole storage when a part of it is assigned.

In: the storage's value, the chain of view operations that leads to the part, the part's new value. Out: the storage's
new value. Each view has an inverse: a scatter where it shows a part, the opposite view where it changes only the shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from undertow.ir import Value
from undertow.ir.operation import Operation, operation_maker
from undertow.ir.pytorch import operation_of
from undertow.ops.own import REPLACE_VALUE
from undertow.torch_internals import OpOverload

if TYPE_CHECKING:
    from undertow.record.tracing import Recorder

aten = torch.ops.aten
Pair = tuple[Value, Tensor]


@dataclass(frozen=True)
class ViewStep:
    """One view operation: its target, the arguments after the tensor, and which of its outputs is meant."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output_index: int

    def as_data(self) -> Step:
        """The step as a parameter of `take_part`."""
        return operation_of(self.target), self.args, tuple(self.kwargs.items()), self.output_index

    @property
    def is_part(self) -> bool:
        """Whether the view may show less than the whole; otherwise it only moves dimensions."""
        return self.target in _SCATTERS or self.target in _MULTIPLE or self.target is aten.detach.default


# A view operation, the arguments after the tensor, the named ones, and which of its outputs is meant.
Step = tuple[Operation, tuple[Any, ...], tuple[tuple[str, Any], ...], int]


@operation_maker
def take_part(*steps: Step) -> Operation:
    """The part of a storage that an operation is about to overwrite, and the storage as the rest.

    Both are outputs of one node. Its derivative writes the part's cotangent into the rest's, as eager does. With two
    nodes it would be the sum of two cotangents, each zero where the other is not, and -0.0 + 0.0 is 0.0.
    """
    return Operation(
        f"take_part[{', '.join(step[0].name for step in steps)}]",
        lambda storage: (_part_of(steps, storage), storage),
        returns_tuple=True,
        shares=0,
        is_view=True,
        costs_nothing=True,
        gradient=partial(_ct_of_storage, steps),
    )


def _ct_of_storage(steps: tuple[Step, ...], args: Any, ct_part: Tensor | None, ct_rest: Tensor | None) -> tuple[Any]:
    if ct_part is None:
        return (ct_rest,)
    kind = args[0].tensor_type
    whole = aten.new_empty_strided.default(ct_part, kind.shape, kind.strides)
    if ct_rest is None:
        whole.zero_()
    else:
        whole.copy_(ct_rest)
    _part_of(steps, whole).copy_(ct_part)
    return (whole,)


def _part_of(steps: tuple[Step, ...], storage: Tensor) -> Tensor:
    for view, args, kwargs, output_index in steps:
        found = view(storage, *args, **dict(kwargs))
        storage = found[output_index] if isinstance(found, tuple | list) else found
    return storage


def write_through(
    recorder: Recorder,
    value: Value,
    fake: torch.Tensor,
    steps: tuple[ViewStep, ...],
    new_value: Value,
    new_fake: torch.Tensor,
) -> Pair:
    """The storage's value after `new_value` was written into the part that `steps` lead to."""
    if not steps:
        return new_value, new_fake
    step, rest = steps[0], steps[1:]
    part_value, part_fake = recorder.emit_view(step, value, fake) if rest else (value, fake)
    new_part = write_through(recorder, part_value, part_fake, rest, new_value, new_fake)
    return _invert(recorder, step, (value, fake), new_part)


def _invert(recorder: Recorder, step: ViewStep, whole: Pair, part: Pair) -> Pair:
    target, args = step.target, step.args
    if target in _SCATTERS:
        return recorder.call(_SCATTERS[target], whole, part, *args, *step.kwargs.values())
    if target in (aten.split.Tensor, aten.split_with_sizes.default):
        dim = args[1] if len(args) > 1 else 0
        sizes = [args[0]] * (step.output_index + 1) if isinstance(args[0], int) else args[0]
        start = sum(sizes[: step.output_index])
        return recorder.call(aten.slice_scatter.default, whole, part, dim, start, start + part[1].shape[dim])
    if target is aten.unbind.int:
        return recorder.call(aten.select_scatter.default, whole, part, args[0] if args else 0, step.output_index)
    if target is aten.detach.default:
        # A write through a detached tensor does not enter the history of the tensor that it was detached from.
        return recorder.call(REPLACE_VALUE, whole, part) if recorder.requires_grad(whole[0]) else part
    if target in (aten.transpose.int, aten.t.default, aten.alias.default, aten.lift_fresh.default):
        return recorder.call(target, part, *args)
    if target is aten.permute.default:
        order = [dim % whole[1].dim() for dim in args[0]]
        return recorder.call(target, part, tuple(order.index(dim) for dim in range(len(order))))
    if target in _RESHAPES:
        return _reshape(recorder, part, tuple(whole[1].shape))
    if whole[1].dtype == part[1].dtype:
        return _scatter_by_strides(recorder, step, whole, part)
    return recorder.refuse(f"writing through the view {operation_of(target)}", "write to a tensor of its own")


def _scatter_by_strides(recorder: Recorder, step: ViewStep, whole: Pair, part: Pair) -> Pair:
    """The inverse of any view without an inverse of its own, such as unfold."""
    with recorder.on_fakes():
        view = step.target(whole[1], *step.args, **step.kwargs)
    offset = view.storage_offset() - whole[1].storage_offset()
    layout = (tuple(view.shape), tuple(view.stride()), offset)
    return recorder.call(aten.as_strided_scatter.default, whole, part, *layout)


def _reshape(recorder: Recorder, part: Pair, shape: tuple[int, ...]) -> Pair:
    if not part[1].is_contiguous():
        part = recorder.call(aten.clone.default, part, memory_format=torch.contiguous_format)
    return recorder.call(aten._unsafe_view.default, part, shape)


_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
_MULTIPLE = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}
