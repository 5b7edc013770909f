"""k-means in one dimension: many weights in, few values out that stand for them.

In: values with counts (a histogram), how many clusters, and a way to begin. Out: centroids, ascending. `exact` finds
the clusters with the least squared error of all, by dynamic programming over the sorted values (Wang & Song 2011); rows
are divided and conquered, since the best boundary only moves to the right. The others begin somewhere and follow Lloyd:
`linear` is what Deep Compression publishes, `density` gives every cluster as many weights. Rates play no part here.
"""

from __future__ import annotations

from typing import Any

import numpy

from undertow.kernels.compiler import cached_njit

STARTS = ("linear", "density", "exact")
MAX_BINS = 2048
_LLOYD_TURNS = 50


def make_histogram(values: Any) -> tuple[Any, Any]:
    """Ascending values and their counts. Beyond MAX_BINS different ones, a bin stands for its mean: an exact one."""
    found, counts = numpy.unique(numpy.asarray(values, numpy.float64), return_counts=True)
    if found.size <= MAX_BINS:
        return found, counts.astype(numpy.float64)
    edges = numpy.linspace(found[0], found[-1], MAX_BINS + 1)
    place = numpy.clip(numpy.searchsorted(edges, found, side="right") - 1, 0, MAX_BINS - 1)
    weights = numpy.bincount(place, counts, MAX_BINS)
    sums = numpy.bincount(place, counts * found, MAX_BINS)
    is_used = weights > 0
    return sums[is_used] / weights[is_used], weights[is_used]


def cluster(values: Any, counts: Any, num: int, start: str = "exact") -> Any:
    """At most `num` centroids of a histogram."""
    num = min(num, values.size)
    if start == "exact":
        bounds = _exact_bounds(values, counts, num)
        return numpy.add.reduceat(values * counts, bounds) / numpy.add.reduceat(counts, bounds)
    if start == "linear":
        centroids = numpy.linspace(values[0], values[-1], num)
    else:
        ranks = numpy.cumsum(counts) - counts / 2
        wanted = (numpy.arange(num) + 0.5) / num * counts.sum()
        centroids = values[numpy.minimum(numpy.searchsorted(ranks, wanted), values.size - 1)]
    return _follow_lloyd(values, counts, numpy.unique(centroids))


def squared_error(values: Any, counts: Any, centroids: Any) -> float:
    """The squared distance of all values from their nearest centroids."""
    place = numpy.searchsorted((centroids[1:] + centroids[:-1]) / 2, values)
    return float((counts * (values - centroids[place]) ** 2).sum())


def _follow_lloyd(values: Any, counts: Any, centroids: Any) -> Any:
    for _ in range(_LLOYD_TURNS):
        place = numpy.searchsorted((centroids[1:] + centroids[:-1]) / 2, values)
        weights = numpy.bincount(place, counts, centroids.size)
        sums = numpy.bincount(place, counts * values, centroids.size)
        is_used = weights > 0
        moved = sums[is_used] / weights[is_used]
        if moved.size == centroids.size and numpy.array_equal(moved, centroids):
            break
        centroids = moved
    return centroids


def _exact_bounds(values: Any, counts: Any, num: int) -> Any:
    """Where each of the best clusters begins."""
    # Around their mean, so that the sums of squares lose nothing.
    centred = values - (values * counts).sum() / counts.sum()
    sums = numpy.concatenate([[0.0], numpy.cumsum(counts * centred)])
    squares = numpy.concatenate([[0.0], numpy.cumsum(counts * centred**2)])
    weights = numpy.concatenate([[0.0], numpy.cumsum(counts)])
    starts = numpy.zeros((num, values.size), numpy.int32)
    _fill_table(sums, squares, weights, num, starts)
    bounds, end = [], values.size - 1
    for row in range(num - 1, -1, -1):
        begin = int(starts[row, end])
        bounds.append(begin)
        end = begin - 1
    return numpy.array(bounds[::-1])


@cached_njit(error_model="numpy")
def _error(sums: Any, squares: Any, weights: Any, first: int, last: int) -> float:
    weight = weights[last + 1] - weights[first]
    total = sums[last + 1] - sums[first]
    return squares[last + 1] - squares[first] - total * total / weight


@cached_njit(error_model="numpy")
def _fill_table(sums: Any, squares: Any, weights: Any, num: int, starts: Any) -> None:
    """starts[row, i]: where the last of row + 1 clusters begins that cover the values 0 to i best."""
    size = starts.shape[1]
    before = numpy.empty(size)
    for i in range(size):
        before[i] = _error(sums, squares, weights, 0, i)
    now = numpy.empty(size)
    # A stack of ranges of i, each with the range in which its best beginning lies.
    stack = numpy.empty((64, 4), numpy.int64)
    for row in range(1, num):
        depth = 1
        stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = row, size - 1, row, size - 1
        while depth:
            depth -= 1
            low, high, least, most = stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3]
            if low > high:
                continue
            middle = (low + high) // 2
            best, place = numpy.inf, least
            for begin in range(least, min(most, middle) + 1):
                found = before[begin - 1] + _error(sums, squares, weights, begin, middle)
                if found < best:
                    best, place = found, begin
            now[middle] = best
            starts[row, middle] = place
            stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = low, middle - 1, least, place
            depth += 1
            stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = middle + 1, high, place, most
            depth += 1
        for i in range(row, size):
            before[i] = now[i]
