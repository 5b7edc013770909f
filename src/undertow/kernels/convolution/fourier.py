"""Convolution through the Fourier transform, for large kernels (Mathieu, Henaff, LeCun, ICLR 2014).

In and out: see algorithm.py. With x^ and w^ the transforms of the padded image and of the kernel on the same grid, per
frequency and summed over channels (or images),

    y^ = x^ conj(w^)        ct_x^ = ct^ w^        ct_w^ = x^ conj(ct^)

The work per pixel does not depend on the kernel's size. The grid is the padded image rounded up to factors 2, 3, 5. The
kernels' transforms are as large as images and fill most of the workspace. PyTorch's FFT also takes scratch memory of
its own. Not done: tiling of the image, strides, dilation, groups.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from undertow.kernels.convolution.algorithm import (
    UNIT_ROUNDOFF,
    Algorithm,
    Pass,
    Workspace,
    accumulated_error,
    align,
)
from undertow.kernels.convolution.epilogue import finish_output, mask_cotangent
from undertow.kernels.convolution.shape import ConvolutionShape, Pair

# Relative error of a transform in the 2-norm, per factor of two: u + sqrt(2) gamma_4 for radix 2 with rounded roots of
# unity (Higham 2002, theorem 24.2), assumed for the library's other radices too.
_ERROR_PER_LEVEL = 7 * UNIT_ROUNDOFF


def _smooth(size: int) -> int:
    """The next number with no prime factor above 5."""
    while True:
        rest = size
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return size
        size += 1


def _grid(shape: ConvolutionShape) -> Pair:
    """One size for all passes: the padded image, so that nothing wraps around."""
    height, width = (_smooth(size + 2 * pad) for size, pad in zip(shape.in_size, shape.padding, strict=True))
    return height, width


@final
class Fourier(Algorithm):
    """Products per frequency of whole images."""

    name = "fft"

    def refusal(self, shape: ConvolutionShape) -> str | None:
        if shape.stride != (1, 1):
            return f"the stride is {shape.stride}, not 1"
        if shape.dilation != (1, 1):
            return f"the dilation is {shape.dilation}, not 1"
        if shape.groups != 1:
            return f"the channels are in {shape.groups} groups, not in one"
        return None

    def _planes(self, shape: ConvolutionShape) -> tuple[int, int, int]:
        """How many images x, y and w have."""
        return (
            shape.batch * shape.in_channels, shape.batch * shape.out_channels, shape.in_channels * shape.out_channels,
        )  # fmt: skip

    def workspace_bytes(self, shape: ConvolutionShape, step: Pass) -> int:
        height, width = _grid(shape)
        planes = self._planes(shape)
        spatial, spectral = 4 * height * width, 8 * height * (width // 2 + 1)
        num_bytes = 64 + align(max(planes) * spatial) + sum(align(count * spectral) for count in planes)
        return (
            num_bytes
            + align(4 * torch.get_num_threads() * shape.out_channels)
            + align(0 if step is Pass.FORWARD else 4 * torch.Size(shape.out_shape).numel())
        )

    # The 2-norm of the error of one channel's result is at most (3 e + gamma) sqrt(L) |p|_2 |q|_2: e the error of each
    # of three transforms, gamma the error of the products per frequency, L the points of the grid. The 2-norms are at
    # most the root of the number of elements times the largest; the largest error is at most the 2-norm.
    def error_bound(self, shape: ConvolutionShape, step: Pass) -> float:
        num_points = math.prod(_grid(shape))
        num_in, num_out = math.prod(shape.in_size), math.prod(shape.out_size)
        terms, elements = {
            Pass.FORWARD: (shape.in_channels, num_in * shape.num_taps),
            Pass.BACKWARD_DATA: (shape.out_channels, num_out * shape.num_taps),
            Pass.BACKWARD_WEIGHT: (shape.batch, num_in * num_out),
        }[step]
        transform = _ERROR_PER_LEVEL * max(1.0, math.log2(num_points))
        return terms * (3 * transform + accumulated_error(2 * terms + 4)) * math.sqrt(num_points * elements)

    def forward(
        self, shape: ConvolutionShape, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, has_relu: bool = False, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        pieces = _Pieces(shape, workspace)
        inputs, weights = pieces.transform(x, shape.padding), pieces.transform(weight, (0, 0))
        outputs = pieces.take(shape.batch, shape.out_channels)
        # [f][n, c] [f][c, o] -> [f][n, o]
        torch.bmm(_by_frequency(inputs), _by_frequency(weights.conj_physical_()).mT, out=_by_frequency(outputs))
        pieces.transform_back(outputs, out, (0, 0))
        finish_output(out, bias, has_relu, mask)

    def backward_data(
        self, shape: ConvolutionShape, ct: Tensor, weight: Tensor, ct_x: Tensor, workspace: Tensor, *,
        mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        pieces = _Pieces(shape, workspace)
        cotangents = pieces.transform(pieces.masked(ct, mask, None), (0, 0))
        weights, inputs = pieces.transform(weight, (0, 0)), pieces.take(shape.batch, shape.in_channels)
        # [f][n, o] [f][o, c] -> [f][n, c]
        torch.bmm(_by_frequency(cotangents), _by_frequency(weights), out=_by_frequency(inputs))
        pieces.transform_back(inputs, ct_x, shape.padding)

    def backward_weight(
        self, shape: ConvolutionShape, ct: Tensor, x: Tensor, ct_weight: Tensor, workspace: Tensor, *,
        ct_bias: Tensor | None = None, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        pieces = _Pieces(shape, workspace)
        cotangents = pieces.transform(pieces.masked(ct, mask, ct_bias), (0, 0)).conj_physical_()
        inputs, weights = pieces.transform(x, shape.padding), pieces.take(shape.out_channels, shape.in_channels)
        # [f][o, n] [f][n, c] -> [f][o, c]
        torch.bmm(_by_frequency(cotangents).mT, _by_frequency(inputs), out=_by_frequency(weights))
        pieces.transform_back(weights, ct_weight, (0, 0))


def _by_frequency(spectra: Tensor) -> Tensor:
    """[height, width, a, b] as [frequency, a, b]."""
    return spectra.flatten(0, 1)


class _Pieces:
    """The workspace of one pass: one real grid for all transforms, and the spectra, frequencies outermost."""

    def __init__(self, shape: ConvolutionShape, workspace: Tensor) -> None:
        self.pieces, self.grid = Workspace(workspace), _grid(shape)
        counts = Fourier()._planes(shape)
        self.plane = self.pieces.take_floats(max(counts) * self.grid[0] * self.grid[1])
        self.sums = self.pieces.take_floats(torch.get_num_threads(), shape.out_channels)

    def take(self, *counts: int) -> Tensor:
        height, width = self.grid[0], self.grid[1] // 2 + 1
        spectra = self.pieces.take(8 * height * width * counts[0] * counts[1]).view(torch.complex64)
        return spectra.view(height, width, *counts)

    def masked(self, ct: Tensor, mask: Tensor | None, ct_bias: Tensor | None) -> Tensor:
        if mask is None and ct_bias is None:
            return ct
        masked = None if mask is None else self.pieces.take_floats(ct.numel()).as_strided(ct.shape, ct.stride())
        mask_cotangent(ct, mask, masked, ct_bias, self.sums)
        return ct if masked is None else masked

    def _spatial(self, *counts: int) -> Tensor:
        num = self.grid[0] * self.grid[1] * counts[0] * counts[1]
        return self.plane[:num].view(*counts, *self.grid)

    def transform(self, images: Tensor, offset: Pair) -> Tensor:
        spatial = self._spatial(*images.shape[:2]).zero_()
        (y, x), (height, width) = offset, images.shape[2:]
        spatial[:, :, y : y + height, x : x + width].copy_(images)
        spectra = self.take(*images.shape[:2])
        return spectra.copy_(torch.fft.rfft2(spatial).permute(2, 3, 0, 1))

    def transform_back(self, spectra: Tensor, out: Tensor, offset: Pair) -> None:
        spatial = torch.fft.irfft2(spectra.permute(2, 3, 0, 1), s=self.grid)
        (y, x), (height, width) = offset, out.shape[2:]
        out.copy_(spatial[:, :, y : y + height, x : x + width])
