"""Convolution as a product of patches with weights, a block of pixels at a time.

In and out: addresses and sizes (integers). A patch is the row of all elements that one result pixel sums over, tap by
tap, channels innermost. A block of patches is gathered into the L2 cache, multiplied there, and overwritten by the next
block. The same loop serves the forward pass and the cotangent of the input: at tap i, position y of the result reads
position

    (y multiply + offset + i step) / divide        of the source, where that is a whole number inside the image

with (stride, -padding, dilation, 1) forward and (1, padding, -dilation, stride) for the cotangent. There a stride s
costs s^2 times too many products, since the zeros between are multiplied too.
"""

from __future__ import annotations

from typing import Any

import numba

from undertow.kernels.compiler import cached_njit
from undertow.kernels.convolution.epilogue import finish_row
from undertow.kernels.convolution.products import PANEL, PANEL_BYTES, ROWS, multiply_panel
from undertow.kernels.convolution.winograd_tiles import gate_bits, tail_bits
from undertow.kernels.vectors import (
    load,
    load_element,
    load_where,
    store,
    store_element,
    store_where,
    zeros,
)


@numba.njit(forceinline=True, error_model="numpy")
def patch_row_bytes(num_terms: int) -> int:
    """Bytes between patches: whole blocks of rows, and no power of two, since those share cache sets."""
    return 4 * ((num_terms + ROWS - 1) // ROWS * ROWS + 16)


@numba.njit(forceinline=True, error_model="numpy")
def _source_position(position: int, tap: int, rule: Any) -> int:
    multiply, offset, step, divide = rule
    numerator = position * multiply + offset + tap * step
    # A division would take longer than the rest of a tap.
    if divide == 1:
        return numerator
    return numerator // divide if numerator % divide == 0 else -1


@numba.njit(forceinline=True, error_model="numpy")
def _copy_span(source: int, gate: int, gate_kind: int, element: int, num_elements: int, target: int) -> None:
    for offset in range(0, num_elements, 16):
        bits = tail_bits(num_elements, offset)
        passed = gate_bits(gate, gate_kind, element + offset, bits)
        store_where(target + 4 * offset, load_where(source + 4 * (element + offset), passed), bits)


@numba.njit(forceinline=True, error_model="numpy")
def _clear_span(num_elements: int, target: int) -> None:
    for offset in range(0, num_elements, 16):
        store_where(target + 4 * offset, zeros(), tail_bits(num_elements, offset))


@numba.njit(error_model="numpy")
def gather_patches(
    source: int, gate: int, gate_kind: int, sizes: Any, first_channel: int, num_channels: int, result_size: Any,
    kernel: Any, rule_y: Any, rule_x: Any, first: int, num_pixels: int, target: int, row_bytes: int,
) -> None:  # fmt: skip
    """Copy the patches of the result pixels from `first` on, for some of the source's channels."""
    height, width, all_channels = sizes
    line, x = first // result_size[1], first % result_size[1]
    image, y = line // result_size[0], line % result_size[0]
    # Neighbouring taps are adjacent in memory: one copy for a whole row of the kernel is faster with few channels.
    is_span = rule_x[2] == 1 and rule_x[3] == 1 and num_channels == all_channels
    for index in range(num_pixels):
        address, left = target + index * row_bytes, _source_position(x, 0, rule_x)
        is_whole_span = is_span and left >= 0 and left + kernel[1] <= width
        for i in range(kernel[0]):
            source_y = _source_position(y, i, rule_y)
            line_pixel = (image * height + source_y) * width
            if source_y < 0 or source_y >= height:
                _clear_span(kernel[1] * num_channels, address)
                address += 4 * kernel[1] * num_channels
            elif is_whole_span:
                element, num_elements = (line_pixel + left) * all_channels, kernel[1] * num_channels
                _copy_span(source, gate, gate_kind, element, num_elements, address)
                address += 4 * num_elements
            else:
                for j in range(kernel[1]):
                    source_x = _source_position(x, j, rule_x)
                    if 0 <= source_x < width:
                        element = (line_pixel + source_x) * all_channels + first_channel
                        _copy_span(source, gate, gate_kind, element, num_channels, address)
                    else:
                        _clear_span(num_channels, address)
                    address += 4 * num_channels
        x += 1
        if x == result_size[1]:
            x, y = 0, y + 1
            if y == result_size[0]:
                y, image = 0, image + 1


@cached_njit(parallel=True, error_model="numpy")
def pack_weight(
    weight: int, num_groups: int, group_bytes: int, num_columns: int, column_bytes: int, num_channels: int,
    channel_bytes: int, num_taps: int, target: int,
) -> None:  # fmt: skip
    """Write the weights as the product reads them: [group][panel of 32 columns][tap, channel][32], padded with 0."""
    num_panels = (num_columns + PANEL - 1) // PANEL
    for index in numba.prange(num_groups * num_panels):
        group, panel = index // num_panels, index % num_panels
        address = target + index * num_taps * num_channels * PANEL_BYTES
        num_lanes = min(PANEL, num_columns - PANEL * panel)
        at = weight + group * group_bytes + PANEL * panel * column_bytes
        # 16 channels at a time, the nearer neighbours innermost, so that reads and writes touch few cache lines.
        for start in range(0, num_channels, 16):
            num_near = min(16, num_channels - start)
            for pair in range(num_near * PANEL):
                if column_bytes < channel_bytes:
                    channel, lane = start + pair // PANEL, pair % PANEL
                else:
                    channel, lane = start + pair % num_near, pair // num_near
                for tap in range(num_taps):
                    value = numba.float32(0)
                    if lane < num_lanes:
                        value = load_element(at + lane * column_bytes + channel * channel_bytes + 4 * tap)
                    store_element(address + (tap * num_channels + channel) * PANEL_BYTES + 4 * lane, value)


@cached_njit(parallel=True, error_model="numpy")
def convolve_patches(
    source: int, gate: int, gate_kind: int, sizes: Any, num_groups: int, result_sizes: Any, kernel: Any, rule_y: Any,
    rule_x: Any, num_pixels: int, block: int, is_gathered: bool, weight: int, bias: int, residual: int, target: int,
    mask: int, has_relu: bool, spread: Any, spread_size: Any, workspace: int,
) -> None:  # fmt: skip
    """Blocks of patches times packed weights. Without gathering, the pixels of the source are the patches.

    Result pixel (y, x) is written to pixel (y, x) times `spread` of an image of `spread_size`. Workspace: for each
    thread a block of patches (if gathered) and a block of their products.
    """
    num_in, num_out = sizes[2] // num_groups, result_sizes[2] // num_groups
    num_terms, num_panels = kernel[0] * kernel[1] * num_in, (num_out + PANEL - 1) // PANEL
    a_row, c_row = patch_row_bytes(num_terms), PANEL_BYTES * num_panels + 64
    a_bytes = block * a_row if is_gathered else 0
    for index in numba.prange((num_pixels + block - 1) // block):
        own = workspace + numba.get_thread_id() * (a_bytes + block * c_row)
        first = index * block
        num_rows = min(block, num_pixels - first)
        for group in range(num_groups):
            a, a_step = own, a_row
            if is_gathered:
                gather_patches(
                    source, gate, gate_kind, sizes, group * num_in, num_in, result_sizes, kernel, rule_y, rule_x, first,
                    num_rows, a, a_row,
                )  # fmt: skip
            else:
                a, a_step = source + 4 * (first * sizes[2] + group * num_in), 4 * sizes[2]
            for panel in range(num_panels):
                multiply_panel(
                    a, a_step, 4, weight + (group * num_panels + panel) * num_terms * PANEL_BYTES,
                    own + a_bytes + panel * PANEL_BYTES, c_row, num_rows, num_terms, False,
                )  # fmt: skip
            for row in range(num_rows):
                pixel = first + row
                if spread[0] != 1 or spread[1] != 1:
                    line, x = pixel // result_sizes[1], pixel % result_sizes[1]
                    image, y = line // result_sizes[0], line % result_sizes[0]
                    pixel = (image * spread_size[0] + y * spread[0]) * spread_size[1] + x * spread[1]
                finish_row(
                    own + a_bytes + row * c_row, bias, residual, target, mask, has_relu,
                    pixel * result_sizes[2] + group * num_out, group * num_out, num_out,
                )  # fmt: skip


@cached_njit(parallel=True, error_model="numpy")
def correlate_patches(
    source: int, sizes: Any, num_groups: int, kernel: Any, rule_y: Any, rule_x: Any, cotangent: int, gate: int,
    gate_kind: int, result_sizes: Any, num_pixels: int, block: int, is_gathered: bool, num_sums: int, target: int,
    ct_bias: int, workspace: int,
) -> None:  # fmt: skip
    """Patches^T times cotangents, as partial sums [part][group][panel][tap, channel][32].

    Partial sums for the bias go to `ct_bias` as [part][group][panel][32], unless it is 0. Workspace: for each partial
    sum a block of patches (if gathered) and a block of cotangents.
    """
    num_in, num_out = sizes[2] // num_groups, result_sizes[2] // num_groups
    num_terms, num_panels = kernel[0] * kernel[1] * num_in, (num_out + PANEL - 1) // PANEL
    num_rows_c = (num_terms + ROWS - 1) // ROWS * ROWS
    a_row, b_panel = patch_row_bytes(num_terms), block * PANEL_BYTES
    a_bytes = block * a_row if is_gathered else 0
    for part in numba.prange(num_sums):
        own = workspace + part * (a_bytes + num_panels * b_panel)
        for index in range(part, (num_pixels + block - 1) // block, num_sums):
            first, is_added = index * block, index >= num_sums
            num_rows = min(block, num_pixels - first)
            for group in range(num_groups):
                a, a_step = own, a_row
                if is_gathered:
                    gather_patches(
                        source, 0, 0, sizes, group * num_in, num_in, result_sizes, kernel, rule_y, rule_x, first,
                        num_rows, a, a_row,
                    )  # fmt: skip
                else:
                    a, a_step = source + 4 * (first * sizes[2] + group * num_in), 4 * sizes[2]
                for panel in range(num_panels):
                    b = own + a_bytes + panel * b_panel
                    first_channel = group * num_out + PANEL * panel
                    _gather_cotangents(
                        cotangent, gate, gate_kind, result_sizes[2], first_channel, min(PANEL, num_out - PANEL * panel),
                        first, num_rows, b,
                    )  # fmt: skip
                    position = (part * num_groups + group) * num_panels + panel
                    multiply_panel(
                        a, 4, a_step, b, target + position * num_rows_c * PANEL_BYTES, PANEL_BYTES, num_rows_c,
                        num_rows, is_added,
                    )  # fmt: skip
                    if ct_bias != 0:
                        _add_rows(b, num_rows, ct_bias + position * PANEL_BYTES, is_added)


@numba.njit(error_model="numpy")
def _gather_cotangents(
    cotangent: int, gate: int, gate_kind: int, all_channels: int, first_channel: int, num_channels: int, first: int,
    num_pixels: int, target: int,
) -> None:  # fmt: skip
    low, high = tail_bits(num_channels, 0), tail_bits(num_channels, 16) if num_channels > 16 else 0
    for index in range(num_pixels):
        element = (first + index) * all_channels + first_channel
        address = target + index * PANEL_BYTES
        store(address, load_where(cotangent + 4 * element, gate_bits(gate, gate_kind, element, low)))
        bits = high
        if high != 0:
            bits = gate_bits(gate, gate_kind, element + 16, high)
        store(address + 64, load_where(cotangent + 4 * element + 64, bits))


@numba.njit(error_model="numpy")
def _add_rows(source: int, num_rows: int, target: int, is_added: bool) -> None:
    low, high = zeros(), zeros()
    for row in range(num_rows):
        low = low + load(source + row * PANEL_BYTES)
        high = high + load(source + row * PANEL_BYTES + 64)
    if is_added:
        low, high = low + load(target), high + load(target + 64)
    store(target, low)
    store(target + 64, high)


@cached_njit(parallel=True, error_model="numpy")
def unpack_weight_cotangent(
    source: int, num_sums: int, num_groups: int, num_out: int, num_in: int, num_taps: int, target: int
) -> None:
    """Add the partial sums of the weights' cotangent, in order, into [out, in / groups, taps]."""
    num_panels, num_terms = (num_out + PANEL - 1) // PANEL, num_taps * num_in
    panel_bytes = (num_terms + ROWS - 1) // ROWS * ROWS * PANEL_BYTES
    for out in numba.prange(num_groups * num_out):
        group, column = out // num_out, out % num_out
        for term in range(num_terms):
            at = source + (group * num_panels + column // PANEL) * panel_bytes + term * PANEL_BYTES
            total = numba.float32(0)
            for part in range(num_sums):
                total += load_element(at + part * num_groups * num_panels * panel_bytes + 4 * (column % PANEL))
            tap, channel = term // num_in, term % num_in
            store_element(target + 4 * ((out * num_in + channel) * num_taps + tap), total)
