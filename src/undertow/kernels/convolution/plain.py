"""Plain nested loops: the definition of a convolution as code.

In and out: see algorithm.py. It takes every shape, and the other algorithms are explained by comparison with it. Sums
are in float32 in the order of the loops. It is not blocked, not vectorised, and runs on one thread: 50 to 200 times
slower than the others.
"""

from __future__ import annotations

from typing import Any, final

import numba
from torch import Tensor

from undertow.kernels.bits import flat
from undertow.kernels.compiler import cached_njit
from undertow.kernels.convolution.algorithm import Algorithm, Pass, Workspace, align, direct_error_bound
from undertow.kernels.convolution.epilogue import finish_output, mask_cotangent
from undertow.kernels.convolution.shape import ConvolutionShape

# Every loop takes the sizes as one tuple: batch, in and out channels of a group, groups, input size, output size,
# kernel, stride, padding, dilation.


@cached_njit(error_model="numpy")
def _forward(x: Any, weight: Any, out: Any, sizes: Any) -> None:
    batch, num_in, num_out, groups, (height, width), (out_height, out_width), kernel, stride, padding, dilation = sizes
    for line in range(batch * out_height):
        image, out_y = line // out_height, line % out_height
        for out_x in range(out_width):
            for o in range(groups * num_out):
                total = numba.float32(0)
                for i in range(kernel[0]):
                    y = out_y * stride[0] - padding[0] + i * dilation[0]
                    for j in range(kernel[1]):
                        x_ = out_x * stride[1] - padding[1] + j * dilation[1]
                        if 0 <= y < height and 0 <= x_ < width:
                            first = ((image * height + y) * width + x_) * groups * num_in + o // num_out * num_in
                            for c in range(num_in):
                                tap = ((o * num_in + c) * kernel[0] + i) * kernel[1] + j
                                total += x[first + c] * weight[tap]
                out[(line * out_width + out_x) * groups * num_out + o] = total


@cached_njit(error_model="numpy")
def _backward_data(ct: Any, weight: Any, ct_x: Any, sizes: Any) -> None:
    batch, num_in, num_out, groups, (height, width), (out_height, out_width), kernel, stride, padding, dilation = sizes
    for line in range(batch * height):
        image, y = line // height, line % height
        for x in range(width):
            for c in range(groups * num_in):
                group, total = c // num_in, numba.float32(0)
                for i in range(kernel[0]):
                    scaled_y = y + padding[0] - i * dilation[0]
                    for j in range(kernel[1]):
                        scaled_x = x + padding[1] - j * dilation[1]
                        out_y, out_x = scaled_y // stride[0], scaled_x // stride[1]
                        is_whole = scaled_y % stride[0] == 0 and scaled_x % stride[1] == 0
                        if is_whole and 0 <= out_y < out_height and 0 <= out_x < out_width:
                            pixel = (image * out_height + out_y) * out_width + out_x
                            for o in range(group * num_out, (group + 1) * num_out):
                                tap = ((o * num_in + c % num_in) * kernel[0] + i) * kernel[1] + j
                                total += ct[pixel * groups * num_out + o] * weight[tap]
                ct_x[(line * width + x) * groups * num_in + c] = total


@cached_njit(error_model="numpy")
def _backward_weight(ct: Any, x: Any, ct_weight: Any, sizes: Any) -> None:
    batch, num_in, num_out, groups, (height, width), (out_height, out_width), kernel, stride, padding, dilation = sizes
    for o in range(groups * num_out):
        for c in range(num_in):
            for i in range(kernel[0]):
                for j in range(kernel[1]):
                    total = numba.float32(0)
                    for line in range(batch * out_height):
                        image, y = line // out_height, line % out_height * stride[0] - padding[0] + i * dilation[0]
                        for out_x in range(out_width):
                            x_ = out_x * stride[1] - padding[1] + j * dilation[1]
                            if 0 <= y < height and 0 <= x_ < width:
                                pixel = (image * height + y) * width + x_
                                factor = x[pixel * groups * num_in + o // num_out * num_in + c]
                                total += factor * ct[(line * out_width + out_x) * groups * num_out + o]
                    ct_weight[((o * num_in + c) * kernel[0] + i) * kernel[1] + j] = total


def _sizes(shape: ConvolutionShape) -> tuple[Any, ...]:
    return (
        shape.batch, shape.in_channels // shape.groups, shape.out_channels // shape.groups, shape.groups, shape.in_size,
        shape.out_size, shape.kernel, shape.stride, shape.padding, shape.dilation,
    )  # fmt: skip


@final
class Plain(Algorithm):
    """Seven nested loops."""

    name = "plain loops"

    def refusal(self, shape: ConvolutionShape) -> str | None:
        return None

    def workspace_bytes(self, shape: ConvolutionShape, step: Pass) -> int:
        # The cotangent is masked first, so that the loops show only the sum.
        masked, sums = 4 * shape.num_out_pixels * shape.out_channels, 4 * shape.out_channels
        return 64 if step is Pass.FORWARD else 64 + align(masked) + align(sums)

    def error_bound(self, shape: ConvolutionShape, step: Pass) -> float:
        return direct_error_bound(shape, step)

    def forward(
        self, shape: ConvolutionShape, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, has_relu: bool = False, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        _forward(flat(x), flat(weight), flat(out), _sizes(shape))
        finish_output(out, bias, has_relu, mask)

    def backward_data(
        self, shape: ConvolutionShape, ct: Tensor, weight: Tensor, ct_x: Tensor, workspace: Tensor, *,
        mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        masked = _masked(shape, ct, mask, None, workspace)
        _backward_data(flat(masked), flat(weight), flat(ct_x), _sizes(shape))

    def backward_weight(
        self, shape: ConvolutionShape, ct: Tensor, x: Tensor, ct_weight: Tensor, workspace: Tensor, *,
        ct_bias: Tensor | None = None, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        masked = _masked(shape, ct, mask, ct_bias, workspace)
        _backward_weight(flat(masked), flat(x), flat(ct_weight), _sizes(shape))


def _masked(
    shape: ConvolutionShape, ct: Tensor, mask: Tensor | None, ct_bias: Tensor | None, workspace: Tensor
) -> Tensor:
    pieces = Workspace(workspace)
    sums, masked = pieces.take_floats(1, shape.out_channels), pieces.take_floats(ct.numel())
    mask_cotangent(ct, mask, masked, ct_bias, sums)
    return masked
