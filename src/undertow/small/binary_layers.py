"""Layers whose weights are single bits, and whose inputs are too, for training and for evaluation in floats.

In: float inputs; weights are real numbers, which training moves. Out: what a layer gives whose weights are alpha
sign(W), alpha the mean of |W| of each filter, and whose inputs are K sign(X), K the mean of |X| under the filter
(Rastegari, Ordonez, Redmon & Farhadi, "XNOR-Net", ECCV 2016). Signs are multiplied first, and their sums, which are
integers, are scaled afterwards: so `BitLayer` gives the same bits from packed weights. Zeros that pad an image stay 0.

The derivative of sign(x) is taken to be 1 where |x| <= 1 and 0 elsewhere (straight through); that of alpha and of K is
the real one, while the paper takes alpha's part for the weight itself alone. Everything is made of operations that
have rules, so a planned step derives the backward pass. Not done: groups, dilation; clipping weights to [-1, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from undertow.errors import CallError

Pair = int | tuple[int, ...]


def straight_signs(x: Tensor) -> Tensor:
    """1 where x >= 0, else -1, with the derivative of a hardtanh. A NaN stays one."""
    inside = functional.hardtanh(x)
    # inside - inside is 0 exactly.
    return inside - inside.detach() + ((x.detach() >= 0).to(x.dtype) * 2 - 1)


def filter_scales(weight: Tensor) -> Tensor:
    """The mean of |W| of each filter, added in float64: of weights that all are alpha or -alpha it is alpha exactly."""
    return weight.abs().flatten(1).mean(1, dtype=torch.float64).to(weight.dtype)


def row_means(x: Tensor) -> Tensor:
    """K of a product: the mean of |x| of each row."""
    return x.abs().mean(-1, keepdim=True)


def window_means(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """K of a convolution: the mean of |x| under the filter at each of its places, over all channels."""
    return functional.avg_pool2d(x.abs().mean(-3, keepdim=True), kernel, stride, padding)


class BinaryLinear(nn.Linear):
    """`nn.Linear` with weights of one bit, and by default inputs of one bit."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, binary_inputs: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.binary_inputs = binary_inputs

    def forward(self, input: Tensor) -> Tensor:
        """((signs of x . signs of W) * K) * alpha + bias; without K where inputs are real numbers."""
        scales = filter_scales(self.weight)
        if self.binary_inputs:
            sums = functional.linear(straight_signs(input), straight_signs(self.weight)) * row_means(input)
        else:
            sums = functional.linear(input, straight_signs(self.weight))
        sums = sums * scales
        return sums if self.bias is None else sums + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, binary_inputs={self.binary_inputs}"


class BinaryConv2d(nn.Conv2d):
    """`nn.Conv2d` with weights of one bit, and by default inputs of one bit."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
        binary_inputs: bool = True,
    ) -> None:
        if isinstance(padding, str):
            raise CallError(f"BinaryConv2d: padding is a number of pixels, or two; found {padding!r}")
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=bias)
        self.padding: tuple[int, int]  # here it is no name
        self.binary_inputs = binary_inputs

    def forward(self, input: Tensor) -> Tensor:
        """((signs of x * signs of W) * K) * alpha + bias; without K where inputs are real numbers."""
        scales = filter_scales(self.weight)[:, None, None]
        x = straight_signs(input) if self.binary_inputs else input
        sums = functional.conv2d(x, straight_signs(self.weight), None, self.stride, self.padding)
        if self.binary_inputs:
            sums = sums * window_means(input, self.kernel_size, self.stride, self.padding)
        sums = sums * scales
        return sums if self.bias is None else sums + self.bias[:, None, None]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, binary_inputs={self.binary_inputs}"
