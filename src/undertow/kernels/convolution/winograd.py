"""Winograd's convolution F(m x m, 3 x 3), for 3 x 3 kernels with stride 1.

It needs 4 times (m = 4) or 2.25 times (m = 2) fewer multiplications than the direct sum, with larger rounding errors.

In and out: see algorithm.py. The idea and the matrices: winograd_tiles.py. The orders of the loops: winograd_loops.py.
The cotangent of the input is a forward pass over ct with rotated weights, so no overlapping tiles are added. The
cotangent of the weights is the adjoint, sum over tiles of V^T (A ct A^T): summed in the transformed domain, then
transformed back once.

Not done: strides, dilation, groups, other kernels. Results beyond the edge are computed and thrown away: with m = 4 a
14 x 14 image costs as much as 16 x 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from undertow.kernels.bits import pack_signs_into
from undertow.kernels.convolution.algorithm import (
    Pass,
    PreparedAlgorithm,
    Workspace,
    accumulated_error,
    align,
)
from undertow.kernels.convolution.epilogue import address_of, gate_of
from undertow.kernels.convolution.products import PANEL, PANEL_BYTES, ROWS
from undertow.kernels.convolution.shape import ConvolutionShape
from undertow.kernels.convolution.winograd_loops import (
    convolve_blocks,
    convolve_panels,
    correlate_blocks,
    correlate_panels,
    row_bytes,
    transform_all_inputs,
)
from undertow.kernels.convolution.winograd_weights import SCRATCH_BYTES, gather_weight_cotangent, transform_weight
from undertow.kernels.threads import run_parallel

# Tiles per block. Measured on 2 cores with 1 MiB of L2 cache each, VGG-16's layers: with up to 192 channels in and out
# together 16 tiles are fastest, by 10 % over 96; with more channels 32 to 64 are, by 2 to 5 % over 16.
_FEW_CHANNELS = 192
_BLOCK_FEW, _BLOCK_MANY = 16, 32
_BLOCK_WEIGHT = 64


@dataclass(frozen=True)
class _Matrices:
    """What the error bound needs: row sums of |B^T|, and the absolute values of G and A^T."""

    input_rows: tuple[float, ...]
    weight: tuple[tuple[float, ...], ...]
    output: tuple[tuple[float, ...], ...]
    # Roundings on the longest path through one pass of each transform; constants that are no powers of two count.
    num_roundings: int

    def forward_growth(self) -> float:
        """The largest of sum over i of |A^T_ki| |B^T|_i |G|_i, squared: the factor in |y| <= growth sum |x| |w|."""
        weight_rows = [sum(map(abs, row)) for row in self.weight]
        sums = [
            sum(abs(a) * b * g for a, b, g in zip(row, self.input_rows, weight_rows, strict=True))
            for row in self.output
        ]
        return max(sums) ** 2

    def weight_growth(self) -> float:
        """The same for ct_w: the largest of sum over i of |G_ik| |B^T|_i |A|_i, squared."""
        cotangent_rows = [sum(abs(row[i]) for row in self.output) for i in range(len(self.weight))]
        sums = [
            sum(abs(row[tap]) * b * a for row, b, a in zip(self.weight, self.input_rows, cotangent_rows, strict=True))
            for tap in range(3)
        ]
        return max(sums) ** 2


_MATRICES = {
    2: _Matrices(
        (2, 2, 2, 2),
        ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, 1 / 2, 1 / 2), (0, 0, 1)),
        ((1, 1, 1, 0), (0, 1, 1, 1)),
        2 * (1 + 2 + 2),
    ),
    4: _Matrices(
        (10, 10, 10, 6, 6, 10),
        (
            (1 / 4, 0, 0), (1 / 6, 1 / 6, 1 / 6), (1 / 6, 1 / 6, 1 / 6), (1 / 24, 1 / 12, 1 / 6),
            (1 / 24, 1 / 12, 1 / 6), (0, 0, 1),
        ),
        ((1, 1, 1, 1, 1, 0), (0, 1, 1, 2, 2, 0), (0, 1, 1, 4, 4, 0), (0, 1, 1, 8, 8, 1)),
        2 * (3 + 5 + 4),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class _Sizes:
    """The sizes of one pass as the loops see them; for the cotangent of the input, in and out are exchanged."""

    shape: ConvolutionShape
    m: int
    step: Pass
    has_prepared: bool = False  # whether the transformed weights are given as an argument

    @property
    def is_data(self) -> bool:
        return self.step is Pass.BACKWARD_DATA

    @property
    def num_in(self) -> int:
        return self.shape.out_channels if self.is_data else self.shape.in_channels

    @property
    def num_out(self) -> int:
        return self.shape.in_channels if self.is_data else self.shape.out_channels

    @property
    def in_sizes(self) -> tuple[int, int, int]:
        return (*(self.shape.out_size if self.is_data else self.shape.in_size), self.num_in)

    @property
    def out_sizes(self) -> tuple[int, int, int]:
        return (*(self.shape.in_size if self.is_data else self.shape.out_size), self.num_out)

    @property
    def padding(self) -> tuple[int, int]:
        height, width = self.shape.padding
        return (2 - height, 2 - width) if self.is_data else (height, width)

    @property
    def weight_strides(self) -> tuple[int, int]:
        """Bytes between columns, and between terms, of [out, in, 3, 3] weights."""
        tap_bytes, row = 4 * 9, 4 * 9 * self.shape.in_channels
        return (tap_bytes, row) if self.is_data else (row, tap_bytes)

    @property
    def grid(self) -> tuple[int, int]:
        return -(-self.out_sizes[0] // self.m), -(-self.out_sizes[1] // self.m)

    @property
    def num_tiles(self) -> int:
        return self.shape.batch * self.grid[0] * self.grid[1]

    @property
    def num_f(self) -> int:
        return (self.m + 2) ** 2

    @property
    def num_panels(self) -> int:
        return -(-self.num_out // PANEL)

    @property
    def transformed_input_bytes(self) -> int:
        return self.num_f * self.num_tiles * row_bytes(self.num_in)

    @property
    def transformed_weight_bytes(self) -> int:
        return self.num_f * self.num_panels * self.num_in * PANEL_BYTES

    @property
    def weight_sums_bytes(self) -> int:
        return self.num_f * self.num_panels * -(-self.num_in // ROWS) * ROWS * PANEL_BYTES

    @property
    def uses_panels(self) -> bool:
        """Whether the transformed weights are larger than the transformed input; the larger of them is not stored."""
        return self.transformed_weight_bytes >= self.transformed_input_bytes

    @property
    def block(self) -> int:
        """Tiles per block."""
        if self.num_in + self.num_out <= _FEW_CHANNELS:
            return _BLOCK_FEW
        return _BLOCK_WEIGHT if self.step is Pass.BACKWARD_WEIGHT else _BLOCK_MANY

    @property
    def num_sums(self) -> int:
        """Partial sums of the weights' cotangent, one per thread."""
        return min(torch.get_num_threads(), -(-self.num_tiles // self.block))

    def piece_bytes(self) -> list[int]:
        """The pieces of the workspace, in order: scratch, the threads' shared piece, a piece per thread."""
        num_threads, num_f = torch.get_num_threads(), self.num_f
        scratch = num_threads * SCRATCH_BYTES
        if self.uses_panels:
            num_terms = 0 if self.has_prepared else self.num_in
            panel = num_f * (self.num_tiles + num_terms + ROWS) * PANEL_BYTES + num_f * 64
            return [scratch, self.transformed_input_bytes, num_threads * panel]
        block = num_f * self.block * row_bytes(self.num_in)
        if self.step is not Pass.BACKWARD_WEIGHT:
            block += num_f * self.block * row_bytes(self.num_out)
            return [scratch, 0 if self.has_prepared else self.transformed_weight_bytes, num_threads * block]
        block += num_f * self.num_panels * (self.block * PANEL_BYTES + 64)
        sums = self.num_sums * self.weight_sums_bytes
        return [scratch, sums, self.num_sums * block, self.num_sums * row_bytes(self.num_out)]


@final
class Winograd(PreparedAlgorithm):
    """F(m x m, 3 x 3), m being 2 or 4."""

    def __init__(self, m: int) -> None:
        self.m = m
        self.name = f"winograd F({m}x{m},3x3)"

    def refusal(self, shape: ConvolutionShape) -> str | None:
        if shape.kernel != (3, 3):
            return f"the kernel is {shape.kernel[0]} x {shape.kernel[1]}, not 3 x 3"
        if shape.stride != (1, 1):
            return f"the stride is {shape.stride}, not 1"
        if shape.dilation != (1, 1):
            return f"the dilation is {shape.dilation}, not 1"
        if shape.groups != 1:
            return f"the channels are in {shape.groups} groups, not in one"
        if max(shape.padding) > 2:
            return f"the padding is {shape.padding}, more than 2: the cotangent of the input would need a negative one"
        return None

    def workspace_bytes(self, shape: ConvolutionShape, step: Pass) -> int:
        return 64 + sum(map(align, _Sizes(shape, self.m, step).piece_bytes()))

    # From any x and w to an element of the result there are k roundings, k = num_terms + roundings of the transforms.
    # So the error is at most gamma_k times the same expression in absolute values, num_terms growth max|x| max|w|.
    def error_bound(self, shape: ConvolutionShape, step: Pass) -> float:
        sizes, matrices = _Sizes(shape, self.m, step), _MATRICES[self.m]
        is_weight = step is Pass.BACKWARD_WEIGHT
        terms = sizes.num_tiles if is_weight else sizes.num_in
        growth = matrices.weight_growth() if is_weight else matrices.forward_growth()
        return terms * growth * accumulated_error(terms + matrices.num_roundings)

    def forward(
        self, shape: ConvolutionShape, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, has_relu: bool = False, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        # If a pixel's channels do not fill vectors, two threads would write parts of the same byte of the mask.
        fused_mask = mask if shape.out_channels % 16 == 0 else None
        self._convolve(_Sizes(shape, self.m, Pass.FORWARD), x, None, weight, out, workspace, bias, has_relu, fused_mask)
        if mask is not None and fused_mask is None:
            pack_signs_into(out, mask)

    def backward_data(
        self, shape: ConvolutionShape, ct: Tensor, weight: Tensor, ct_x: Tensor, workspace: Tensor, *,
        mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._convolve(_Sizes(shape, self.m, Pass.BACKWARD_DATA), ct, mask, weight, ct_x, workspace)

    def prepared_bytes(self, shape: ConvolutionShape) -> int:
        return _Sizes(shape, self.m, Pass.FORWARD).transformed_weight_bytes

    def prepare(self, shape: ConvolutionShape, weight: Tensor, prepared: Tensor) -> None:
        scratch = torch.empty(torch.get_num_threads() * SCRATCH_BYTES, dtype=torch.uint8)
        self._transform_weight(_Sizes(shape, self.m, Pass.FORWARD), weight, prepared.data_ptr(), scratch.data_ptr())

    def evaluation_bytes(self, shape: ConvolutionShape) -> int:
        return 64 + sum(map(align, _Sizes(shape, self.m, Pass.FORWARD, has_prepared=True).piece_bytes()))

    def evaluate(
        self, shape: ConvolutionShape, x: Tensor, prepared: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, residual: Tensor | None = None, has_relu: bool = False,
    ) -> None:  # fmt: skip
        sizes = _Sizes(shape, self.m, Pass.FORWARD, has_prepared=True)
        self._convolve(sizes, x, None, prepared, out, workspace, bias, has_relu, residual=residual)

    def _transform_weight(self, sizes: _Sizes, weight: Tensor, target: int, scratch: int) -> None:
        column_bytes, term_bytes = sizes.weight_strides
        run_parallel(
            transform_weight, self.m + 2, weight.data_ptr(), sizes.num_out, column_bytes, sizes.num_in, term_bytes,
            sizes.is_data, target, scratch,
        )  # fmt: skip

    def _convolve(
        self, sizes: _Sizes, source: Tensor, gate: Tensor | None, weight: Tensor, out: Tensor, workspace: Tensor,
        bias: Tensor | None = None, has_relu: bool = False, mask: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        n, grid, num_tiles = self.m + 2, sizes.grid, sizes.num_tiles
        pieces = Workspace(workspace)
        scratch, shared, own = (pieces.take(size).data_ptr() for size in sizes.piece_bytes())
        gate_address, gate_kind = gate_of(gate)
        inputs = source.data_ptr(), gate_address, gate_kind, sizes.in_sizes, sizes.padding, grid, num_tiles
        outputs = (
            address_of(bias), address_of(residual), out.data_ptr(), address_of(mask), has_relu, sizes.out_sizes,
            scratch, own,
        )  # fmt: skip
        if sizes.uses_panels:
            run_parallel(transform_all_inputs, n, *inputs, shared, scratch)
            run_parallel(
                convolve_panels, n, shared, sizes.num_in, grid, num_tiles, weight.data_ptr(), *sizes.weight_strides,
                sizes.is_data, weight.data_ptr() if sizes.has_prepared else 0, *outputs,
            )  # fmt: skip
        else:
            prepared = weight.data_ptr() if sizes.has_prepared else shared
            if not sizes.has_prepared:
                self._transform_weight(sizes, weight, shared, scratch)
            run_parallel(convolve_blocks, n, *inputs, sizes.block, prepared, *outputs)

    def backward_weight(
        self, shape: ConvolutionShape, ct: Tensor, x: Tensor, ct_weight: Tensor, workspace: Tensor, *,
        ct_bias: Tensor | None = None, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        sizes, n = _Sizes(shape, self.m, Pass.BACKWARD_WEIGHT), self.m + 2
        grid, num_tiles, num_sums = sizes.grid, sizes.num_tiles, sizes.num_sums
        pieces = Workspace(workspace)
        scratch, shared, own, *bias_sums = (pieces.take(size) for size in sizes.piece_bytes())
        gate, gate_kind = gate_of(mask)
        cotangents = ct.data_ptr(), gate, gate_kind, sizes.out_sizes, grid, num_tiles
        if sizes.uses_panels:
            run_parallel(
                transform_all_inputs, n, x.data_ptr(), 0, 0, sizes.in_sizes, sizes.padding, grid, num_tiles,
                shared.data_ptr(), scratch.data_ptr(),
            )  # fmt: skip
            run_parallel(
                correlate_panels, n, shared.data_ptr(), sizes.num_in, *cotangents, ct_weight.data_ptr(),
                address_of(ct_bias), scratch.data_ptr(), own.data_ptr(),
            )  # fmt: skip
            return
        sums_of_bias = bias_sums[0] if ct_bias is not None else None
        run_parallel(
            correlate_blocks, n, x.data_ptr(), sizes.in_sizes, sizes.padding, *cotangents, sizes.block, num_sums,
            shared.data_ptr(), address_of(sums_of_bias), scratch.data_ptr(), own.data_ptr(),
        )  # fmt: skip
        run_parallel(
            gather_weight_cotangent, n, shared.data_ptr(), num_sums, sizes.weight_sums_bytes, sizes.num_out,
            sizes.num_in, ct_weight.data_ptr(), scratch.data_ptr(),
        )  # fmt: skip
        if ct_bias is not None and sums_of_bias is not None:
            rows = sums_of_bias.view(torch.float32).view(num_sums, -1)[:, : sizes.num_out]
            torch.sum(rows, dim=0, out=ct_bias)
