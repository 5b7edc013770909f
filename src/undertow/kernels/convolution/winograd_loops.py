"""Winograd's loops over blocks of tiles, and over panels of channels.

In and out: addresses and sizes (integers). There are two orders; neither has both factors transformed in memory:

- by blocks of tiles, for large images: each thread transforms, multiplies and transforms back its own block of tiles,
  which stays in its L2 cache. The transformed weights are made once and read by every block.
- by panels of 32 channels, for many channels on small images: the transformed input of all tiles is made once. Each
  thread transforms its own panel of weights, multiplies, and transforms back. The transformed weights, four times the
  size of the weights, are never all in memory.
"""

from __future__ import annotations

from typing import Any

import numba

from undertow.kernels.compiler import cached_njit
from undertow.kernels.convolution.products import PANEL, PANEL_BYTES, multiply_panel
from undertow.kernels.convolution.winograd_tiles import (
    tail_bits,
    transform_cotangent_tile,
    transform_input_tile,
    transform_output_tile,
)
from undertow.kernels.convolution.winograd_weights import SCRATCH_BYTES, gather_weight_panel, transform_weight_panel
from undertow.kernels.vectors import load, load_where, store_where, zeros


@numba.njit(forceinline=True, error_model="numpy")
def _tile_position(tile: int, grid: Any) -> Any:
    row = tile // grid[1]
    return row // grid[0], row % grid[0], tile % grid[1]


