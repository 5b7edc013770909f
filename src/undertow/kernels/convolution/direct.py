"""PyTorch's own convolution: oneDNN's direct algorithm where PyTorch has it.

In and out: see algorithm.py. Refuses windows that lie wholly in the padding. PyTorch's backward function allocates its
results, which are then copied into the given tensors. What it allocates is stated as workspace so that a plan counts
it, but the given workspace is used only for the masked cotangent. The forward pass adds into a zeroed output, which
oneDNN does in place; with one input channel, PyTorch allocates the output and it is copied.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from undertow.kernels.bits import pack_signs_into
from undertow.kernels.convolution.algorithm import Algorithm, Pass, Workspace, align, direct_error_bound
from undertow.kernels.convolution.epilogue import finish_output, mask_cotangent
from undertow.kernels.convolution.shape import ConvolutionShape


@final
class Direct(Algorithm):
    """`aten.convolution` and `aten.convolution_backward`."""

    name = "direct (oneDNN)"

    def refusal(self, shape: ConvolutionShape) -> str | None:
        # Where a window lies wholly in the padding, oneDNN reads outside the image (torch 2.13: it may crash).
        sides = zip(shape.padding, shape.dilation, shape.kernel, strict=True)
        is_outside = any(padding > dilation * (kernel - 1) for padding, dilation, kernel in sides)
        return f"padding {shape.padding} reaches beyond the kernel" if is_outside else None

    def workspace_bytes(self, shape: ConvolutionShape, step: Pass) -> int:
        weights = 4 * torch.Size(shape.weight_shape).numel()
        if step is Pass.FORWARD:
            return 64 + align(weights)
        sums = 4 * torch.get_num_threads() * shape.out_channels
        results = 4 * torch.Size(shape.x_shape).numel() if step is Pass.BACKWARD_DATA else 2 * weights
        return 64 + align(sums) + align(4 * torch.Size(shape.out_shape).numel()) + align(weights) + align(results)

    def backward_bytes(self, shape: ConvolutionShape) -> int:
        return sum(self.workspace_bytes(shape, step) for step in (Pass.BACKWARD_DATA, Pass.BACKWARD_WEIGHT))

    def error_bound(self, shape: ConvolutionShape, step: Pass) -> float:
        return direct_error_bound(shape, step)

    def forward(
        self, shape: ConvolutionShape, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, has_relu: bool = False, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        geometry = shape.padding, shape.stride, shape.dilation, shape.groups
        if torch.backends.mkldnn.is_available() and shape.in_channels > 1:
            unary = "relu" if has_relu else None
            torch.ops.mkldnn._convolution_pointwise_.binary(
                out.zero_(), x, weight, bias, *geometry, "add", 1.0, unary, [], None
            )  # fmt: skip
            if mask is not None:
                pack_signs_into(out, mask)
            return
        padding, stride, dilation, groups = geometry
        if shape.in_channels == 1:
            # x has both layouts; with the strides of channels_last some geometries come out wrong (torch 2.13).
            height, width = shape.in_size
            x = x.as_strided(x.shape, (height * width, height * width, width, 1))
        out.copy_(torch.convolution(x, weight, bias, stride, padding, dilation, False, (0, 0), groups))
        finish_output(out, None, has_relu, mask)

    def backward_data(
        self, shape: ConvolutionShape, ct: Tensor, weight: Tensor, ct_x: Tensor, workspace: Tensor, *,
        mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.backward(shape, ct, None, weight, ct_x, None, None, workspace, mask=mask)

    def backward_weight(
        self, shape: ConvolutionShape, ct: Tensor, x: Tensor, ct_weight: Tensor, workspace: Tensor, *,
        ct_bias: Tensor | None = None, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.backward(shape, ct, x, ct_weight, None, ct_weight, ct_bias, workspace, mask=mask)

    def backward(
        self, shape: ConvolutionShape, ct: Tensor, x: Tensor | None, weight: Tensor, ct_x: Tensor | None,
        ct_weight: Tensor | None, ct_bias: Tensor | None, workspace: Tensor, *, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        if mask is not None:
            pieces = Workspace(workspace)
            sums = pieces.take_floats(torch.get_num_threads(), shape.out_channels)
            masked = pieces.take_floats(ct.numel()).as_strided(ct.shape, ct.stride())
            mask_cotangent(ct, mask, masked, None, sums)
            ct = masked
        # Without the weights' cotangent only the sizes of x are read, so any memory of that size will do.
        factor = x if x is not None else ct_x
        assert factor is not None
        wanted = [ct_x is not None, ct_weight is not None, ct_bias is not None]
        results = torch.ops.aten.convolution_backward(
            ct, factor, weight, [shape.out_channels], shape.stride, shape.padding, shape.dilation, False, (0, 0),
            shape.groups, wanted,
        )  # fmt: skip
        for given, result in zip((ct_x, ct_weight, ct_bias), results, strict=True):
            if given is not None:
                given.copy_(result)
