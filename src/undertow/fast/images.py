"""Images as Undertow's own kernels read them: four dimensions, channels innermost in memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from undertow.ir import TensorType, Value
from undertow.kernels.compiler import HAS_NUMBA


def is_channels_last(kind: TensorType) -> bool:
    """Whether a four-dimensional tensor is dense with its channels innermost."""
    return len(kind.shape) == 4 and kind.strides == _channels_last_strides(kind.shape)


def is_float_image(x: Value, *others: Value | None) -> bool:
    """Whether Undertow's own kernels can run on x: it is dense channels_last on the CPU, and all are float32."""
    kind = x.tensor_type
    if not HAS_NUMBA:
        return False
    is_float = all(item.tensor_type.dtype is torch.float32 for item in (x, *others) if item is not None)
    return is_float and kind.device.type == "cpu" and is_channels_last(kind)


def as_channels_last(kind: TensorType) -> TensorType:
    """The same tensor with its channels innermost."""
    return replace(kind, strides=_channels_last_strides(kind.shape))


def _channels_last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    _, channels, height, width = shape
    return (channels * height * width, 1, channels * width, channels)
