"""Bias, ReLU and mask after a convolution's forward pass; masked cotangent and ct_bias before its backward passes.

In: dense channels_last tensors. Out: written into given tensors. This serves the algorithms that leave the product to a
library; the others do the same while an element is in a register. The mask has one bit per element in the order of
memory, as kernels/bits.py packs it, set where the output is not <= 0.
"""

from __future__ import annotations

import numba
import torch
from torch import Tensor

from undertow.kernels.bits import pack_signs_into
from undertow.kernels.compiler import cached_njit
from undertow.kernels.convolution.algorithm import Workspace
from undertow.kernels.convolution.winograd_tiles import NO_GATE, PACKED_GATE, VALUE_GATE, gate_bits, tail_bits
from undertow.kernels.threads import run_parallel
from undertow.kernels.vectors import (
    keep_where,
    load_where,
    not_at_most_zero,
    store_two_bytes,
    store_where,
    zeros,
)


def address_of(tensor: Tensor | None) -> int:
    """The address of the elements, or 0."""
    return 0 if tensor is None else tensor.data_ptr()


def gate_of(mask: Tensor | None) -> tuple[int, int]:
    """The address of what masks a cotangent, and what it is: packed bits, or the ReLU's output."""
    if mask is None:
        return 0, NO_GATE
    return mask.data_ptr(), PACKED_GATE if mask.dtype == torch.uint8 else VALUE_GATE


@numba.njit(error_model="numpy")
def finish_row(
    source: int, bias: int, residual: int, target: int, mask: int, has_relu: bool, first_element: int, first: int,
    num_channels: int,
) -> None:  # fmt: skip
    """Write the sums of one pixel to the target, with bias, residual, ReLU and mask.

    `bias`, `residual` and `mask` are addresses, or 0; `first` is the first channel, for the bias. The residual has the
    layout of the target. With a mask, the channels must fill whole vectors.
    """
    for channel in range(0, num_channels, 16):
        bits = tail_bits(num_channels, channel)
        element = first_element + channel
        value = load_where(source + 4 * channel, bits)
        if bias != 0:
            value = value + load_where(bias + 4 * (first + channel), bits)
        if residual != 0:
            value = value + load_where(residual + 4 * element, bits)
        if has_relu:
            passed = not_at_most_zero(value)
            value = keep_where(value, passed)
            if mask != 0:
                store_two_bytes(mask + (element >> 3), passed)
        store_where(target + 4 * element, value, bits)


@cached_njit(parallel=True, error_model="numpy")
def _finish_rows(out: int, num_pixels: int, num_channels: int, bias: int, mask: int, has_relu: bool) -> None:
    for pixel in numba.prange(num_pixels):
        first = pixel * num_channels
        finish_row(out + 4 * first, bias, 0, out, mask, has_relu, first, 0, num_channels)


def finish_output(out: Tensor, bias: Tensor | None, has_relu: bool, mask: Tensor | None) -> None:
    """Bias, ReLU and mask over a whole output, in place."""
    num_channels = out.shape[1]
    # If a pixel's channels do not fill vectors, two threads would write parts of the same byte of the mask.
    fused_mask = mask if num_channels % 16 == 0 else None
    if bias is not None or has_relu:
        run_parallel(
            _finish_rows, out.data_ptr(), out.numel() // num_channels, num_channels, address_of(bias),
            address_of(fused_mask), has_relu,
        )  # fmt: skip
    if mask is not None and fused_mask is None:
        pack_signs_into(out, mask)


@cached_njit(parallel=True, error_model="numpy")
def _mask_rows(
    ct: int, gate: int, gate_kind: int, num_pixels: int, num_channels: int, num_parts: int, target: int, sums: int
) -> None:
    for part in numba.prange(num_parts):
        first, last = part * num_pixels // num_parts, (part + 1) * num_pixels // num_parts
        for channel in range(0, num_channels, 16):
            bits = tail_bits(num_channels, channel)
            total = zeros()
            for pixel in range(first, last):
                element = pixel * num_channels + channel
                value = load_where(ct + 4 * element, gate_bits(gate, gate_kind, element, bits))
                if target != 0:
                    store_where(target + 4 * element, value, bits)
                total = total + value
            if sums != 0:
                store_where(sums + 4 * (part * num_channels + channel), total, bits)


def mask_cotangent(
    ct: Tensor, mask: Tensor | None, masked: Tensor | None, ct_bias: Tensor | None, sums: Tensor
) -> None:
    """Write the masked ct to `masked`, and its sum over the pixels to `ct_bias`; None where not wanted.

    `sums` is workspace: one row of channels per part. At most as many threads as rows can work.
    """
    num_channels = ct.shape[1]
    run_parallel(
        _mask_rows, ct.data_ptr(), *gate_of(mask), ct.numel() // num_channels, num_channels, sums.shape[0],
        address_of(masked), sums.data_ptr(),
    )  # fmt: skip
    if ct_bias is not None:
        torch.sum(sums, dim=0, out=ct_bias)


def masked_cotangent(ct: Tensor, mask: Tensor | None, ct_bias: Tensor | None, pieces: Workspace) -> Tensor:
    """The masked ct, in the workspace if there is a mask; its sum over the pixels is written to `ct_bias`."""
    if mask is None and ct_bias is None:
        return ct
    sums = pieces.take_floats(torch.get_num_threads(), ct.shape[1])
    masked = None if mask is None else pieces.take_floats(ct.numel()).as_strided(ct.shape, ct.stride())
    mask_cotangent(ct, mask, masked, ct_bias, sums)
    return ct if masked is None else masked
