"""Layers that multiply with the kept weights alone.

In: a pruned weight, with or without shared values. Out: the layer's output, rounded in another order than the dense
one. A weight takes its column (2 bytes, where a row has at most 65,536) and its code (1 byte, for at most 256 values).
Columns are numbered over all groups of a convolution, so groups need nothing else. See `kernels.sparse_product`.
"""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from undertow.coding.tensors import CodedTensor
from undertow.kernels.sparse_product import SparseRows, multiply_sparse, multiply_sparse_vector
from undertow.small.layers import Layer, SmallLayer, Window, row_scales

_RUN = 16  # the kernel's positions come in so many


class SparseLayer(SmallLayer):
    """A linear or convolutional layer with a pruned weight."""

    form = "sparse"

    def __init__(self, layer: Layer, tensor: CodedTensor) -> None:
        super().__init__(layer, tensor.shape)
        rows = sparse_rows(tensor, 1 if self.window is None else self.window.groups)
        self.register_buffer("starts", rows.starts)
        self.register_buffer("columns", rows.columns)
        self.register_buffer("codes", rows.codes)
        self.register_buffer("codebook", rows.codebook)
        self.register_buffer("scales", rows.scales)

    @property
    def rows(self) -> SparseRows:
        """The weight."""
        return SparseRows(*(self.get_buffer(name) for name in ("starts", "columns", "codes", "codebook", "scales")))

    @property
    def weight_bytes(self) -> int:
        rows = self.rows
        return sum(part.nbytes for part in (rows.starts, rows.columns, rows.codes, rows.codebook, rows.scales))

    @property
    def weight(self) -> Tensor:
        rows, (num_rows, *rest) = self.rows, self.shape
        row_size = int(numpy.prod(rest))
        index = torch.repeat_interleave(torch.arange(num_rows), rows.starts.diff())
        columns = rows.columns.to(torch.int64) % row_size
        values = rows.codebook[rows.codes.to(torch.int64)] * rows.scales[index]
        return torch.zeros(num_rows, row_size).index_put_((index, columns), values).reshape(self.shape)

    def multiply(self, x: Tensor) -> Tensor:
        """See `SmallLayer`."""
        if self.window is not None:
            return _convolve(self.rows, self.bias, x, self.window)
        if len(x) == 1:
            return multiply_sparse_vector(self.rows, self.bias, x[0].contiguous())[None]
        num, num_columns = x.shape
        width = -(-num // _RUN) * _RUN
        transposed = torch.zeros(num_columns, width)
        transposed[:, :num] = x.t()
        offsets = 4 * width * torch.arange(num_columns)
        return multiply_sparse(self.rows, self.bias, transposed, offsets, width)[:, :num].t().contiguous()


def sparse_rows(tensor: CodedTensor, groups: int = 1) -> SparseRows:
    """The kept weights, row by row."""
    num_rows = tensor.shape[0]
    mask = torch.ones(tensor.shape, dtype=torch.bool) if tensor.mask is None else tensor.mask
    rows = mask.reshape(num_rows, -1)
    starts = torch.zeros(num_rows + 1, dtype=torch.int64)
    starts[1:] = rows.sum(1).cumsum(0)
    row_size = rows.shape[1]
    row, column = (numbers.numpy() for numbers in rows.nonzero(as_tuple=True))
    columns = row * groups // num_rows * row_size + column
    column_type = numpy.uint16 if groups * row_size <= 1 << 16 else numpy.int32
    code_type = numpy.uint8 if len(tensor.codebook) <= 1 << 8 else numpy.uint16
    return SparseRows(
        starts,
        torch.from_numpy(columns.astype(column_type)),
        torch.from_numpy(tensor.codes.numpy().astype(code_type)),
        tensor.codebook.contiguous(),
        row_scales(tensor).contiguous(),
    )


def _convolve(rows: SparseRows, bias: Tensor, x: Tensor, window: Window) -> Tensor:
    """Positions run over the padded images of the batch, one after the other, in each phase of the stride."""
    num, channels, height, width = x.shape
    (kernel_rows, kernel_columns), stride, pad, dilation, _ = window
    # Sizes of a phase, and of the output.
    size = [-(-(length + 2 * pad[dim]) // stride[dim]) for dim, length in enumerate((height, width))]
    out_size = [
        (length + 2 * pad[dim] - dilation[dim] * (window.kernel[dim] - 1) - 1) // stride[dim] + 1
        for dim, length in enumerate((height, width))
    ]
    padded = torch.zeros(channels, num, size[0] * stride[0], size[1] * stride[1])
    padded[:, :, pad[0] : pad[0] + height, pad[1] : pad[1] + width] = x.transpose(0, 1)
    plane = num * size[0] * size[1]
    phases = stride[0] * stride[1]
    # The last run of positions may read beyond the last plane.
    source = torch.zeros(channels * phases * plane + _RUN)
    by_phase = padded.view(channels, num, size[0], stride[0], size[1], stride[1]).permute(0, 3, 5, 1, 2, 4)
    source[: channels * phases * plane].view(by_phase.shape).copy_(by_phase)

    tap_rows = torch.arange(kernel_rows)[:, None] * dilation[0]
    tap_columns = torch.arange(kernel_columns)[None, :] * dilation[1]
    phase = tap_rows % stride[0] * stride[1] + tap_columns % stride[1]
    taps = phase * plane + tap_rows // stride[0] * size[1] + tap_columns // stride[1]
    offsets = 4 * (torch.arange(channels)[:, None, None] * (phases * plane) + taps).reshape(-1)
    num_positions = (num - 1) * size[0] * size[1] + (out_size[0] - 1) * size[1] + out_size[1]
    num_positions = -(-num_positions // _RUN) * _RUN
    out = multiply_sparse(rows, bias, source, offsets, num_positions)
    shape, strides = (num, len(out), *out_size), (size[0] * size[1], num_positions, size[1], 1)
    return out.as_strided(shape, strides).contiguous()
