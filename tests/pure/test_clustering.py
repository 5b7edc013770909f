"""k-means in one dimension, and values chosen by distance and bits, against every possible choice."""

from __future__ import annotations

import itertools
import math

import numpy
import pytest
import torch

from undertow.errors import CallError
from undertow.ops.looking_up import LOOK_UP
from undertow.shrink.clustering import MAX_BINS, STARTS, cluster, make_histogram, squared_error
from undertow.shrink.sharing import Prices, dense_codes, round_codebook, share


def least_error(values, counts, num):
    """The least squared error of any division into `num` neighbouring groups."""

    def error(first, last):
        part, weights = values[first:last], counts[first:last]
        return (weights * (part - (weights * part).sum() / weights.sum()) ** 2).sum()

    cuts = itertools.combinations(range(1, values.size), num - 1)
    return min(sum(itertools.starmap(error, itertools.pairwise((0, *cut, values.size)))) for cut in cuts)


@pytest.mark.parametrize("seed", range(8))
def test_exact_clusters_have_the_least_error_of_all(seed):
    generator = numpy.random.default_rng(seed)
    values = numpy.sort(generator.normal(size=9))
    counts = generator.integers(1, 5, 9).astype(float)
    for num in (1, 2, 3, 5, 9):
        found = squared_error(values, counts, cluster(values, counts, num, "exact"))
        # Both are sums of nine terms of about 1, each rounded in float64.
        assert found == pytest.approx(least_error(values, counts, num), abs=1e-12)


def test_exact_clusters_are_never_worse_than_the_others():
    values, counts = make_histogram(numpy.random.default_rng(0).laplace(size=5000))
    for num in (2, 4, 8, 16, 32):
        errors = {start: squared_error(values, counts, cluster(values, counts, num, start)) for start in STARTS}
        # Lloyd's centroids are those of their own clusters, so no more than rounding can be won over the exact ones.
        assert errors["exact"] <= min(errors.values()) * (1 + 1e-9), errors


def test_a_histogram_keeps_sums():
    numbers = numpy.random.default_rng(0).normal(size=100_000)
    values, counts = make_histogram(numbers)
    assert values.size <= MAX_BINS and counts.sum() == numbers.size
    # 100,000 additions in float64 in another order.
    assert (values * counts).sum() == pytest.approx(numbers.sum(), abs=1e-7)
    few, counts = make_histogram([2.0, 1.0, 2.0])
    assert few.tolist() == [1.0, 2.0] and counts.tolist() == [1.0, 2.0]


def paid(weights, kept, tensor, prices):
    """What a coded tensor costs, by its definition: counted from the weights."""
    error = float((weights.double() - tensor.dense().double()).square().sum())
    counts = [*tensor.codes.bincount().tolist(), weights.numel() - tensor.num_kept]
    bits = sum(count * math.log2(weights.numel() / count) for count in counts if count)
    return prices.error * error + prices.bit * bits


def test_more_is_paid_for_any_change_of_one_code():
    weights = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)) * 0.1
    kept = weights.abs() > 0.15
    weights = weights * kept
    prices = Prices(1.0, 2e-4)
    tensor = share(weights, kept, prices)
    assert 1 < len(tensor.codebook) < 32
    cost = paid(weights, kept, tensor, prices)
    coarse = share(weights, kept, Prices(1.0, 1.0))
    fine = share(weights, kept, Prices(1.0, 1e-9))
    assert paid(weights, kept, coarse, prices) > cost
    assert paid(weights, kept, fine, prices) > cost
    assert len(coarse.codebook) < len(tensor.codebook) < len(fine.codebook)


def test_a_removed_weight_stays_removed_and_bits_may_remove_more():
    weights = torch.randn(50, 50, generator=torch.Generator().manual_seed(1))
    kept = weights.abs() > 1
    for bit in (1e-6, 1e-3, 0.05, 1.0):
        tensor = share(weights * kept, kept, Prices(1.0, bit))
        assert not (tensor.dense()[~kept] != 0).any()
    assert tensor.num_kept < int(kept.sum())
    dense = share(weights, None, Prices(1.0, 1.0))
    assert dense.mask is None and dense.num_kept == weights.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_codes_say_what_the_coded_tensor_says(dtype):
    weights = torch.randn(6, 7, generator=torch.Generator().manual_seed(2)).to(dtype)
    tensor = share(weights, weights.abs() > 0.5, Prices(1.0, 1e-3))
    assert tensor.dtype is dtype
    assert torch.equal(LOOK_UP(tensor.codebook, dense_codes(tensor)), tensor.dense())


def test_values_keep_few_bits():
    values = torch.tensor([0.0, 1.0, -0.3, 1e-6, 123.456])
    rounded = round_codebook(values, 5)
    bits = rounded.view(torch.int32) & 0x7FFFFF
    assert not (bits & ((1 << 18) - 1)).any()
    # Half of the last of five bits after the first.
    assert ((rounded - values).abs() <= values.abs() * 2**-6).all()


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(CallError, match="not a number"):
        share(torch.tensor([1.0, torch.nan]), None, Prices(1.0, 1.0))


def test_tensors_of_no_or_one_element_and_of_nothing_kept():
    for weights in (torch.zeros(0, 3), torch.tensor(2.5), torch.tensor([7.0])):
        tensor = share(weights, None, Prices(1.0, 1e-3))
        assert torch.equal(tensor.dense(), round_codebook(weights))
    nothing = share(torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.bool), Prices(1.0, 1e-3))
    assert nothing.num_kept == 0 and not nothing.dense().any()
