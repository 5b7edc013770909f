"""Winograd's transforms of one tile, 16 channels at a time.

In: addresses and sizes (integers). Out: written to memory. F(m x m, 3 x 3) of Lavin and Gray, "Fast Algorithms for
Convolutional Neural Networks" (CVPR 2016): with n = m + 2 and a tile d of n x n input elements,

    y = A^T [ (G g G^T) * (B^T d B) ] A        m x m outputs, * elementwise, then summed over the input channels

Transformed elements are ordered by frequency, f = n i + j. The interpolation points are 0, 1, -1 (and 2, -2 for m = 4)
and infinity. `n` is an argument, so one compiled loop serves both; the branch is the same for all tiles.

A transform takes one pass over columns and one over rows. Between them its elements are in `scratch`, n x n vectors for
each thread, which stay in the L1 cache.
"""

from __future__ import annotations

from typing import Any

import numba

from undertow.kernels.vectors import (
    keep_where,
    load,
    load_byte,
    load_where,
    not_at_most_zero,
    store,
    store_two_bytes,
    store_where,
)

VECTOR_BYTES = 64
NO_GATE, PACKED_GATE, VALUE_GATE = 0, 1, 2


@numba.njit(forceinline=True, error_model="numpy")
def _input_4(d0: Any, d1: Any, d2: Any, d3: Any) -> Any:
    # B^T for m = 2
    return d0 - d2, d1 + d2, d2 - d1, d1 - d3


@numba.njit(forceinline=True, error_model="numpy")
def _input_6(d0: Any, d1: Any, d2: Any, d3: Any, d4: Any, d5: Any) -> Any:
    # B^T for m = 4: 4 d0 - 5 d2 + d4;  (d4 - 4 d2) +- (d3 - 4 d1);  (d4 - d2) +- 2 (d3 - d1);  4 d1 - 5 d3 + d5
    even_one, odd_one = d4 - d2 * 4.0, d3 - d1 * 4.0
    even_two, odd_two = d4 - d2, (d3 - d1) * 2.0
    first, last = d0 * 4.0 - d2 * 5.0 + d4, d1 * 4.0 - d3 * 5.0 + d5
    return first, even_one + odd_one, even_one - odd_one, even_two + odd_two, even_two - odd_two, last


@numba.njit(forceinline=True, error_model="numpy")
def _output_4(m0: Any, m1: Any, m2: Any, m3: Any) -> Any:
    # A^T for m = 2
    return m0 + m1 + m2, m1 - m2 - m3


@numba.njit(forceinline=True, error_model="numpy")
def _output_6(m0: Any, m1: Any, m2: Any, m3: Any, m4: Any, m5: Any) -> Any:
    # A^T for m = 4
    sum_one, sum_two, difference_one, difference_two = m1 + m2, m3 + m4, m1 - m2, m3 - m4
    return (
        m0 + sum_one + sum_two,
        difference_one + difference_two * 2.0,
        sum_one + sum_two * 4.0,
        difference_one + difference_two * 8.0 + m5,
    )


@numba.njit(forceinline=True, error_model="numpy")
def _cotangent_4(y0: Any, y1: Any) -> Any:
    # A for m = 2
    return y0, y0 + y1, y0 - y1, y1 * -1.0


@numba.njit(forceinline=True, error_model="numpy")
def _cotangent_6(y0: Any, y1: Any, y2: Any, y3: Any) -> Any:
    # A for m = 4: y0;  (y0 + y2) +- (y1 + y3);  (y0 + 4 y2) +- (2 y1 + 8 y3);  y3
    even_one, odd_one = y0 + y2, y1 + y3
    even_two, odd_two = y0 + y2 * 4.0, y1 * 2.0 + y3 * 8.0
    return y0, even_one + odd_one, even_one - odd_one, even_two + odd_two, even_two - odd_two, y3


@numba.njit(forceinline=True, error_model="numpy")
def tail_bits(num_channels: int, channel: int) -> int:
    """One bit for each of the 16 channels from `channel` that exists."""
    return (1 << min(16, num_channels - channel)) - 1


@numba.njit(forceinline=True, error_model="numpy")
def gate_bits(gate: int, gate_kind: int, element: int, bits: int) -> int:
    """`bits`, cleared where the ReLU blocks the cotangent of the elements from `element` on."""
    if gate_kind == PACKED_GATE:
        byte, shift = gate + (element >> 3), element & 7
        word = load_byte(byte)
        if bits >> (8 - shift):
            word |= load_byte(byte + 1) << 8
        if bits >> (16 - shift):
            word |= load_byte(byte + 2) << 16
        return bits & (word >> shift)
    if gate_kind == VALUE_GATE:
        return bits & not_at_most_zero(load_where(gate + 4 * element, bits))
    return bits