@numba.njit(forceinline=True, error_model="numpy")
def row_bytes(num_channels: int) -> int:
    """Bytes of one tile's row of channels; one vector more than needed, so that rows do not share cache sets."""
    return 4 * ((num_channels + PANEL - 1) // PANEL * PANEL + 16)


@numba.njit(error_model="numpy")
def _transform_inputs(
    n: int, source: int, gate: int, gate_kind: int, sizes: Any, padding: Any, grid: Any, first: int, num_tiles: int,
    target: int, f_bytes: int, scratch: int,
) -> None:  # fmt: skip
    for index in range(num_tiles):
        image, tile_y, tile_x = _tile_position(first + index, grid)
        y, x = tile_y * (n - 2) - padding[0], tile_x * (n - 2) - padding[1]
        address = target + index * row_bytes(sizes[2])
        transform_input_tile(n, source, gate, gate_kind, image, y, x, sizes, address, f_bytes, scratch)


@numba.njit(error_model="numpy")
def _transform_outputs(
    n: int, products: int, f_bytes: int, row: int, grid: Any, first: int, num_tiles: int, bias: int, residual: int,
    target: int, mask: int, has_relu: bool, sizes: Any, first_channel: int, last_channel: int, scratch: int,
) -> None:  # fmt: skip
    for index in range(num_tiles):
        image, tile_y, tile_x = _tile_position(first + index, grid)
        transform_output_tile(
            n, products + index * row, f_bytes, bias, residual, target, mask, has_relu, image, tile_y * (n - 2),
            tile_x * (n - 2), sizes, first_channel, last_channel, scratch,
        )  # fmt: skip


@numba.njit(error_model="numpy")
def _transform_cotangents(
    n: int, source: int, gate: int, gate_kind: int, sizes: Any, grid: Any, first: int, num_tiles: int,
    first_channel: int, last_channel: int, target: int, f_bytes: int, panel_bytes: int, scratch: int,
) -> None:  # fmt: skip
    for index in range(num_tiles):
        image, tile_y, tile_x = _tile_position(first + index, grid)
        transform_cotangent_tile(
            n, source, gate, gate_kind, image, tile_y * (n - 2), tile_x * (n - 2), sizes, first_channel, last_channel,
            target + index * PANEL_BYTES, f_bytes, panel_bytes, scratch,
        )  # fmt: skip


@cached_njit(parallel=True, error_model="numpy")
def transform_all_inputs(
    n: int, source: int, gate: int, gate_kind: int, sizes: Any, padding: Any, grid: Any, num_tiles: int, target: int,
    scratch: int,
) -> None:  # fmt: skip
    """V of all tiles."""
    for tile in numba.prange(num_tiles):
        _transform_inputs(
            n, source, gate, gate_kind, sizes, padding, grid, tile, 1, target + tile * row_bytes(sizes[2]),
            num_tiles * row_bytes(sizes[2]), scratch + numba.get_thread_id() * SCRATCH_BYTES,
        )  # fmt: skip


@cached_njit(parallel=True, error_model="numpy")
def convolve_blocks(
    n: int, source: int, gate: int, gate_kind: int, in_sizes: Any, padding: Any, grid: Any, num_tiles: int, block: int,
    weight: int, bias: int, residual: int, target: int, mask: int, has_relu: bool, out_sizes: Any,
    scratch: int, workspace: int,
) -> None:  # fmt: skip
    """By blocks of tiles: y = A^T (U V) A, with U of all panels in `weight`.

    Workspace: for each thread V and M = U V of a block.
    """
    num_in, num_out, num_f = in_sizes[2], out_sizes[2], n * n
    a_row, c_row = row_bytes(num_in), row_bytes(num_out)
    a_f, c_f = block * a_row, block * c_row
    a_bytes = num_f * a_f
    for index in numba.prange((num_tiles + block - 1) // block):
        thread = numba.get_thread_id()
        own_scratch, own = scratch + thread * SCRATCH_BYTES, workspace + thread * (a_bytes + num_f * c_f)
        first = index * block
        num_rows = min(block, num_tiles - first)
        a, c = own, own + a_bytes
        _transform_inputs(
            n, source, gate, gate_kind, in_sizes, padding, grid, first, num_rows, a, a_f, own_scratch
        )  # fmt: skip
        for f in range(num_f):
            for panel in range((num_out + PANEL - 1) // PANEL):
                multiply_panel(
                    a + f * a_f, a_row, 4, weight + (panel * num_f + f) * num_in * PANEL_BYTES,
                    c + f * c_f + panel * PANEL_BYTES, c_row, num_rows, num_in, False,
                )  # fmt: skip
        _transform_outputs(
            n, c, c_f, c_row, grid, first, num_rows, bias, residual, target, mask, has_relu, out_sizes, 0, num_out,
            own_scratch,
        )  # fmt: skip


@cached_njit(parallel=True, error_model="numpy")
def convolve_panels(
    n: int, transformed: int, num_in: int, grid: Any, num_tiles: int, weight: int, column_bytes: int, term_bytes: int,
    is_rotated: bool, prepared: int, bias: int, residual: int, target: int, mask: int, has_relu: bool, out_sizes: Any,
    scratch: int, workspace: int,
) -> None:  # fmt: skip
    """By panels of output channels: y = A^T (U V) A, with V of all tiles in `transformed`.

    U of all panels is in `prepared`, unless that is 0. Workspace: for each thread U (unless prepared) and M of a panel.
    """
    num_out, num_f = out_sizes[2], n * n
    a_row, c_row = row_bytes(num_in), PANEL_BYTES
    c_f = num_tiles * c_row + 64
    u_bytes = num_f * num_in * PANEL_BYTES
    b_bytes = u_bytes if prepared == 0 else 0
    for panel in numba.prange((num_out + PANEL - 1) // PANEL):
        thread = numba.get_thread_id()
        own_scratch, own = scratch + thread * SCRATCH_BYTES, workspace + thread * (b_bytes + num_f * c_f)
        b = own
        if prepared != 0:
            b = prepared + panel * u_bytes
        else:
            transform_weight_panel(
                n, weight, num_out, column_bytes, num_in, term_bytes, is_rotated, panel, own, own_scratch
            )  # fmt: skip
        for f in range(num_f):
            multiply_panel(
                transformed + f * num_tiles * a_row, a_row, 4, b + f * num_in * PANEL_BYTES,
                own + b_bytes + f * c_f, c_row, num_tiles, num_in, False,
            )  # fmt: skip
        _transform_outputs(
            n, own + b_bytes, c_f, c_row, grid, 0, num_tiles, bias, residual, target, mask, has_relu, out_sizes,
            PANEL * panel, min(num_out, PANEL * (panel + 1)), own_scratch,
        )  # fmt: skip


@numba.njit(error_model="numpy")
def _add_rows(source: int, panel_bytes: int, num_rows: int, num_channels: int, target: int, is_added: bool) -> None:
    for channel in range(0, num_channels, 16):
        bits = tail_bits(num_channels, channel)
        address = source + (channel >> 5) * panel_bytes + 4 * (channel & 31)
        total = zeros()
        for row in range(num_rows):
            total = total + load(address + row * PANEL_BYTES)
        if is_added:
            total = total + load_where(target + 4 * channel, bits)
        store_where(target + 4 * channel, total, bits)


@cached_njit(parallel=True, error_model="numpy")
def correlate_blocks(
    n: int, source: int, in_sizes: Any, padding: Any, cotangent: int, gate: int, gate_kind: int, out_sizes: Any,
    grid: Any, num_tiles: int, block: int, num_sums: int, target: int, ct_bias: int, scratch: int,
    workspace: int,
) -> None:  # fmt: skip
    """By blocks of tiles: ct_U = sum of V^T W, as `num_sums` partial sums [panel][frequency][input channel][32].

    The cotangent of the bias is the sum of W at the point (1, 1), where A ct A^T adds up the whole tile. Its partial
    sums, a row of `row_bytes` each, are at `ct_bias`. Workspace: for each partial sum V and W of a block.
    """
    num_in, num_out, num_f = in_sizes[2], out_sizes[2], n * n
    a_row, num_rows_c, num_panels = row_bytes(num_in), (num_in + 7) // 8 * 8, (num_out + PANEL - 1) // PANEL
    b_panel = block * PANEL_BYTES + 64
    a_f, b_f = block * a_row, num_panels * b_panel
    a_bytes = num_f * a_f
    c_f = num_rows_c * PANEL_BYTES
    num_blocks = (num_tiles + block - 1) // block
    for part in numba.prange(num_sums):
        own_scratch = scratch + numba.get_thread_id() * SCRATCH_BYTES
        own = workspace + part * (a_bytes + num_f * b_f)
        b, c = own + a_bytes, target + part * num_panels * num_f * c_f
        for index in range(part, num_blocks, num_sums):
            first, is_added = index * block, index >= num_sums
            num_rows = min(block, num_tiles - first)
            _transform_inputs(n, source, 0, 0, in_sizes, padding, grid, first, num_rows, own, a_f, own_scratch)
            _transform_cotangents(
                n, cotangent, gate, gate_kind, out_sizes, grid, first, num_rows, 0, num_out, b, b_f, b_panel,
                own_scratch,
            )  # fmt: skip
            for f in range(num_f):
                for panel in range(num_panels):
                    multiply_panel(
                        own + f * a_f, 4, a_row, b + f * b_f + panel * b_panel, c + (panel * num_f + f) * c_f,
                        PANEL_BYTES, num_rows_c, num_rows, is_added,
                    )  # fmt: skip
            if ct_bias != 0:
                _add_rows(
                    b + (n + 1) * b_f, b_panel, num_rows, num_out, ct_bias + part * row_bytes(num_out), is_added
                )  # fmt: skip


@cached_njit(parallel=True, error_model="numpy")
def correlate_panels(
    n: int, transformed: int, num_in: int, cotangent: int, gate: int, gate_kind: int, out_sizes: Any, grid: Any,
    num_tiles: int, target: int, ct_bias: int, scratch: int, workspace: int,
) -> None:  # fmt: skip
    """By panels of output channels: ct_g = G^T (sum of V^T W) G into [out, in, 3, 3], with V in `transformed`.

    Workspace: for each thread W and ct_U of a panel.
    """
    num_out, num_f = out_sizes[2], n * n
    a_row, num_rows_c = row_bytes(num_in), (num_in + 7) // 8 * 8
    b_f, c_f = num_tiles * PANEL_BYTES + 64, num_rows_c * PANEL_BYTES
    for panel in numba.prange((num_out + PANEL - 1) // PANEL):
        thread = numba.get_thread_id()
        own_scratch, b = scratch + thread * SCRATCH_BYTES, workspace + thread * num_f * (b_f + c_f)
        c = b + num_f * b_f
        first_channel, last_channel = PANEL * panel, min(num_out, PANEL * (panel + 1))
        _transform_cotangents(
            n, cotangent, gate, gate_kind, out_sizes, grid, 0, num_tiles, first_channel, last_channel, b, b_f, 0,
            own_scratch,
        )  # fmt: skip
        for f in range(num_f):
            multiply_panel(
                transformed + f * num_tiles * a_row, 4, a_row, b + f * b_f, c + f * c_f, PANEL_BYTES, num_rows_c,
                num_tiles, False,
            )  # fmt: skip
        if ct_bias != 0:
            _add_rows(
                b + (n + 1) * b_f, 0, num_tiles, last_channel - first_channel, ct_bias + 4 * first_channel, False
            )  # fmt: skip
        gather_weight_panel(n, c, c_f, num_out, num_in, panel, target, own_scratch)
