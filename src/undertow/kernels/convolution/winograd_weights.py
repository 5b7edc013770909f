"""Winograd's transforms of the weights, and of their cotangent, between PyTorch's layout and panels.

In and out: addresses and sizes (integers). Weights are [out, in, 3, 3], contiguous. Transformed weights are
[panel of 32 columns][frequency][term][32], as the product reads them. For the forward pass the columns are the output
channels and the terms the input channels. For the cotangent of the input it is the other way round, with the 3 x 3
rotated by half a turn. See winograd_tiles for the matrices.
"""

from __future__ import annotations

from typing import Any

import numba

from undertow.kernels.compiler import cached_njit
from undertow.kernels.convolution.products import PANEL, PANEL_BYTES, ROWS
from undertow.kernels.vectors import load, load_element, store, store_element

# For one thread: the vectors between the two passes of a transform, of tiles (36) or of weights (9 + 18).
SCRATCH_BYTES = 64 * 36


@numba.njit(forceinline=True, error_model="numpy")
def _weight_4(g0: Any, g1: Any, g2: Any) -> Any:
    # G for m = 2: g0;  (g0 + g2 +- g1) / 2;  g2
    outer, inner = (g0 + g2) * 0.5, g1 * 0.5
    return g0, outer + inner, outer - inner, g2


@numba.njit(forceinline=True, error_model="numpy")
def _weight_6(g0: Any, g1: Any, g2: Any) -> Any:
    # G for m = 4: g0 / 4;  -(g0 + g2 +- g1) / 6;  (g0 + 4 g2 +- 2 g1) / 24;  g2
    outer_one, inner_one = (g0 + g2) * (-1 / 6), g1 * (-1 / 6)
    outer_two, inner_two = g0 * (1 / 24) + g2 * (1 / 6), g1 * (1 / 12)
    return g0 * 0.25, outer_one + inner_one, outer_one - inner_one, outer_two + inner_two, outer_two - inner_two, g2


@numba.njit(forceinline=True, error_model="numpy")
def _weight_4_adjoint(u0: Any, u1: Any, u2: Any, u3: Any) -> Any:
    half = (u1 + u2) * 0.5
    return u0 + half, (u1 - u2) * 0.5, half + u3


@numba.njit(forceinline=True, error_model="numpy")
def _weight_6_adjoint(u0: Any, u1: Any, u2: Any, u3: Any, u4: Any, u5: Any) -> Any:
    sum_one, sum_two = u1 + u2, u3 + u4
    return (
        u0 * 0.25 - sum_one * (1 / 6) + sum_two * (1 / 24),
        (u2 - u1) * (1 / 6) + (u3 - u4) * (1 / 12),
        (sum_two - sum_one) * (1 / 6) + u5,
    )


@numba.njit(error_model="numpy")
def _transform_lanes(n: int, scratch: int, target: int, f_bytes: int) -> None:
    # scratch: the 9 taps, a vector each; after them the n x 3 intermediate.
    middle = scratch + 64 * 9
    for j in range(3):
        at = scratch + 64 * j
        g0, g1, g2 = load(at), load(at + 192), load(at + 384)
        if n == 6:
            t0, t1, t2, t3, t4, t5 = _weight_6(g0, g1, g2)
            store(middle + 64 * (12 + j), t4)
            store(middle + 64 * (15 + j), t5)
        else:
            t0, t1, t2, t3 = _weight_4(g0, g1, g2)
        store(middle + 64 * j, t0)
        store(middle + 64 * (3 + j), t1)
        store(middle + 64 * (6 + j), t2)
        store(middle + 64 * (9 + j), t3)
    for i in range(n):
        at, to = middle + 192 * i, target + n * i * f_bytes
        g0, g1, g2 = load(at), load(at + 64), load(at + 128)
        if n == 6:
            t0, t1, t2, t3, t4, t5 = _weight_6(g0, g1, g2)
            store(to + 4 * f_bytes, t4)
            store(to + 5 * f_bytes, t5)
        else:
            t0, t1, t2, t3 = _weight_4(g0, g1, g2)
        store(to, t0)
        store(to + f_bytes, t1)
        store(to + 2 * f_bytes, t2)
        store(to + 3 * f_bytes, t3)


