"""Convolutions of few channels a group: depthwise, grouped, and the first layer of a network.

In and out: see algorithm.py. A group of few channels is no product of matrices: nothing is transformed or gathered, the
image is read where it lies, and sums of some pixels stay in registers (`group_tiles.py`). So memory is read once, where
a row of the image and its neighbours fit the cache. All geometries are taken; groups of more than 64 channels are left
to products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from undertow.kernels.convolution.algorithm import (
    Pass,
    PreparedAlgorithm,
    Workspace,
    align,
    direct_error_bound,
)
from undertow.kernels.convolution.epilogue import address_of, finish_output, masked_cotangent
from undertow.kernels.convolution.group_loops import VECTOR_BYTES, sum_over_taps
from undertow.kernels.convolution.group_weight_loops import sum_over_pixels
from undertow.kernels.convolution.shape import ConvolutionShape
from undertow.kernels.threads import run_parallel

MOST_CHANNELS = 64
_BUNDLED = (1, 2, 4, 8)  # channels per group, as many inputs as outputs


@final
class Grouped(PreparedAlgorithm):
    """Sums over taps and the channels of a group, in registers."""

    name = "grouped"

    def refusal(self, shape: ConvolutionShape) -> str | None:
        num_in, num_out = shape.in_channels // shape.groups, shape.out_channels // shape.groups
        if num_in <= MOST_CHANNELS and (num_out <= MOST_CHANNELS or shape.groups == 1):
            return None
        return f"a group has {num_in} input and {num_out} output channels; at most {MOST_CHANNELS} each"

    def error_bound(self, shape: ConvolutionShape, step: Pass) -> float:
        return direct_error_bound(shape, step)

    def workspace_bytes(self, shape: ConvolutionShape, step: Pass) -> int:
        zeros = align(4 * max(shape.in_channels, shape.out_channels) // shape.groups) + VECTOR_BYTES
        if step is Pass.FORWARD:
            return 64 + zeros + align(4 * _Form(shape).num_elements)
        sums = align(4 * torch.get_num_threads() * shape.out_channels)
        masked = align(4 * torch.Size(shape.out_shape).numel())
        if step is Pass.BACKWARD_DATA:
            return 64 + zeros + sums + masked + align(4 * _Form(shape, is_adjoint=True).num_elements)
        return 64 + zeros + sums + masked + torch.get_num_threads() * align(4 * _Form(shape).num_elements)

    def prepared_bytes(self, shape: ConvolutionShape) -> int:
        return 4 * _Form(shape).num_elements

    def prepare(self, shape: ConvolutionShape, weight: Tensor, prepared: Tensor) -> None:
        _Form(shape).pack(weight, prepared)

    def evaluation_bytes(self, shape: ConvolutionShape) -> int:
        return self.workspace_bytes(shape, Pass.FORWARD)

    def evaluate(
        self, shape: ConvolutionShape, x: Tensor, prepared: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, residual: Tensor | None = None, has_relu: bool = False,
    ) -> None:  # fmt: skip
        self._sum_over_taps(shape, x, prepared, out, bias, Workspace(workspace))
        if residual is not None:
            out.add_(residual)
        finish_output(out, None, has_relu, None)

    def forward(
        self, shape: ConvolutionShape, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, has_relu: bool = False, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        pieces, form = Workspace(workspace), _Form(shape)
        packed = pieces.take_floats(form.num_elements)
        form.pack(weight, packed)
        self._sum_over_taps(shape, x, packed, out, bias, pieces)
        finish_output(out, None, has_relu, mask)

    def _sum_over_taps(
        self, shape: ConvolutionShape, x: Tensor, packed: Tensor, out: Tensor, bias: Tensor | None, pieces: Workspace
    ) -> None:
        form = _Form(shape)
        run_parallel(
            sum_over_taps, x.data_ptr(), (*shape.in_size, shape.in_channels), out.data_ptr(),
            (*shape.out_size, shape.out_channels), form.axes, shape.batch, packed.data_ptr(),
            form.per_group, form.num_in, form.num_out, address_of(bias), _zeros(shape, pieces).data_ptr(),
        )  # fmt: skip

    def backward_data(
        self, shape: ConvolutionShape, ct: Tensor, weight: Tensor, ct_x: Tensor, workspace: Tensor, *,
        mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        pieces, form = Workspace(workspace), _Form(shape, is_adjoint=True)
        packed = pieces.take_floats(form.num_elements)
        form.pack(weight, packed)
        ct = masked_cotangent(ct, mask, None, pieces)
        run_parallel(
            sum_over_taps, ct.data_ptr(), (*shape.out_size, shape.out_channels), ct_x.data_ptr(),
            (*shape.in_size, shape.in_channels), form.axes, shape.batch, packed.data_ptr(),
            form.per_group, form.num_in, form.num_out, 0, _zeros(shape, pieces).data_ptr(),
        )  # fmt: skip

    def backward_weight(
        self, shape: ConvolutionShape, ct: Tensor, x: Tensor, ct_weight: Tensor, workspace: Tensor, *,
        ct_bias: Tensor | None = None, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        pieces, form, num_parts = Workspace(workspace), _Form(shape), torch.get_num_threads()
        part = align(4 * form.num_elements) // 4
        sums = pieces.take_floats(num_parts, part).zero_()
        ct = masked_cotangent(ct, mask, ct_bias, pieces)
        run_parallel(
            sum_over_pixels, ct.data_ptr(), (*shape.out_size, shape.out_channels), x.data_ptr(),
            (*shape.in_size, shape.in_channels), form.axes, shape.batch * shape.out_size[0], form.per_group,
            form.num_in, form.num_out, num_parts, sums.data_ptr(), 4 * part, _zeros(shape, pieces).data_ptr(),
        )  # fmt: skip
        for other in sums[1:]:
            sums[0].add_(other)
        form.unpack(sums[0, : form.num_elements], ct_weight)


class _Form:
    """The weights as the loops read them, for the forward pass or for the cotangent of the input."""

    def __init__(self, shape: ConvolutionShape, is_adjoint: bool = False) -> None:
        self.shape, self.is_adjoint = shape, is_adjoint
        self.num_in, self.num_out = shape.in_channels // shape.groups, shape.out_channels // shape.groups
        if is_adjoint:
            self.num_in, self.num_out = self.num_out, self.num_in
        is_bundle = self.num_in == self.num_out and self.num_in in _BUNDLED
        self.per_group = self.num_in if is_bundle else 0
        if is_bundle:
            self.num_units, self.lanes = -(-shape.in_channels // 16), 16
        else:
            self.lanes = 16 if self.num_out <= 16 else 32
            self.num_units = shape.groups * -(-self.num_out // self.lanes)
        self.num_elements = self.num_units * shape.num_taps * self.num_in * self.lanes

    @property
    def axes(self) -> tuple[tuple[int, int, int, int, bool], ...]:
        """See `group_loops`."""
        shape = self.shape
        sides = zip(shape.stride, shape.padding, shape.dilation, shape.kernel, strict=True)
        return tuple((*side, self.is_adjoint) for side in sides)

    def pack(self, weight: Tensor, packed: Tensor) -> None:
        """Write the weights in the loops' order; lanes without a channel are 0."""
        shape = self.shape
        grouped = weight.reshape(shape.groups, shape.out_channels // shape.groups, -1, *shape.kernel)
        if self.is_adjoint:
            grouped = grouped.transpose(1, 2)
        packed.zero_()
        for own, other in self._matches(packed, grouped.reshape(self._num_rows, -1, self.num_in, *shape.kernel)):
            own.copy_(other)

    def unpack(self, packed: Tensor, weight: Tensor) -> None:
        """The other way; only for the forward pass."""
        for own, other in self._matches(packed, weight.view(self._num_rows, -1, self.num_in, *self.shape.kernel)):
            other.copy_(own)

    @property
    def _num_rows(self) -> int:
        """Parts of the output channels that begin with a vector of their own."""
        return 1 if self.per_group else self.shape.groups

    def _matches(self, packed: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of both that match: of whole units, and of the last one. Rows are [row][lane][input][kernel]."""
        num_rows, num_lanes = rows.shape[:2]
        whole = packed.view(num_rows, -1, *self.shape.kernel, self.num_in, self.lanes).permute(0, 1, 5, 4, 2, 3)
        full, rest = divmod(num_lanes, self.lanes)
        yield whole[:, :full], rows[:, : full * self.lanes].unflatten(1, (full, self.lanes))
        if rest:
            yield whole[:, full, :rest], rows[:, full * self.lanes :]


def _zeros(shape: ConvolutionShape, pieces: Workspace) -> Tensor:
    """Zeros that are read instead of what lies outside of the image."""
    return pieces.take(4 * max(shape.in_channels, shape.out_channels) // shape.groups + VECTOR_BYTES).zero_()
