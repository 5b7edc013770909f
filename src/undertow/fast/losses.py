"""Softmax cross entropy over rows of logits as one operation. One number per row is kept, not the softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.kernels.cross_entropy import cross_entropy_backward, cross_entropy_forward
from undertow.kernels.outputs import Out, given
from undertow.ops.own import register_kernel


def _forward(logits: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> tuple[Tensor, Tensor]:
    loss, logsumexp = logits.new_empty(()), logits.new_empty(len(logits))
    cross_entropy_forward(logits, targets, ignore_index, reduction, loss, logsumexp)
    return loss, logsumexp


def _backward(
    ct: Tensor,
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    logsumexp: Tensor,
    out: Out = None,
) -> Tensor:
    ct_logits = given(out, 0, lambda: torch.empty_like(logits))
    cross_entropy_backward(float(ct), logits, targets, ignore_index, reduction, logsumexp, ct_logits)
    return ct_logits


# (logits, targets, ignore_index, "mean" or "sum") -> loss, logsumexp of each row
CROSS_ENTROPY = register_kernel("cross_entropy.fused", _forward, returns_tuple=True)

# (ct, logits, targets, ignore_index, "mean" or "sum", logsumexp) -> ct_logits
CROSS_ENTROPY_BACKWARD = register_kernel("cross_entropy_backward.fused", _backward, writes_into=True)
