"""The tree of sums: the same additions for every division of the shards over ranks."""

from itertools import combinations

import pytest

from undertow.ranks.tree import Span, Tree, divide, push


def sum_of_all(tree, spans):
    """The sum as nested pairs: each rank adds its blocks, then the blocks are added."""
    blocks, values = [], []
    for held in spans:
        own_spans, own = [], []
        for shard in range(held.first, held.end):
            value = shard
            for _ in range(push(tree, own_spans, Span(shard, shard + 1))):
                value = (own.pop(), value)
            own.append(value)
        assert tuple(own_spans) == tree.blocks(held)
        blocks += own_spans
        values += own
    for left, right in tree.add_order(blocks):
        values[left] = (values[left], values[right])
    return values[0]


@pytest.mark.parametrize("num_shards", range(1, 12))
def test_every_division_adds_in_the_same_order(num_shards):
    tree = Tree(num_shards)
    expected = sum_of_all(tree, [Span(0, num_shards)])
    for num_ranks in range(1, num_shards + 1):
        for cuts in combinations(range(1, num_shards), num_ranks - 1):
            ends = (0, *cuts, num_shards)
            assert sum_of_all(tree, list(map(Span, ends, ends[1:]))) == expected


def test_a_power_of_two_is_balanced():
    assert sum_of_all(Tree(8), [Span(0, 8)]) == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert sum_of_all(Tree(6), [Span(0, 3), Span(3, 6)]) == (((0, 1), (2, 3)), (4, 5))


def test_few_partial_sums():
    for log in range(1, 8):
        # Besides the gradients of the shard that runs; with these they are log2(shards) + 1.
        assert Tree(2**log).most_partial_sums(Span(0, 2**log)) <= log


@pytest.mark.parametrize(
    ("num_shards", "weights", "counts"),
    [(8, (1, 1, 1), (3, 3, 2)), (8, (2, 1, 1), (4, 2, 2)), (6, (1, 1, 1, 1), (2, 2, 1, 1)), (4, (10, 1, 1), (2, 1, 1))],
)
def test_division(num_shards, weights, counts):
    spans = divide(num_shards, weights)
    assert tuple(map(len, spans)) == counts
    assert [span.first for span in spans] == [0, *(span.end for span in spans[:-1])]
