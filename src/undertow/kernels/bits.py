"""Masks at one bit per element, and what is computed from them. CPU loops in Numba; tensors in, tensors out.

All work on the elements in the order of memory, so arguments that belong together must have the same dense strides.
Bit i of byte b stands for element 8 b + i. Writes are EXACT: a masked element is +0.0, as PyTorch's kernels write it.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from undertow.kernels.compiler import numba
from undertow.kernels.threads import run_parallel


def _flat(tensor: torch.Tensor) -> Any:
    """The elements in the order of memory, as a NumPy array over the same memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).detach().numpy()


def num_packed_bytes(num_elements: int) -> int:
    """Bytes that hold one bit per element."""
    return (num_elements + 7) // 8


@numba.njit(parallel=True, cache=True)
def _pack_signs(elements: Any, packed: Any) -> None:
    num_full = elements.size // 8
    for byte in numba.prange(num_full):
        bits = 0
        for bit in range(8):
            # A NaN is not <= 0: PyTorch lets the cotangent through there.
            bits |= (not (elements[8 * byte + bit] <= 0)) << bit
        packed[byte] = bits
    if num_full < packed.size:
        bits = 0
        for index in range(8 * num_full, elements.size):
            bits |= (not (elements[index] <= 0)) << (index - 8 * num_full)
        packed[num_full] = bits


@numba.njit(parallel=True, cache=True)
def _select_by_bits(elements: Any, packed: Any, selected: Any) -> None:
    num_full = elements.size // 8
    for byte in numba.prange(num_full):
        bits = packed[byte]
        for bit in range(8):
            index = 8 * byte + bit
            selected[index] = elements[index] if (bits >> bit) & 1 else 0
    for index in range(8 * num_full, elements.size):
        selected[index] = elements[index] if (packed[num_full] >> (index - 8 * num_full)) & 1 else 0


def pack_signs(tensor: torch.Tensor) -> torch.Tensor:
    """One bit per element: whether it is not <= 0."""
    packed = torch.empty(num_packed_bytes(tensor.numel()), dtype=torch.uint8)
    run_parallel(_pack_signs, _flat(tensor), packed.numpy())
    return packed


def select_by_bits(tensor: torch.Tensor, packed: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The elements whose bit is set, and 0 elsewhere; `strides` are those of the tensor that was packed."""
    selected = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
    if tensor.stride() != strides:
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
    run_parallel(_select_by_bits, _flat(tensor), packed.numpy(), _flat(selected))
    return selected


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """One bit per element of a boolean tensor."""
    packed = torch.empty(num_packed_bytes(mask.numel()), dtype=torch.uint8)
    packed.numpy()[:] = numpy.packbits(_flat(mask), bitorder="little")
    return packed


def unpack_mask(packed: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The boolean tensor that was packed."""
    mask = torch.empty_strided(shape, strides, dtype=torch.bool)
    _flat(mask)[:] = numpy.unpackbits(packed.numpy(), count=mask.numel(), bitorder="little").view(numpy.bool_)
    return mask