@numba.njit(error_model="numpy")
def transform_weight_panel(
    n: int, weight: int, num_columns: int, column_bytes: int, num_terms: int, term_bytes: int, is_rotated: bool,
    panel: int, target: int, scratch: int,
) -> None:  # fmt: skip
    """U = G g G^T for one panel, [frequency][term][32]; `column_bytes` and `term_bytes` are strides in `weight`."""
    for half in range(2):
        first = PANEL * panel + 16 * half
        num_lanes = max(0, min(16, num_columns - first))
        for tap in range(9):
            for lane in range(num_lanes, 16):
                store_element(scratch + 64 * tap + 4 * lane, numba.float32(0))
        for term in range(num_terms):
            for lane in range(num_lanes):
                at = weight + (first + lane) * column_bytes + term * term_bytes
                for tap in range(9):
                    to = 8 - tap if is_rotated else tap
                    store_element(scratch + 64 * to + 4 * lane, load_element(at + 4 * tap))
            _transform_lanes(n, scratch, target + term * PANEL_BYTES + 64 * half, num_terms * PANEL_BYTES)


@cached_njit(parallel=True, error_model="numpy")
def transform_weight(
    n: int, weight: int, num_columns: int, column_bytes: int, num_terms: int, term_bytes: int, is_rotated: bool,
    target: int, scratch: int,
) -> None:  # fmt: skip
    """U of all panels, [panel][frequency][term][32]."""
    for panel in numba.prange((num_columns + PANEL - 1) // PANEL):
        address = target + panel * n * n * num_terms * PANEL_BYTES
        own = scratch + numba.get_thread_id() * SCRATCH_BYTES
        transform_weight_panel(
            n, weight, num_columns, column_bytes, num_terms, term_bytes, is_rotated, panel, address, own
        )


@numba.njit(error_model="numpy")
def _gather_lanes(n: int, source: int, f_bytes: int, scratch: int) -> None:
    # g = G^T U G; scratch: the 3 x n intermediate from vector 9 on, the 9 taps before it.
    middle = scratch + 64 * 9
    for j in range(n):
        at, step = source + j * f_bytes, n * f_bytes
        u0, u1, u2, u3 = load(at), load(at + step), load(at + 2 * step), load(at + 3 * step)
        if n == 6:
            g0, g1, g2 = _weight_6_adjoint(u0, u1, u2, u3, load(at + 4 * step), load(at + 5 * step))
        else:
            g0, g1, g2 = _weight_4_adjoint(u0, u1, u2, u3)
        store(middle + 64 * j, g0)
        store(middle + 64 * (n + j), g1)
        store(middle + 64 * (2 * n + j), g2)
    for i in range(3):
        at = middle + 64 * n * i
        u0, u1, u2, u3 = load(at), load(at + 64), load(at + 128), load(at + 192)
        if n == 6:
            g0, g1, g2 = _weight_6_adjoint(u0, u1, u2, u3, load(at + 256), load(at + 320))
        else:
            g0, g1, g2 = _weight_4_adjoint(u0, u1, u2, u3)
        store(scratch + 64 * 3 * i, g0)
        store(scratch + 64 * (3 * i + 1), g1)
        store(scratch + 64 * (3 * i + 2), g2)


@numba.njit(error_model="numpy")
def gather_weight_panel(
    n: int, source: int, f_bytes: int, num_out: int, num_in: int, panel: int, target: int, scratch: int
) -> None:
    """ct_g = G^T ct_U G for one panel of output channels, [frequency][input channel][32], into [out, in, 3, 3]."""
    for half in range(2):
        first = PANEL * panel + 16 * half
        for term in range(num_in):
            _gather_lanes(n, source + 64 * half + term * PANEL_BYTES, f_bytes, scratch)
            for lane in range(min(16, num_out - first)):
                to = target + 36 * ((first + lane) * num_in + term)
                for tap in range(9):
                    store_element(to + 4 * tap, load_element(scratch + 64 * tap + 4 * lane))


@cached_njit(parallel=True, error_model="numpy")
def gather_weight_cotangent(
    n: int, source: int, num_sums: int, sum_bytes: int, num_out: int, num_in: int, target: int, scratch: int
) -> None:
    """ct_g from `num_sums` partial ct_U, added up in order; each [panel][frequency][input channel][32]."""
    num_rows = (num_in + ROWS - 1) // ROWS * ROWS
    panel_bytes = n * n * num_rows * PANEL_BYTES
    for panel in numba.prange((num_out + PANEL - 1) // PANEL):
        first = source + panel * panel_bytes
        for part in range(1, num_sums):
            for offset in range(0, panel_bytes, 64):
                store(first + offset, load(first + offset) + load(first + part * sum_bytes + offset))
        own = scratch + numba.get_thread_id() * SCRATCH_BYTES
        gather_weight_panel(n, first, num_rows * PANEL_BYTES, num_out, num_in, panel, target, own)
