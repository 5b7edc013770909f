"""Masks at one bit per element, and what is computed from them: tensors in, tensors out, in Numba loops on the CPU.

All functions take elements in the order of memory, so arguments of one call must have the same dense strides. Bit i of
byte b stands for element 8 b + i. EXACT: a masked element is +0.0, as PyTorch's kernels write it.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from undertow.kernels.compiler import HAS_NUMBA, cached_njit, numba
from undertow.kernels.outputs import Out, given
from undertow.kernels.threads import run_parallel

if HAS_NUMBA:
    from undertow.kernels.vectors import (
        NUM_LANES,
        keep_where,
        load,
        load_byte,
        not_at_most_zero,
        store,
        store_two_bytes,
    )


def flat(tensor: torch.Tensor) -> Any:
    """The elements in the order of memory, as a NumPy array over the same memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).detach().numpy()


def num_packed_bytes(num_elements: int) -> int:
    """How many bytes one bit per element takes."""
    return (num_elements + 7) // 8


@cached_njit(parallel=True)
def _pack_signs(elements: Any, packed: Any) -> None:
    num_full = elements.size // 8
    for byte in numba.prange(num_full):
        bits = 0
        for bit in range(8):
            # A NaN is not <= 0: PyTorch passes the cotangent on there.
            bits |= (not (elements[8 * byte + bit] <= 0)) << bit
        packed[byte] = bits
    if num_full < packed.size:
        bits = 0
        for index in range(8 * num_full, elements.size):
            bits |= (not (elements[index] <= 0)) << (index - 8 * num_full)
        packed[num_full] = bits


@cached_njit(parallel=True, error_model="numpy")
def _pack_vectors(elements: int, packed: int, num_vectors: int) -> None:
    for index in numba.prange(num_vectors):
        store_two_bytes(packed + 2 * index, not_at_most_zero(load(elements + 64 * index)))


@cached_njit(parallel=True)
def _select_by_bits(elements: Any, packed: Any, selected: Any) -> None:
    num_full = elements.size // 8
    for byte in numba.prange(num_full):
        bits = packed[byte]
        for bit in range(8):
            index = 8 * byte + bit
            selected[index] = elements[index] if (bits >> bit) & 1 else 0
    for index in range(8 * num_full, elements.size):
        selected[index] = elements[index] if (packed[num_full] >> (index - 8 * num_full)) & 1 else 0


@cached_njit(parallel=True, error_model="numpy")
def _select_vectors(elements: int, packed: int, selected: int, num_vectors: int) -> None:
    for index in numba.prange(num_vectors):
        bits = load_byte(packed + 2 * index) | load_byte(packed + 2 * index + 1) << 8
        store(selected + 64 * index, keep_where(load(elements + 64 * index), bits))


def _num_vectors(tensor: torch.Tensor) -> int:
    """How many whole vectors the elements fill. The loops over single elements do the rest.

    LLVM does not vectorise these loops: packing 100 M elements takes them 55 ms, and vectors 19 ms.
    """
    return tensor.numel() // NUM_LANES if tensor.dtype is torch.float32 else 0


def pack_signs(tensor: torch.Tensor, out: Out = None) -> torch.Tensor:
    """One bit per element: whether it is not <= 0."""
    packed = given(out, 0, lambda: torch.empty(num_packed_bytes(tensor.numel()), dtype=torch.uint8))
    pack_signs_into(tensor, packed)
    return packed


def pack_signs_into(tensor: torch.Tensor, packed: torch.Tensor) -> None:
    """`pack_signs` into given bytes."""
    num_vectors = _num_vectors(tensor)
    run_parallel(_pack_vectors, tensor.data_ptr(), packed.data_ptr(), num_vectors)
    done = NUM_LANES * num_vectors
    if done < tensor.numel():
        run_parallel(_pack_signs, flat(tensor)[done:], packed.numpy()[done // 8 :])


def select_by_bits(
    tensor: torch.Tensor, packed: torch.Tensor, strides: tuple[int, ...], out: Out = None
) -> torch.Tensor:
    """The elements whose bit is set, and 0 elsewhere; the tensor that was packed had these `strides`."""
    selected = given(out, 0, lambda: torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype))
    if tensor.stride() != strides:
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
    num_vectors = _num_vectors(tensor)
    run_parallel(_select_vectors, tensor.data_ptr(), packed.data_ptr(), selected.data_ptr(), num_vectors)
    done = NUM_LANES * num_vectors
    if done < tensor.numel():
        run_parallel(_select_by_bits, flat(tensor)[done:], packed.numpy()[done // 8 :], flat(selected)[done:])
    return selected


def pack_mask(mask: torch.Tensor, out: Out = None) -> torch.Tensor:
    """One bit per element of a boolean tensor."""
    packed = given(out, 0, lambda: torch.empty(num_packed_bytes(mask.numel()), dtype=torch.uint8))
    packed.numpy()[:] = numpy.packbits(flat(mask), bitorder="little")
    return packed


def unpack_mask(
    packed: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], out: Out = None
) -> torch.Tensor:
    """The boolean tensor that was packed."""
    mask = given(out, 0, lambda: torch.empty_strided(shape, strides, dtype=torch.bool))
    flat(mask)[:] = numpy.unpackbits(packed.numpy(), count=mask.numel(), bitorder="little").view(numpy.bool_)
    return mask
