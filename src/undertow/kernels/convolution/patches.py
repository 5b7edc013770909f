"""Two algorithms over blocks of patches: im2col with a bounded workspace, and the product for 1 x 1 kernels.

In and out: see algorithm.py. The loops are in patch_loops.py. Blocked im2col takes every shape and never has all
patches in memory (Dukhan, "The Indirect Convolution Algorithm", 2019, goes further and stores only addresses). A 1 x 1
kernel without padding needs no patches: the product reads the pixels as its rows. With a stride, or a cotangent to
mask, the needed pixels are copied block by block. Groups are computed one after the other; with few channels in each,
most of a panel of 32 columns is empty and the plain or direct algorithm is faster.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from undertow.kernels.bits import pack_signs_into
from undertow.kernels.convolution.algorithm import Pass, PreparedAlgorithm, Workspace, align, direct_error_bound
from undertow.kernels.convolution.epilogue import address_of, gate_of
from undertow.kernels.convolution.patch_loops import (
    convolve_patches,
    correlate_patches,
    pack_weight,
    patch_row_bytes,
    unpack_weight_cotangent,
)
from undertow.kernels.convolution.products import PANEL, PANEL_BYTES, ROWS
from undertow.kernels.convolution.shape import ConvolutionShape, Pair
from undertow.kernels.threads import run_parallel

# Pixels per block: their patches fill about half of an L2 cache of 1 MiB.
_BLOCK_BYTES = 2**19
_MAX_PIXELS, _MIN_PIXELS = 128, 16

Rule = tuple[int, int, int, int]


def _rules(shape: ConvolutionShape, is_data: bool) -> tuple[Rule, Rule]:
    """Which source position a tap reads, in both directions; see patch_loops."""
    if is_data:
        y, x = ((1, p, -d, s) for s, p, d in zip(shape.stride, shape.padding, shape.dilation, strict=True))
    else:
        y, x = ((s, -p, d, 1) for s, p, d in zip(shape.stride, shape.padding, shape.dilation, strict=True))
    return y, x


class _Patches(PreparedAlgorithm):
    """Products of gathered rows. Abstract: a subclass says whether rows need gathering."""

    def _is_gathered(self, shape: ConvolutionShape, is_masked: bool) -> bool:
        raise NotImplementedError

    def error_bound(self, shape: ConvolutionShape, step: Pass) -> float:
        return direct_error_bound(shape, step)

    def workspace_bytes(self, shape: ConvolutionShape, step: Pass) -> int:
        return 64 + sum(map(align, self._piece_bytes(shape, step)))

    def _piece_bytes(self, shape: ConvolutionShape, step: Pass) -> list[int]:
        """Sizes: the weights or the sums of their cotangent, the blocks, the sums of the bias's cotangent."""
        in_channels, out_channels = _channels(shape, step is Pass.BACKWARD_DATA)
        terms, num_panels = shape.num_taps * in_channels, -(-out_channels // PANEL)
        block = _block(terms)
        if step is not Pass.BACKWARD_WEIGHT:
            weights = shape.groups * num_panels * terms * PANEL_BYTES
            own = block * (patch_row_bytes(terms) + PANEL_BYTES * num_panels + 64)
            return [weights, torch.get_num_threads() * own]
        num_sums, rows = _num_sums(shape, block), -(-terms // ROWS) * ROWS
        own = block * (patch_row_bytes(terms) + PANEL_BYTES * num_panels)
        num_sum_panels = num_sums * shape.groups * num_panels
        return [num_sum_panels * rows * PANEL_BYTES, num_sums * own, num_sum_panels * PANEL_BYTES]

    def forward(
        self, shape: ConvolutionShape, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, has_relu: bool = False, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        # Different threads may write different pixels and groups, so no byte of the mask may belong to two of them.
        fused_mask = mask if shape.out_channels // shape.groups % 16 == 0 else None
        self._convolve(shape, Pass.FORWARD, x, None, weight, out, workspace, bias, has_relu, fused_mask)
        if mask is not None and fused_mask is None:
            pack_signs_into(out, mask)

    def backward_data(
        self, shape: ConvolutionShape, ct: Tensor, weight: Tensor, ct_x: Tensor, workspace: Tensor, *,
        mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._convolve(shape, Pass.BACKWARD_DATA, ct, mask, weight, ct_x, workspace)

    def prepared_bytes(self, shape: ConvolutionShape) -> int:
        return self._piece_bytes(shape, Pass.FORWARD)[0]

    def prepare(self, shape: ConvolutionShape, weight: Tensor, prepared: Tensor) -> None:
        _pack(shape, Pass.FORWARD, weight, prepared.data_ptr())

    def evaluation_bytes(self, shape: ConvolutionShape) -> int:
        return 64 + self._piece_bytes(shape, Pass.FORWARD)[1]

    def evaluate(
        self, shape: ConvolutionShape, x: Tensor, prepared: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, residual: Tensor | None = None, has_relu: bool = False,
    ) -> None:  # fmt: skip
        own = Workspace(workspace).take(self._piece_bytes(shape, Pass.FORWARD)[1]).data_ptr()
        self._multiply(
            shape, Pass.FORWARD, x, None, prepared.data_ptr(), out, own, bias, has_relu, residual=residual
        )  # fmt: skip

    def _convolve(
        self, shape: ConvolutionShape, step: Pass, source: Tensor, gate: Tensor | None, weight: Tensor, out: Tensor,
        workspace: Tensor, bias: Tensor | None = None, has_relu: bool = False, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        pieces = Workspace(workspace)
        packed, own = (pieces.take(size).data_ptr() for size in self._piece_bytes(shape, step))
        _pack(shape, step, weight, packed)
        self._multiply(shape, step, source, gate, packed, out, own, bias, has_relu, mask)

    def _multiply(
        self, shape: ConvolutionShape, step: Pass, source: Tensor, gate: Tensor | None, packed: int, out: Tensor,
        own: int, bias: Tensor | None = None, has_relu: bool = False, mask: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        is_data = step is Pass.BACKWARD_DATA
        num_in, num_out = _channels(shape, is_data)
        in_size, out_size = (shape.out_size, shape.in_size) if is_data else (shape.in_size, shape.out_size)
        rules, spread, spread_size = _rules(shape, is_data), (1, 1), out_size
        if is_data and shape.num_taps == 1 and shape.stride != (1, 1) and shape.padding == (0, 0):
            # Each output pixel comes from one input pixel; the input pixels in between have cotangent 0.
            out.zero_()
            out_size, spread, rules = shape.out_size, shape.stride, ((1, 0, 1, 1), (1, 0, 1, 1))
        run_parallel(
            convolve_patches, source.data_ptr(), *gate_of(gate), (*in_size, num_in * shape.groups), shape.groups,
            (*out_size, num_out * shape.groups), shape.kernel, *rules, shape.batch * out_size[0] * out_size[1],
            _block(shape.num_taps * num_in), self._is_gathered(shape, gate is not None), packed, address_of(bias),
            address_of(residual), out.data_ptr(), address_of(mask), has_relu, spread, spread_size, own,
        )  # fmt: skip

    def backward_weight(
        self, shape: ConvolutionShape, ct: Tensor, x: Tensor, ct_weight: Tensor, workspace: Tensor, *,
        ct_bias: Tensor | None = None, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        num_in, num_out = _channels(shape, False)
        block = _block(shape.num_taps * num_in)
        num_sums = _num_sums(shape, block)
        pieces = Workspace(workspace)
        sums, own, bias_sums = (pieces.take(size) for size in self._piece_bytes(shape, Pass.BACKWARD_WEIGHT))
        run_parallel(
            correlate_patches, x.data_ptr(), (*shape.in_size, shape.in_channels), shape.groups, shape.kernel,
            *_rules(shape, False), ct.data_ptr(), *gate_of(mask), (*shape.out_size, shape.out_channels),
            shape.num_out_pixels, block, self._is_gathered(shape, False), num_sums, sums.data_ptr(),
            0 if ct_bias is None else bias_sums.data_ptr(), own.data_ptr(),
        )  # fmt: skip
        run_parallel(
            unpack_weight_cotangent, sums.data_ptr(), num_sums, shape.groups, num_out, num_in, shape.num_taps,
            ct_weight.data_ptr(),
        )  # fmt: skip
        if ct_bias is not None:
            rows = bias_sums.view(torch.float32).view(num_sums, shape.groups, -1)[:, :, :num_out]
            torch.sum(rows, dim=0, out=ct_bias.view(shape.groups, num_out))


def _pack(shape: ConvolutionShape, step: Pass, weight: Tensor, packed: int) -> None:
    is_data = step is Pass.BACKWARD_DATA
    num_in, num_out = _channels(shape, is_data)
    tap_bytes, row_bytes = 4 * shape.num_taps, 4 * shape.num_taps * shape.in_channels // shape.groups
    column_bytes, channel_bytes = (tap_bytes, row_bytes) if is_data else (row_bytes, tap_bytes)
    run_parallel(
        pack_weight, weight.data_ptr(), shape.groups, shape.out_channels // shape.groups * row_bytes, num_out,
        column_bytes, num_in, channel_bytes, shape.num_taps, packed,
    )  # fmt: skip


def _channels(shape: ConvolutionShape, is_data: bool) -> Pair:
    """The channels of one group that are summed over, and the channels of its result."""
    num_in, num_out = shape.in_channels // shape.groups, shape.out_channels // shape.groups
    return (num_out, num_in) if is_data else (num_in, num_out)


def _block(num_terms: int) -> int:
    fitting = _BLOCK_BYTES // patch_row_bytes(num_terms) // ROWS * ROWS
    return max(_MIN_PIXELS, min(_MAX_PIXELS, fitting))


def _num_sums(shape: ConvolutionShape, block: int) -> int:
    return min(torch.get_num_threads(), -(-shape.num_out_pixels // block))


@final
class BlockedIm2col(_Patches):
    """im2col in blocks of pixels."""

    name = "blocked im2col"

    def refusal(self, shape: ConvolutionShape) -> str | None:
        return None

    def _is_gathered(self, shape: ConvolutionShape, is_masked: bool) -> bool:
        return True


@final
class Pointwise(_Patches):
    """A 1 x 1 kernel as a product of pixels and weights."""

    name = "1x1 product"

    def refusal(self, shape: ConvolutionShape) -> str | None:
        if shape.kernel != (1, 1):
            return f"the kernel is {shape.kernel[0]} x {shape.kernel[1]}, not 1 x 1"
        if shape.padding != (0, 0):
            return f"the padding is {shape.padding}, not 0: padded pixels are not rows of the input"
        return None

    def _is_gathered(self, shape: ConvolutionShape, is_masked: bool) -> bool:
        # The weights' cotangent reads rows in blocks of 8 channels.
        has_whole_rows = shape.in_channels // shape.groups % ROWS == 0
        return is_masked or shape.stride != (1, 1) or not has_whole_rows
