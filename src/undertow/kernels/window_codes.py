"""The winner of a pooling window as one byte, its position inside the window, instead of PyTorch's eight.

In: PyTorch's indices, which are positions in the whole plane, and the geometry of the windows. Out: codes. And back.
"""

from __future__ import annotations

from typing import Any

import torch

from undertow.kernels.compiler import cached_njit, numba
from undertow.kernels.outputs import Out, given
from undertow.kernels.threads import run_parallel

Pair = tuple[int, int]


@cached_njit(parallel=True)
def _encode(indices: Any, codes: Any, width: int, kernel_width: int, stride: Any, padding: Any, dilation: Any) -> None:
    planes, out_height, out_width = indices.shape
    for plane in numba.prange(planes):
        for row in range(out_height):
            for column in range(out_width):
                index = indices[plane, row, column]
                down = (index // width - row * stride[0] + padding[0]) // dilation[0]
                right = (index % width - column * stride[1] + padding[1]) // dilation[1]
                codes[plane, row, column] = down * kernel_width + right


@cached_njit(parallel=True)
def _decode(codes: Any, indices: Any, width: int, kernel_width: int, stride: Any, padding: Any, dilation: Any) -> None:
    planes, out_height, out_width = indices.shape
    for plane in numba.prange(planes):
        for row in range(out_height):
            for column in range(out_width):
                code = codes[plane, row, column]
                down = row * stride[0] - padding[0] + (code // kernel_width) * dilation[0]
                right = column * stride[1] - padding[1] + (code % kernel_width) * dilation[1]
                indices[plane, row, column] = down * width + right


def encode_windows(
    indices: torch.Tensor,
    width: int,
    kernel_width: int,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    out: Out = None,
) -> torch.Tensor:
    """One byte per window; the pooled plane is `width` wide."""
    codes = given(out, 0, lambda: torch.empty(indices.shape, dtype=torch.uint8))
    run_parallel(_encode, _planes(indices), _planes(codes), width, kernel_width, stride, padding, dilation)
    return codes


def decode_windows(
    codes: torch.Tensor,
    width: int,
    kernel_width: int,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    out: Out = None,
) -> torch.Tensor:
    """PyTorch's indices from the codes."""
    indices = given(out, 0, lambda: torch.empty(codes.shape, dtype=torch.int64))
    run_parallel(_decode, _planes(codes), _planes(indices), width, kernel_width, stride, padding, dilation)
    return indices


def _planes(tensor: torch.Tensor) -> Any:
    return tensor.view(-1, *tensor.shape[-2:]).numpy()
