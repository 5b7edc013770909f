"""What layers that evaluate from coded weights have in common: the shape of the layer they stand for, and its weight.

In: a linear or convolutional layer and its weight as a CodedTensor. Out: a module that takes the same inputs and holds
the weight in its small form alone. It evaluates and does not train: no gradient passes through it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from undertow.coding.tensors import CodedTensor
from undertow.errors import CallError

Layer = nn.Linear | nn.Conv2d


class Window(NamedTuple):
    """How the filters of a convolution move over an image."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def span(self) -> tuple[int, int]:
        """The pixels from a window's first tap to its last."""
        return self.dilation[0] * (self.kernel[0] - 1) + 1, self.dilation[1] * (self.kernel[1] - 1) + 1

    def fits(self, height: int, width: int) -> bool:
        """Whether an image has room for it."""
        return height + 2 * self.pad[0] >= self.span[0] and width + 2 * self.pad[1] >= self.span[1]


def window_of(layer: nn.Conv2d) -> Window | None:
    """The window of a layer, or None where it pads with something else than as many zeros on both sides."""
    if layer.padding_mode != "zeros":
        return None
    kernel, stride, dilation = (_pair(item) for item in (layer.kernel_size, layer.stride, layer.dilation))
    if layer.padding == "valid":
        pad = (0, 0)
    elif layer.padding == "same":
        spans = [dilation[dim] * (kernel[dim] - 1) for dim in range(2)]
        if spans[0] % 2 or spans[1] % 2:
            return None
        pad = (spans[0] // 2, spans[1] // 2)
    else:
        assert not isinstance(layer.padding, str)
        pad = _pair(layer.padding)
    return Window(kernel, stride, pad, dilation, layer.groups)


class SmallLayer(nn.Module, ABC):
    """A layer that holds its weight in a small form."""

    form: str  # what the form is called

    def __init__(self, layer: Layer, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.window = window_of(layer) if isinstance(layer, nn.Conv2d) else None
        bias = torch.zeros(shape[0]) if layer.bias is None else layer.bias.detach().clone()
        self.register_buffer("bias", bias)
        self.bias: Tensor

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """The layer's output for x [batch, features] or [batch, channels, height, width]."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """The bytes that the weight takes in memory, and that one evaluation reads."""

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The dense weight, made when it is asked for: for code that reads a layer's weight itself."""

    def forward(self, input: Tensor) -> Tensor:
        """What the layer it stands for would give, without a gradient."""
        if input.dtype is not torch.float32 or input.device.type != "cpu":
            raise CallError(
                f"a layer in the {self.form} form evaluates float32 on the CPU; its input is {input.dtype} on "
                f"{input.device}"
            )
        x = input.detach()
        if self.window is None:
            self._check(x.ndim >= 1 and x.shape[-1] == self.shape[1], x, f"[..., {self.shape[1]}]")
            rows = x.reshape(-1, self.shape[1])
            return self._multiply_some(rows).reshape(*x.shape[:-1], self.shape[0])
        channels = self.shape[1] * self.window.groups
        fits = x.ndim in (3, 4) and x.shape[-3] == channels and self.window.fits(x.shape[-2], x.shape[-1])
        self._check(fits, x, f"[..., {channels}, height, width] with room for a window of {self.window.span}")
        return self._multiply_some(x) if x.ndim == 4 else self._multiply_some(x[None])[0]

    def _multiply_some(self, x: Tensor) -> Tensor:
        # The loops want one row at least.
        return self.multiply(x) if len(x) else self.multiply(x.new_zeros(1, *x.shape[1:]))[:0]

    def _check(self, holds: bool, x: Tensor, wanted: str) -> None:
        if not holds:
            raise CallError(
                f"a layer with a weight of {list(self.shape)} takes inputs of {wanted}; found {list(x.shape)}"
            )

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.form}, {self.weight_bytes} bytes"


def row_scales(tensor: CodedTensor) -> Tensor:
    """The scale of each row, 1 where there are none."""
    return torch.ones(tensor.shape[0]) if tensor.scales is None else tensor.scales


def _pair(value: tuple[int, ...]) -> tuple[int, int]:
    first, second = value
    return first, second
