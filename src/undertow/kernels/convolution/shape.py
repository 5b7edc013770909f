"""The sizes of one convolution.

In: the arguments of `torch.nn.functional.conv2d`. Out: the sizes that follow. No tensors, no choice of algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvolutionShape:
    """A two-dimensional convolution; pairs are (height, width)."""

    batch: int
    in_channels: int
    out_channels: int
    in_size: Pair
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @property
    def out_size(self) -> Pair:
        """(in + 2 padding - dilation (kernel - 1) - 1) // stride + 1, in both directions."""
        height, width = (
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in zip(
                self.in_size, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return height, width

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        """The input's shape, with PyTorch's order of dims."""
        return (self.batch, self.in_channels, *self.in_size)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """The weights' shape, with PyTorch's order of dims."""
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """The output's shape, with PyTorch's order of dims."""
        return (self.batch, self.out_channels, *self.out_size)

    @property
    def num_taps(self) -> int:
        """Positions of the kernel."""
        return self.kernel[0] * self.kernel[1]

    @property
    def num_out_pixels(self) -> int:
        """Output positions of the whole batch."""
        return self.batch * self.out_size[0] * self.out_size[1]

    @property
    def flops(self) -> int:
        """One pass of the direct algorithm: a multiplication and an addition per term. All three passes are equal."""
        return 2 * self.num_out_pixels * self.out_channels * (self.in_channels // self.groups) * self.num_taps


def shape_of(
    x: Tensor, weight: Tensor, stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1), groups: int = 1
) -> ConvolutionShape:
    """The shape of a convolution of two tensors."""
    return shape_from(tuple(x.shape), tuple(weight.shape), stride, padding, dilation, groups)


def shape_from(
    x_shape: tuple[int, ...], weight_shape: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> ConvolutionShape:
    """The shape of a convolution of tensors of these sizes."""
    batch, in_channels, height, width = x_shape
    out_channels, _, *kernel = weight_shape
    return ConvolutionShape(
        batch, in_channels, out_channels, (height, width), (kernel[0], kernel[1]), stride, padding, dilation, groups
    )
