"""`ut.buckets`: the lengths that add least padding, against trying all of them."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import undertow as ut


def padded_work(lengths, ends):
    return sum(min(end for end in ends if end >= length) for length in lengths)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 5))
def test_no_other_lengths_add_less(lengths, num):
    found = ut.buckets(lengths, num)
    distinct = sorted(set(lengths))
    choices = [(*some, distinct[-1]) for count in range(num) for some in combinations(distinct[:-1], count)]
    least = min(padded_work(lengths, ends) for ends in choices)
    assert len(found.lengths) <= num and list(found.lengths) == sorted(set(found.lengths))
    assert padded_work(lengths, found.lengths) == least
    assert found.added == pytest.approx(least / sum(lengths) - 1 if sum(lengths) else 0.0)


def test_a_tensor_is_padded_to_the_next_bucket():
    found = ut.buckets([3, 5, 8, 8, 8], num=2)
    assert found.lengths == (5, 8)
    tokens = torch.ones(2, 3, dtype=torch.int64)
    assert found.pad(tokens, -100).tolist() == [[1, 1, 1, -100, -100]] * 2
    assert found.pad(torch.ones(6, 4), 0.5, dim=0)[6:].tolist() == [[0.5] * 4] * 2
    assert found.pad(torch.ones(2, 5)).shape == (2, 5)


def test_wrong_calls_are_refused_in_one_line():
    found = ut.buckets([3, 5])
    with pytest.raises(ut.CallError, match=r"a length of 6 is above the largest bucket, 5; cut"):
        found.pad(torch.ones(6))
    with pytest.raises(ut.CallError, match="dim 1 does not exist"):
        found.pad(torch.ones(3), dim=1)
    for lengths, num in (([], 2), ([-1], 2), ([1.5], 2), ([1], 0), ([1], True)):
        with pytest.raises(ut.CallError, match="whole number"):
            ut.buckets(lengths, num)
