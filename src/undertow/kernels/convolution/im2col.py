"""im2col: copy all patches into memory, then let the library compute one product.

In and out: see algorithm.py. The classical way (Chellapilla, Puri, Simard, "High Performance Convolutional Neural
Networks for Document Processing", 2006). It costs memory: every input element is stored once per tap, 9 times for a
3 x 3 kernel; `patches_bytes` says how much. It takes every shape. The blocked form in patches.py stores one block at a
time.
"""

from __future__ import annotations

from typing import Any, final

import numba
import torch
from torch import Tensor

from undertow.kernels.compiler import cached_njit
from undertow.kernels.convolution.algorithm import Algorithm, Pass, Workspace, align, direct_error_bound
from undertow.kernels.convolution.epilogue import finish_output, masked_cotangent
from undertow.kernels.convolution.patch_loops import gather_patches
from undertow.kernels.convolution.shape import ConvolutionShape
from undertow.kernels.convolution.winograd_tiles import tail_bits
from undertow.kernels.threads import run_parallel
from undertow.kernels.vectors import load_where, store_where, zeros


@cached_njit(parallel=True, error_model="numpy")
def _gather_all(
    source: int, sizes: Any, first_channel: int, num_channels: int, result_size: Any, kernel: Any, rule_y: Any,
    rule_x: Any, num_pixels: int, target: int,
) -> None:  # fmt: skip
    row_bytes = 4 * kernel[0] * kernel[1] * num_channels
    for pixel in numba.prange(num_pixels):
        gather_patches(
            source, 0, 0, sizes, first_channel, num_channels, result_size, kernel, rule_y, rule_x, pixel, 1,
            target + pixel * row_bytes, row_bytes,
        )  # fmt: skip


@cached_njit(parallel=True, error_model="numpy")
def _add_patches(
    patches: int, sizes: Any, first_channel: int, num_channels: int, out_size: Any, kernel: Any, stride: Any,
    padding: Any, dilation: Any, num_lines: int, target: int,
) -> None:  # fmt: skip
    # col2im: each input pixel is summed over the patches that contain it, so no two threads write the same element.
    height, width, all_channels = sizes
    row = kernel[0] * kernel[1] * num_channels
    for line in numba.prange(num_lines):
        image, y = line // height, line % height
        for x in range(width):
            for channel in range(0, num_channels, 16):
                bits, total = tail_bits(num_channels, channel), zeros()
                for i in range(kernel[0]):
                    scaled_y = y + padding[0] - i * dilation[0]
                    out_y = scaled_y // stride[0]
                    if scaled_y % stride[0] == 0 and 0 <= out_y < out_size[0]:
                        for j in range(kernel[1]):
                            scaled_x = x + padding[1] - j * dilation[1]
                            out_x = scaled_x // stride[1]
                            if scaled_x % stride[1] == 0 and 0 <= out_x < out_size[1]:
                                pixel = (image * out_size[0] + out_y) * out_size[1] + out_x
                                element = pixel * row + (i * kernel[1] + j) * num_channels + channel
                                total = total + load_where(patches + 4 * element, bits)
                index = (line * width + x) * all_channels + first_channel + channel
                store_where(target + 4 * index, total, bits)


