"""Weights of a few bits from float weights: integers or signs, and a scale for each output channel.

In: a weight, its first dimension the output channels. Out: a CodedTensor, whose codebook holds the integers. The
integers are symmetric, since products with an offset need a second sum. The scale of 8 bits is the greatest magnitude
over 127; with 4 bits a few large weights would leave few steps for the others, so of several shares of the greatest
magnitude the one of least squared error is taken, for each channel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from undertow.coding.tensors import CodedTensor
from undertow.errors import CallError
from undertow.small.binary_layers import BinaryConv2d, BinaryLinear, filter_scales

# The share of the greatest magnitude that becomes the greatest integer. Beyond 8 bits only 1 is ever best.
_SHARES = tuple(share / 20 for share in range(20, 7, -1))


def code_integers(weight: Tensor, num_bits: int) -> CodedTensor:
    """The weight as integers of `num_bits`, from 2 to 8, and a scale for each output channel."""
    if not 2 <= num_bits <= 8:
        raise CallError(f"code_integers: num_bits is from 2 to 8; found {num_bits}")
    weight = _checked(weight, "code_integers")
    most = 2 ** (num_bits - 1) - 1
    rows = weight.reshape(len(weight), -1)
    largest = rows.abs().amax(1, keepdim=True)
    best_scales, best_errors = largest / most, torch.full_like(largest, torch.inf)
    for share in _SHARES if num_bits < 8 else _SHARES[:1]:
        scales = (largest * share / most).where(largest > 0, torch.ones_like(largest))
        errors = (_rounded(rows, scales, most) * scales - rows).square().sum(1, keepdim=True)
        is_better = errors < best_errors
        best_scales, best_errors = scales.where(is_better, best_scales), errors.where(is_better, best_errors)
    codes = (_rounded(rows, best_scales, most) + most).to(torch.int32).reshape(-1)
    codebook = torch.arange(-most, most + 1).to(weight.dtype)
    return CodedTensor(tuple(weight.shape), None, codes, codebook, best_scales.reshape(-1))


def code_signs(weight: Tensor) -> CodedTensor:
    """The weight of a binary layer: signs, and alpha for each filter."""
    weight = _checked(weight, "code_signs")
    codes = (weight >= 0).to(torch.int32).reshape(-1)
    return CodedTensor(
        tuple(weight.shape), None, codes, torch.tensor([-1, 1], dtype=weight.dtype), filter_scales(weight)
    )


def code_model(model: nn.Module, num_bits: int | None = None) -> dict[str, Tensor | CodedTensor]:
    """The state of a model for a small file: signs for binary layers; integers of `num_bits` for others' weights.

    Others are `nn.Linear` and `nn.Conv2d`. Without `num_bits` their weights stay as they are, and so does all else.
    """
    tensors: dict[str, Tensor | CodedTensor] = dict(model.state_dict())
    coded: dict[int, CodedTensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        key = f"{name}.weight" if name else "weight"
        if isinstance(module, BinaryLinear | BinaryConv2d):
            tensors[key] = coded.setdefault(id(module.weight), code_signs(module.weight))
        elif num_bits is not None and type(module) in (nn.Linear, nn.Conv2d) and module.weight.numel():
            tensors[key] = coded.setdefault(id(module.weight), code_integers(module.weight, num_bits))
    return tensors


def _checked(weight: Tensor, where: str) -> Tensor:
    if not weight.ndim or not weight.is_floating_point() or weight.numel() == 0:
        raise CallError(f"{where}: a weight has rows of floats; found {tuple(weight.shape)} of {weight.dtype}")
    if not weight.isfinite().all():
        raise CallError(f"{where}: the weight holds infinities or NaN")
    return weight.detach()


def _rounded(rows: Tensor, scales: Tensor, most: int) -> Tensor:
    return (rows / scales).round().clamp(-most, most)
