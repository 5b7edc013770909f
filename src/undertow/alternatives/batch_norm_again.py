"""Second runs of batch normalisation from its saved statistics, together with the sum and clamp that follow: EXACT.

In: a normalisation, sum or clamp of a Program. Out: one node that makes its output again in one pass. With it a network
of convolutions, normalisations and ReLUs keeps only the convolutions' outputs. It is offered for float32 on the CPU,
where the kernel has PyTorch's bits. Elsewhere PyTorch's kernel runs again and leaves the running statistics alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from undertow.alternatives.registry import Makers, SecondRun, register_second_run
from undertow.ir import Node, Value
from undertow.ir.pytorch import operation_of
from undertow.ir.schema import bind_arguments
from undertow.kernels.batch_norm_again import has_pytorch_bits, normalise_again
from undertow.memory.lifetimes import is_dense
from undertow.ops.own import functional, register_kernel

aten = torch.ops.aten
_NORMS = (functional(operation_of(aten.native_batch_norm.default)), aten.native_batch_norm.default)

# (x, weight, bias, mean, 1 / standard deviation, residual, lowest, highest) -> y
NORMALISE_AGAIN = register_kernel("batch_norm.again", normalise_again, writes_into=True)


@dataclass(frozen=True)
class _Normalised:
    """How to make a value again: the arguments of `normalise_again` that are known so far."""

    factors: tuple[Any, ...]
    covers: tuple[Node, ...]
    residual: Value | None = None

    def instead_of(self, node: Node, lowest: float = -float("inf"), highest: float = float("inf")) -> SecondRun:
        """One pass that does the work of `node` and of the nodes in `covers`."""
        args = (*self.factors, self.residual, lowest, highest)
        again = replace(node, operation=NORMALISE_AGAIN, args=args, kwargs={}, outputs=node.outputs[:1])
        return SecondRun(again, tuple(item for item in self.covers if item is not node))


def _find_norm(value: Any, makers: Makers) -> _Normalised | None:
    """How `value` is made again if a batch normalisation in training mode made it."""
    maker = makers.get(value) if isinstance(value, Value) else None
    if maker is None or maker.target not in _NORMS or maker.outputs[0] != value or not maker.args[5]:
        return None
    x, weight, bias = maker.args[:3]
    mean, inverse_std = maker.outputs[1:3]
    types = [item.tensor_type for item in (x, weight, bias, value) if item is not None]
    is_plain = all(item.dtype is torch.float32 and item.device.type == "cpu" for item in types)
    has_layout = is_dense(x) and x.tensor_type.strides == value.tensor_type.strides and _has_known_layout(x)
    if mean is None or inverse_std is None or not is_plain or not has_layout or not has_pytorch_bits():
        return None
    return _Normalised((x, weight, bias, mean, inverse_std), (maker,))


def _has_known_layout(x: Value) -> bool:
    """Whether PyTorch has a kernel for exactly this layout: contiguous, or channels_last."""
    shape, strides = x.tensor_type.shape, x.tensor_type.strides
    if 0 in shape:
        return False
    if x.tensor_type.is_contiguous:
        return len(shape) >= 2
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    return len(shape) in (4, 5) and order == [0, *range(2, len(shape)), 1] and 1 not in shape


def _find_sum(value: Any, makers: Makers) -> _Normalised | None:
    """How `value` is made again if it is the sum of a normalisation's output and another value."""
    maker = makers.get(value) if isinstance(value, Value) else None
    if maker is None or maker.target is not aten.add.Tensor or maker.kwargs:
        return None
    for norm, residual in (maker.args, maker.args[::-1]):
        found = _find_norm(norm, makers)
        if found is not None and isinstance(residual, Value) and residual.type == norm.type == value.type:
            return replace(found, covers=(maker, *found.covers), residual=residual)
    return None


def _norms_again(node: Node, makers: Makers) -> Iterator[SecondRun]:
    found = _find_norm(node.outputs[0], makers)
    inner = node.operation.functional_of
    if found is not None:
        yield replace(found.instead_of(node), is_instead=inner is not None)
    elif inner is not None:
        # Without running statistics: a second run must not update them, and in training mode no output depends on them.
        args = (*node.args[:3], None, None, *node.args[5:])
        yield SecondRun(replace(node, operation=inner, args=args, outputs=node.outputs[:3]), is_instead=True)


def _sums_again(node: Node, makers: Makers) -> Iterator[SecondRun]:
    found = _find_sum(node.outputs[0], makers)
    if found is not None:
        yield found.instead_of(node)


def _clamps_again(node: Node, makers: Makers) -> Iterator[SecondRun]:
    bound = bind_arguments(node.target, node.args, node.kwargs)
    lowest, highest = float(bound.get("min_val", 0)), float(bound.get("max_val", "inf"))
    for found in (_find_norm(bound["self"], makers), _find_sum(bound["self"], makers)):
        if found is not None:
            yield found.instead_of(node, lowest, highest)


for _norm in _NORMS:
    register_second_run(_norm, _norms_again)
register_second_run(aten.add.Tensor, _sums_again)
for _clamp in (aten.relu.default, aten.hardtanh.default):
    register_second_run(_clamp, _clamps_again)