@final
class Im2col(Algorithm):
    """Patches of the whole batch, and `torch.mm`."""

    name = "im2col"

    def refusal(self, shape: ConvolutionShape) -> str | None:
        return None

    def patches_bytes(self, shape: ConvolutionShape) -> int:
        """The size of one group's patches: num_taps times its input, for stride 1."""
        return 4 * shape.num_out_pixels * shape.num_taps * (shape.in_channels // shape.groups)

    def workspace_bytes(self, shape: ConvolutionShape, step: Pass) -> int:
        weights = 4 * torch.Size(shape.weight_shape).numel()
        num_bytes = 64 + align(self.patches_bytes(shape)) + align(weights)
        if step is Pass.FORWARD:
            return num_bytes
        sums = 4 * torch.get_num_threads() * shape.out_channels
        return num_bytes + align(sums) + align(4 * torch.Size(shape.out_shape).numel())

    def error_bound(self, shape: ConvolutionShape, step: Pass) -> float:
        return direct_error_bound(shape, step)

    def forward(
        self, shape: ConvolutionShape, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, has_relu: bool = False, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        pieces = Workspace(workspace)
        patches, matrices = self._take_patches(shape, pieces), self._take_matrices(shape, weight, pieces)
        for group, columns in enumerate(_columns(shape, out)):
            self._gather(shape, x, group, patches)
            torch.mm(patches, matrices[group].t(), out=columns)
        finish_output(out, bias, has_relu, mask)

    def backward_data(
        self, shape: ConvolutionShape, ct: Tensor, weight: Tensor, ct_x: Tensor, workspace: Tensor, *,
        mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        pieces = Workspace(workspace)
        patches, matrices = self._take_patches(shape, pieces), self._take_matrices(shape, weight, pieces)
        ct = masked_cotangent(ct, mask, None, pieces)
        num_in = shape.in_channels // shape.groups
        for group, columns in enumerate(_columns(shape, ct)):
            torch.mm(columns, matrices[group], out=patches)
            run_parallel(
                _add_patches, patches.data_ptr(), (*shape.in_size, shape.in_channels), group * num_in, num_in,
                shape.out_size, shape.kernel, shape.stride, shape.padding, shape.dilation,
                shape.batch * shape.in_size[0], ct_x.data_ptr(),
            )  # fmt: skip

    def backward_weight(
        self, shape: ConvolutionShape, ct: Tensor, x: Tensor, ct_weight: Tensor, workspace: Tensor, *,
        ct_bias: Tensor | None = None, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        pieces = Workspace(workspace)
        patches, matrices = self._take_patches(shape, pieces), pieces.take_floats(*_matrices_size(shape))
        ct = masked_cotangent(ct, mask, ct_bias, pieces)
        for group, columns in enumerate(_columns(shape, ct)):
            self._gather(shape, x, group, patches)
            torch.mm(columns.t(), patches, out=matrices[group])
        ct_weight.copy_(matrices.view(shape.out_channels, *shape.kernel, -1).permute(0, 3, 1, 2))

    def _take_patches(self, shape: ConvolutionShape, pieces: Workspace) -> Tensor:
        return pieces.take_floats(shape.num_out_pixels, shape.num_taps * (shape.in_channels // shape.groups))

    def _take_matrices(self, shape: ConvolutionShape, weight: Tensor, pieces: Workspace) -> Tensor:
        """[group][out][tap, in]: the weights in the order of a patch."""
        matrices = pieces.take_floats(*_matrices_size(shape))
        matrices.view(shape.out_channels, *shape.kernel, -1).copy_(weight.permute(0, 2, 3, 1))
        return matrices

    def _gather(self, shape: ConvolutionShape, x: Tensor, group: int, patches: Tensor) -> None:
        num_in = shape.in_channels // shape.groups
        rule_y, rule_x = (
            (stride, -padding, dilation, 1)
            for stride, padding, dilation in zip(shape.stride, shape.padding, shape.dilation, strict=True)
        )
        run_parallel(
            _gather_all, x.data_ptr(), (*shape.in_size, shape.in_channels), group * num_in, num_in, shape.out_size,
            shape.kernel, rule_y, rule_x, shape.num_out_pixels, patches.data_ptr(),
        )  # fmt: skip


def _matrices_size(shape: ConvolutionShape) -> tuple[int, int, int]:
    out, num_in = shape.out_channels // shape.groups, shape.in_channels // shape.groups
    return shape.groups, out, shape.num_taps * num_in


def _columns(shape: ConvolutionShape, out: Tensor) -> list[Tensor]:
    """The output's pixels as rows, one matrix of columns for each group."""
    rows = out.as_strided((shape.num_out_pixels, shape.out_channels), (shape.out_channels, 1))
    return list(rows.chunk(shape.groups, dim=1))
