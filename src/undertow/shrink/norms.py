"""Batch normalisation, folded: four vectors of a channel become the two that evaluation needs.

In: a trained model. Out: each norm has mean 0 and variance 1 - epsilon, and scale and shift do what all four did:

    y = (x - mean) / sqrt(variance + epsilon) * weight + bias  =  x * scale + shift

The constant vectors take no room in a file. A folded norm must not learn statistics again: it stays in `eval()` when
the network is trained on. Norms without weight and bias, or without statistics, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from undertow.torch_internals import BatchNormBase


@torch.no_grad()
def fold_norms(model: nn.Module) -> int:
    """Fold every norm that can be; returns how many were."""
    num = 0
    for norm in _norms(model):
        mean, variance = _statistics(norm)
        scale = norm.weight.double() / (variance.double() + norm.eps).sqrt()
        shift = norm.bias.double() - mean.double() * scale
        norm.weight.copy_(scale)
        norm.bias.copy_(shift)
        mean.zero_()
        variance.fill_(1 - norm.eps)
        num += 1
    return num


def folded_norms(model: nn.Module) -> list[nn.Module]:
    """The norms that were folded, told by their statistics."""
    found: list[nn.Module] = []
    for norm in _norms(model):
        mean, variance = _statistics(norm)
        if not bool(mean.any()) and torch.equal(variance, torch.full_like(variance, 1 - norm.eps)):
            found.append(norm)
    return found


def _norms(model: nn.Module) -> Iterator[BatchNormBase]:
    for module in model.modules():
        if isinstance(module, BatchNormBase) and module.weight is not None and module.running_mean is not None:
            yield module


def _statistics(norm: BatchNormBase) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None and norm.running_var is not None
    return norm.running_mean, norm.running_var