@numba.njit(forceinline=True, error_model="numpy")
def _load_pixel(source: int, gate: int, gate_kind: int, element: int, bits: int) -> Any:
    # Without bits nothing is read, so `element` may be outside the image.
    if gate_kind != NO_GATE and bits != 0:
        bits = gate_bits(gate, gate_kind, element, bits)
    return load_where(source + 4 * element, bits)


@numba.njit(forceinline=True, error_model="numpy")
def _bits_inside(position: int, size: int) -> int:
    """All bits where the row or column exists, none otherwise."""
    return 0xFFFF if 0 <= position < size else 0


@numba.njit(error_model="numpy")
def transform_input_tile(
    n: int, source: int, gate: int, gate_kind: int, image: int, y: int, x: int, sizes: Any, target: int, f_bytes: int,
    scratch: int,
) -> None:  # fmt: skip
    """V = B^T d B for all channels of the tile whose first row and column are y and x; 0 outside the image."""
    height, width, num_channels = sizes
    inside_0, inside_1, inside_2 = _bits_inside(y, height), _bits_inside(y + 1, height), _bits_inside(y + 2, height)
    inside_3, inside_4, inside_5 = _bits_inside(y + 3, height), _bits_inside(y + 4, height), _bits_inside(y + 5, height)
    step, row_bytes = width * num_channels, VECTOR_BYTES * n
    corner = ((image * height + y) * width + x) * num_channels
    for channel in range(0, num_channels, 16):
        tail = tail_bits(num_channels, channel)
        for j in range(n):
            at, bits = scratch + VECTOR_BYTES * j, tail & _bits_inside(x + j, width)
            element = corner + j * num_channels + channel
            d0 = _load_pixel(source, gate, gate_kind, element, bits & inside_0)
            d1 = _load_pixel(source, gate, gate_kind, element + step, bits & inside_1)
            d2 = _load_pixel(source, gate, gate_kind, element + 2 * step, bits & inside_2)
            d3 = _load_pixel(source, gate, gate_kind, element + 3 * step, bits & inside_3)
            if n == 6:
                d4 = _load_pixel(source, gate, gate_kind, element + 4 * step, bits & inside_4)
                d5 = _load_pixel(source, gate, gate_kind, element + 5 * step, bits & inside_5)
                t0, t1, t2, t3, t4, t5 = _input_6(d0, d1, d2, d3, d4, d5)
                store(at + 4 * row_bytes, t4)
                store(at + 5 * row_bytes, t5)
            else:
                t0, t1, t2, t3 = _input_4(d0, d1, d2, d3)
            store(at, t0)
            store(at + row_bytes, t1)
            store(at + 2 * row_bytes, t2)
            store(at + 3 * row_bytes, t3)
        for i in range(n):
            _second_input_pass(n, scratch + VECTOR_BYTES * n * i, target + n * i * f_bytes + 4 * channel, f_bytes)


@numba.njit(forceinline=True, error_model="numpy")
def _second_input_pass(n: int, row: int, target: int, f_bytes: int) -> None:
    d0, d1, d2, d3 = load(row), load(row + 64), load(row + 128), load(row + 192)
    if n == 6:
        t0, t1, t2, t3, t4, t5 = _input_6(d0, d1, d2, d3, load(row + 256), load(row + 320))
        store(target + 4 * f_bytes, t4)
        store(target + 5 * f_bytes, t5)
    else:
        t0, t1, t2, t3 = _input_4(d0, d1, d2, d3)
    store(target, t0)
    store(target + f_bytes, t1)
    store(target + 2 * f_bytes, t2)
    store(target + 3 * f_bytes, t3)


