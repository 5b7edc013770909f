"""Which gradients travel as factors, and products that are added in the order of the tree."""

import pytest
import torch

from undertow.ops.factors import add_products
from undertow.ranks.tree import Span, Tree


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_every_rank_finds_the_sum_of_the_tree(size):
    draw = torch.Generator().manual_seed(0)
    factors = [(torch.randn(7, 3, generator=draw).t(), torch.randn(7, 5, generator=draw)) for _ in range(size)]
    products = [left.mm(right).view(-1) for left, right in factors]
    spans = [Span(rank, rank + 1) for rank in range(size)]
    expected = [item.clone() for item in products]
    for left, right in Tree(size).add_order(spans):
        expected[left] = expected[left] + expected[right]
    for rank in range(size):
        own = products[rank].clone()
        add_products(factors, rank, own, Tree(size).add_order(spans))
        assert torch.equal(own, expected[0])
