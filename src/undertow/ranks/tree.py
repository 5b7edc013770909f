"""The order in which sums over shards are added: one binary tree over their numbers, whoever holds which shard.

In: the number of shards, and which of them a rank holds. Out: the blocks that the rank can add by itself, and the order
in which blocks of several ranks are added. A sum of floating-point numbers depends on its order, so a fixed tree gives
the same bits for every division of the shards.

A span of more than one shard is divided at the largest power of two below its length: 6 shards are (0 1 2 3) and (4 5).
So a full power of two is a complete binary tree, and shards can be added one after the other with few partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """The shards from `first` to before `end`."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def shards(self) -> range:
        """Their numbers."""
        return range(self.first, self.end)

    def __str__(self) -> str:
        return str(self.first) if len(self) == 1 else f"{self.first} to {self.end - 1}"


@dataclass(frozen=True)
class Tree:
    """The tree over `num_shards` shards."""

    num_shards: int

    @cached_property
    def halves(self) -> dict[Span, tuple[Span, Span]]:
        """The two spans that each span of more than one shard is the sum of."""
        found: dict[Span, tuple[Span, Span]] = {}
        pending = [Span(0, self.num_shards)]
        while pending:
            span = pending.pop()
            if len(span) > 1:
                middle = span.first + (1 << (len(span) - 1).bit_length() - 1)
                found[span] = Span(span.first, middle), Span(middle, span.end)
                pending += found[span]
        return found

    def are_halves(self, left: Span, right: Span) -> bool:
        """Whether the tree adds these two to each other."""
        return self.halves.get(Span(left.first, right.end)) == (left, right)

    def blocks(self, held: Span) -> tuple[Span, ...]:
        """The largest spans of the tree that lie within `held`: who holds these shards can add them alone."""
        blocks: list[Span] = []
        pending = [Span(0, self.num_shards)]
        while pending:
            span = pending.pop()
            if held.first <= span.first and span.end <= held.end:
                blocks.append(span)
            elif span.first < held.end and held.first < span.end:
                pending += self.halves[span][::-1]
        return tuple(blocks)

    def most_partial_sums(self, held: Span) -> int:
        """How many sums lie there at once while the shards of `held`, but for the last, are added one by one."""
        spans: list[Span] = []
        most = 0
        for shard in range(held.first, held.end - 1):
            most = max(most, len(spans))
            push(self, spans, Span(shard, shard + 1))
        return most

    def add_order(self, blocks: Sequence[Span]) -> tuple[tuple[int, int], ...]:
        """Pairs of positions among `blocks` of all shards: the second is added to the first, in this order."""
        places = {span: place for place, span in enumerate(blocks)}
        steps: list[tuple[int, int]] = []

        def add_up(span: Span) -> int:
            if span in places:
                return places[span]
            left, right = map(add_up, self.halves[span])
            steps.append((left, right))
            return left

        add_up(Span(0, self.num_shards))
        return tuple(steps)


def push(tree: Tree, spans: list[Span], span: Span) -> int:
    """Put a span on top of those that wait, joined with the ones that the tree adds to it; how many were joined."""
    num_joined = 0
    while spans and tree.are_halves(spans[-1], span):
        span = Span(spans.pop().first, span.end)
        num_joined += 1
    spans.append(span)
    return num_joined


def divide(num_shards: int, weights: Sequence[float]) -> tuple[Span, ...]:
    """The shards of each rank, in order: about as many as its weight asks for, and at least one.

    Each gets one, and then one more goes to the rank that lacks most, again and again.
    """
    total = sum(weights)
    lacks = [num_shards * weight / total - 1 for weight in weights]
    counts = [1] * len(weights)
    for _ in range(num_shards - len(weights)):
        rank = max(range(len(weights)), key=lambda rank: (lacks[rank], -rank))
        counts[rank] += 1
        lacks[rank] -= 1
    ends = [sum(counts[: rank + 1]) for rank in range(len(weights))]
    return tuple(Span(end - count, end) for count, end in zip(counts, ends, strict=True))