@numba.njit(error_model="numpy")
def transform_cotangent_tile(
    n: int, source: int, gate: int, gate_kind: int, image: int, y: int, x: int, sizes: Any, first: int, last: int,
    target: int, f_bytes: int, panel_bytes: int, scratch: int,
) -> None:  # fmt: skip
    """W = A ct A^T, the adjoint of the output's transform, for the channels from first to last, in panels of 32."""
    height, width, num_channels = sizes
    inside_1, inside_2, inside_3 = _bits_inside(y + 1, height), _bits_inside(y + 2, height), _bits_inside(y + 3, height)
    step, row_bytes = width * num_channels, VECTOR_BYTES * (n - 2)
    corner = ((image * height + y) * width + x) * num_channels
    for channel in range(first, last, 16):
        tail = tail_bits(num_channels, channel)
        for j in range(n - 2):
            at, bits = scratch + VECTOR_BYTES * j, tail & _bits_inside(x + j, width)
            element = corner + j * num_channels + channel
            y0 = _load_pixel(source, gate, gate_kind, element, bits)
            y1 = _load_pixel(source, gate, gate_kind, element + step, bits & inside_1)
            if n == 6:
                y2 = _load_pixel(source, gate, gate_kind, element + 2 * step, bits & inside_2)
                y3 = _load_pixel(source, gate, gate_kind, element + 3 * step, bits & inside_3)
                t0, t1, t2, t3, t4, t5 = _cotangent_6(y0, y1, y2, y3)
                store(at + 4 * row_bytes, t4)
                store(at + 5 * row_bytes, t5)
            else:
                t0, t1, t2, t3 = _cotangent_4(y0, y1)
            store(at, t0)
            store(at + row_bytes, t1)
            store(at + 2 * row_bytes, t2)
            store(at + 3 * row_bytes, t3)
        address = target + ((channel - first) >> 5) * panel_bytes + 4 * ((channel - first) & 31)
        for i in range(n):
            row, to = scratch + row_bytes * i, address + n * i * f_bytes
            if n == 6:
                t0, t1, t2, t3, t4, t5 = _cotangent_6(load(row), load(row + 64), load(row + 128), load(row + 192))
                store(to + 4 * f_bytes, t4)
                store(to + 5 * f_bytes, t5)
            else:
                t0, t1, t2, t3 = _cotangent_4(load(row), load(row + 64))
            store(to, t0)
            store(to + f_bytes, t1)
            store(to + 2 * f_bytes, t2)
            store(to + 3 * f_bytes, t3)


@numba.njit(forceinline=True, error_model="numpy")
def _store_pixel(residual: int, target: int, mask: int, has_relu: bool, element: int, bits: int, value: Any) -> None:
    if bits != 0:
        if residual != 0:
            value = value + load_where(residual + 4 * element, bits)
        if has_relu:
            passed = not_at_most_zero(value)
            value = keep_where(value, passed)
            if mask != 0:
                store_two_bytes(mask + (element >> 3), passed)
        store_where(target + 4 * element, value, bits)


@numba.njit(error_model="numpy")
def transform_output_tile(
    n: int, products: int, f_bytes: int, bias: int, residual: int, target: int, mask: int, has_relu: bool, image: int,
    y: int, x: int, sizes: Any, first: int, last: int, scratch: int,
) -> None:  # fmt: skip
    """y = A^T M A + bias + residual, optionally ReLU and its mask, for the channels from first to last.

    `bias`, `residual` and `mask` are addresses, or 0. A mask needs whole vectors of channels.
    """
    height, width, num_channels = sizes
    m, step, row_bytes = n - 2, n * f_bytes, VECTOR_BYTES * n
    corner = ((image * height + y) * width + x) * num_channels
    for channel in range(first, last, 16):
        bits = tail_bits(num_channels, channel)
        for j in range(n):
            address, at = products + j * f_bytes + 4 * (channel - first), scratch + VECTOR_BYTES * j
            m0, m1, m2, m3 = load(address), load(address + step), load(address + 2 * step), load(address + 3 * step)
            if n == 6:
                t0, t1, t2, t3 = _output_6(m0, m1, m2, m3, load(address + 4 * step), load(address + 5 * step))
                store(at + 2 * row_bytes, t2)
                store(at + 3 * row_bytes, t3)
            else:
                t0, t1 = _output_4(m0, m1, m2, m3)
            store(at, t0)
            store(at + row_bytes, t1)
        shift = load_where(bias + 4 * channel, bits if bias != 0 else 0)
        for i in range(min(m, height - y)):
            row, element = scratch + row_bytes * i, corner + i * width * num_channels + channel
            m0, m1, m2, m3 = load(row), load(row + 64), load(row + 128), load(row + 192)
            inside = bits & _bits_inside(x + 1, width)
            if n == 6:
                t0, t1, t2, t3 = _output_6(m0, m1, m2, m3, load(row + 256), load(row + 320))
                two, three = element + 2 * num_channels, element + 3 * num_channels
                _store_pixel(residual, target, mask, has_relu, two, bits & _bits_inside(x + 2, width), t2 + shift)
                _store_pixel(residual, target, mask, has_relu, three, bits & _bits_inside(x + 3, width), t3 + shift)
            else:
                t0, t1 = _output_4(m0, m1, m2, m3)
            _store_pixel(residual, target, mask, has_relu, element, bits, t0 + shift)
            _store_pixel(residual, target, mask, has_relu, element + num_channels, inside, t1 + shift)
