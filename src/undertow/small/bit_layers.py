"""Binary layers at work: packed signs of weights and inputs, with the bits of the layer that was trained.

In: a `BinaryLinear` or `BinaryConv2d` with binary inputs, and its weight as signs with a scale per filter. Out: the
same output, bit for bit: sums of signs are integers, exact in float32 below 2^24 terms, and what scales them is
computed and applied in the same order. Images come out in the layout in which the trained layer gives them: the next
layer's K is a sum over channels, whose order follows the layout. See `kernels.bit_product`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from undertow.coding.tensors import CodedTensor
from undertow.kernels.bit_product import PackedSigns, convolve_signs, pack_filters, unpack_filters
from undertow.small.binary_layers import BinaryConv2d, BinaryLinear, row_means, window_means
from undertow.small.layers import SmallLayer, row_scales

MAX_TERMS = 1 << 24


class BitLayer(SmallLayer):
    """A layer of signs by signs."""

    form = "bits"

    def __init__(self, layer: BinaryLinear | BinaryConv2d, tensor: CodedTensor) -> None:
        super().__init__(layer, tensor.shape)
        filters = pack_filters((tensor.codebook[tensor.codes] > 0).reshape(tensor.shape))
        self.register_buffer("words", filters.words)
        self.register_buffer("corrections", filters.corrections)
        self.register_buffer("scales", row_scales(tensor).contiguous())
        self.makes_channels_last = isinstance(layer, BinaryConv2d) and _makes_channels_last(layer)

    @property
    def filters(self) -> PackedSigns:
        """The signs."""
        kernel = (1, 1) if self.window is None else self.window.kernel
        words, corrections = self.get_buffer("words"), self.get_buffer("corrections")
        return PackedSigns(words, corrections, self.shape[0], self.shape[1], kernel)

    @property
    def weight_bytes(self) -> int:
        return sum(self.get_buffer(name).nbytes for name in ("words", "corrections", "scales"))

    @property
    def weight(self) -> Tensor:
        signs = unpack_filters(self.filters).reshape(self.shape[0], -1).to(torch.float32) * 2 - 1
        return (signs * self.get_buffer("scales")[:, None]).reshape(self.shape)

    def multiply(self, x: Tensor) -> Tensor:
        """See `SmallLayer`."""
        scales = self.get_buffer("scales")
        if self.window is not None:
            kernel, stride, pad, _, _ = self.window
            means = window_means(x, kernel, stride, pad)
            out = convolve_signs(x, self.filters, means, scales, self.bias, stride, pad)
            return out if self.makes_channels_last or _has_channels_last(x) else out.contiguous()
        # A product is a convolution of 1 x 1 over an image of one row, whose pixels are the rows of x.
        image = x.t()[None, :, None, :]
        out = convolve_signs(image, self.filters, row_means(x), scales, self.bias, (1, 1), (0, 0))
        return out[0, :, 0].t()


def _makes_channels_last(layer: BinaryConv2d) -> bool:
    """Whether the layout of its weight makes PyTorch give channels_last images for others."""
    height, width = layer.kernel_size
    probe = torch.zeros(2, layer.in_channels, height + 1, width + 1)
    return not functional.conv2d(probe, layer.weight.detach()).is_contiguous()


def _has_channels_last(x: Tensor) -> bool:
    """Whether channels are innermost, also in a part of an image."""
    dense = torch.empty_like(x, device="meta")
    return dense.is_contiguous(memory_format=torch.channels_last) and not dense.is_contiguous()


def fits(tensor: CodedTensor) -> bool:
    """Whether the tensor holds signs and scales as `code_signs` makes them, few enough per filter for exact sums."""
    is_binary = tensor.mask is None and set(tensor.codebook.tolist()) <= {-1.0, 1.0}
    has_scales = tensor.scales is None or bool((tensor.scales >= 0).all())
    return is_binary and has_scales and math.prod(tensor.shape[1:]) < MAX_TERMS
