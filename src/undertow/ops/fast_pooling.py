"""Max pooling of channels_last activations for the maxima alone, without the eight bytes per element of the indices."""

from __future__ import annotations

import torch
from torch import Tensor

from undertow.kernels.max_pool import max_pool_forward
from undertow.ops.own import OwnOperation

Pair = tuple[int, int]


def _pool(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, out_size: Pair) -> Tensor:
    y = torch.empty((*x.shape[:2], *out_size), memory_format=torch.channels_last)
    codes = torch.empty_like(y, dtype=torch.uint8)
    rows, out, winners = (item.permute(0, 2, 3, 1) for item in (x, y, codes))
    max_pool_forward(rows, kernel, stride, padding, dilation, out, winners)
    return y


# (x, kernel, stride, padding, dilation, size of an output plane) -> y
MAX_POOL = OwnOperation("max_pool.maxima", _pool)
