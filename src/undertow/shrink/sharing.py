"""A tensor of few values: weights are assigned by distance and bits; how many values there are follows from that.

In: weights, which of them are kept, the price of a squared error and the price of a bit. Out: a CodedTensor for which
the sum of `error_price * (w - value)^2 + bit_price * bits` is small (entropy-constrained quantisation: Chou, Lookabaugh
& Gray 1989). A removed weight is the value 0, so a kept one may be removed as well where that is cheaper. Bits are
those of an order-0 coder; the file's coder takes fewer. Several beginnings are followed, and the best is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from undertow.coding.tensors import CodedTensor
from undertow.errors import CallError
from undertow.ops.looking_up import MAX_BYTE_CODES
from undertow.shrink.clustering import STARTS, cluster, make_histogram

MAX_VALUES = 64
_NUMS = (1, 2, 4, 8, 16, 32)
_VALUE_BITS = 10.0  # about what a value takes in the codebook
_TURNS = 30
_PART = 1 << 16  # weights that are compared with all values at once
# A value keeps so many bits after its first: 3 % of it, where neighbours are mostly further away.
CODEBOOK_BITS = 5


@dataclass(frozen=True)
class Prices:
    """What is paid: for a squared error of one weight, and for a bit."""

    error: float
    bit: float


def share(weights: Tensor, kept: Tensor | None, prices: Prices) -> CodedTensor:
    """The weights with few values; without `kept` none is removed."""
    flat = weights.detach().double().cpu().reshape(-1).numpy()
    mask = numpy.ones(flat.size, bool) if kept is None else kept.cpu().reshape(-1).numpy()
    if flat.size and not numpy.isfinite(flat).all():
        raise CallError("weights that are infinite or not a number cannot be shared")
    values, counts = make_histogram(flat[mask])
    if not values.size:
        empty = torch.zeros(0, dtype=weights.dtype)
        return CodedTensor(
            tuple(weights.shape), None if kept is None else kept.cpu(), torch.zeros(0, dtype=torch.int32), empty
        )
    num_zeros = None if kept is None else float(flat.size - mask.sum())
    _, centroids, bits = min(
        (_refine(values, counts, num_zeros, begun, prices) for begun in _beginnings(values, counts, prices)),
        key=lambda found: found[0],
    )
    return _assign(weights, flat, mask, kept is not None, centroids, bits, prices)


def _beginnings(values: Any, counts: Any, prices: Prices) -> list[Any]:
    """Centroids to begin with: the grid that is best where there are many bits, and clusters of several numbers."""
    found = [cluster(values, counts, num, start) for num in _NUMS for start in STARTS if num <= values.size]
    # With a step d the error is d^2 / 12, and a bit more divides it by 4: that pays where d^2 = 6 bit / (error ln 2).
    step = math.sqrt(6 * prices.bit / (prices.error * math.log(2))) if prices.error else math.inf
    if (values[-1] - values[0]) / step < MAX_VALUES:
        place = numpy.unique(numpy.rint(values / step))
        found.append(place * step)
    return found


def _refine(values: Any, counts: Any, num_zeros: float | None, centroids: Any, prices: Prices) -> Any:
    """Cost, centroids and bits per code (of the value 0 last) after assigning and moving in turns."""
    bits = numpy.zeros(centroids.size + 1)
    cost = math.inf
    for _ in range(_TURNS):
        place, paid = _nearest(values, centroids, bits, num_zeros is not None, prices)
        weights = numpy.bincount(place, counts, centroids.size + 1)
        sums = numpy.bincount(place, counts * values, centroids.size + 1)[:-1]
        is_used = weights[:-1] > 0
        centroids = sums[is_used] / weights[:-1][is_used]
        bits = _bits_of(weights[:-1][is_used], weights[-1], num_zeros)
        place, paid = _nearest(values, centroids, bits, num_zeros is not None, prices)
        now = float((counts * paid).sum()) + prices.bit * _VALUE_BITS * centroids.size
        if now >= cost * (1 - 1e-6):
            break
        cost = now
    return cost, centroids, bits


def _bits_of(weights: Any, num_removed: float, num_zeros: float | None) -> Any:
    """Bits of each code, the place in the mask included; last those of a removed weight."""
    num_kept = weights.sum()
    removed = (num_zeros or 0.0) + num_removed
    total = num_kept + removed
    bits = numpy.empty(weights.size + 1)
    with numpy.errstate(divide="ignore"):
        bits[:-1] = numpy.log2(total / weights) if weights.size else 0.0
        bits[-1] = numpy.log2(total / removed) if removed else math.inf
    return bits


def _nearest(values: Any, centroids: Any, bits: Any, can_remove: bool, prices: Prices) -> tuple[Any, Any]:
    """The cheapest code of each value, and what it costs; the last code is the value 0."""
    codes = numpy.concatenate([centroids, [0.0]])
    costs = prices.error * (values[:, None] - codes[None, :]) ** 2 + prices.bit * bits[None, :]
    if not can_remove:
        costs[:, -1] = math.inf
    place = costs.argmin(1)
    return place, costs[numpy.arange(values.size), place]


def _assign(
    weights: Tensor, flat: Any, mask: Any, can_remove: bool, centroids: Any, bits: Any, prices: Prices
) -> CodedTensor:
    codebook = round_codebook(torch.from_numpy(centroids).to(weights.dtype))
    # Rounding may make two of them one.
    codebook, merged = codebook.unique(return_inverse=True)
    kept_values = flat[mask]
    place = numpy.empty(kept_values.size, numpy.int64)
    for start in range(0, kept_values.size, _PART):
        part = slice(start, start + _PART)
        place[part] = _nearest(kept_values[part], centroids, bits, can_remove, prices)[0]
    stays = place < centroids.size
    final = mask.copy()
    final[mask] = stays
    codes = merged.numpy()[place[stays]].astype(numpy.int32)
    used, codes = numpy.unique(codes, return_inverse=True)
    tensor = None if not can_remove else torch.from_numpy(final).reshape(weights.shape)
    return CodedTensor(
        tuple(weights.shape), tensor, torch.from_numpy(codes.astype(numpy.int32)), codebook[torch.from_numpy(used)]
    )


def round_codebook(codebook: Tensor, num_bits: int = CODEBOOK_BITS) -> Tensor:
    """The values with `num_bits` bits after the first: what they end in takes no room in the file."""
    mantissas, exponents = torch.frexp(codebook.double())
    return torch.ldexp((mantissas * 2 ** (num_bits + 1)).round() / 2 ** (num_bits + 1), exponents).to(codebook.dtype)


def dense_codes(tensor: CodedTensor) -> Tensor:
    """The codes in the shape of the weights, as `ops/looking_up.py` takes them: 0 is a removed weight."""
    dtype = torch.uint8 if len(tensor.codebook) <= MAX_BYTE_CODES else torch.int32
    if tensor.mask is None:
        return (tensor.codes + 1).to(dtype).reshape(tensor.shape)
    found = torch.zeros(tensor.shape, dtype=dtype)
    found[tensor.mask] = (tensor.codes + 1).to(dtype)
    return found
