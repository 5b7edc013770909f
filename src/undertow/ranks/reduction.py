"""Sums over the ranks in the order of the tree, with the bytes of a ring.

In: on each rank, for each of its blocks of shards, a flat tensor of all gradients of a bucket. Out: in the first of
these tensors the sum over all shards, on every rank with the same bits.

Each rank owns a part of the bucket. It gets that part of every block from the others, adds the blocks in the order of
the tree, and sends the sum to the others. Where each of W ranks has one block, that is what a ring sends: 2 (W - 1) / W
of the bucket. A rank with several blocks sends each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from undertow.ranks.lane import Message, Steps
from undertow.ranks.messages import Messages
from undertow.ranks.tree import Span, Tree


@dataclass(frozen=True)
class Division:
    """Which shards each rank holds."""

    tree: Tree
    spans: tuple[Span, ...]

    @cached_property
    def blocks(self) -> tuple[tuple[Span, ...], ...]:
        """The blocks that each rank adds by itself."""
        return tuple(map(self.tree.blocks, self.spans))

    @cached_property
    def additions(self) -> tuple[tuple[int, int], ...]:
        """Which block is added to which, by their places among all blocks in the order of the ranks."""
        return self.tree.add_order([block for blocks in self.blocks for block in blocks])

    def payload_bytes(self, cuts: Sequence[int], itemsize: int, rank: int) -> int:
        """What a rank sends for one bucket."""
        own = cuts[rank + 1] - cuts[rank]
        num_others = len(self.spans) - 1
        return itemsize * ((cuts[-1] - own) * len(self.blocks[rank]) + own * num_others)

    def received_bytes(self, cuts: Sequence[int], itemsize: int) -> int:
        """The most that a rank receives beside its own tensors: the others' blocks of its part."""
        num_blocks = sum(map(len, self.blocks))
        sizes = (end - first for first, end in pairwise(cuts))
        return itemsize * max(
            size * (num_blocks - len(blocks)) for size, blocks in zip(sizes, self.blocks, strict=True)
        )


def cut_bucket(sizes: Sequence[int], num_ranks: int, block: int) -> tuple[int, ...]:
    """Where the parts of the ranks begin and end, in elements.

    Tensors of these sizes lie one after the other. A cut is at the beginning of a tensor, or a multiple of `block`
    after it, so that nobody divides a block of a tensor.
    """
    places = [0]
    for size in sizes:
        start = places[-1]
        places += [start + offset for offset in range(block, size, block)] + [start + size]
    cuts = [0]
    for rank in range(1, num_ranks):
        wanted = places[-1] * rank / num_ranks
        cuts.append(max(cuts[-1], min(places, key=lambda place: abs(place - wanted))))
    return (*cuts, places[-1])


def reduce(
    messages: Messages, division: Division, cuts: Sequence[int], tag: int, flats: Sequence[torch.Tensor]
) -> Steps:
    """The transfer: `flats` are this rank's blocks; the sum comes to lie in the first."""
    rank, ranks = messages.rank, range(len(division.spans))
    others = [other for other in ranks if other != rank]
    own = slice(cuts[rank], cuts[rank + 1])
    pending: list[Message] = []
    values: list[torch.Tensor] = []
    for other in ranks:
        for place, _ in enumerate(division.blocks[other]):
            if other == rank:
                values.append(flats[place][own])
            else:
                values.append(flats[0].new_empty(own.stop - own.start))
                pending += messages.receive(values[-1], other, tag, place)
    for other in others:
        for place, flat in enumerate(flats):
            pending += messages.send(flat[cuts[other] : cuts[other + 1]], other, tag, place)
    yield pending
    target = flats[0][own]
    *earlier, (left, right) = division.additions
    for one, two in earlier:
        values[one].add_(values[two])
    torch.add(values[left], values[right], out=target)
    values.clear()
    pending = []
    for other in others:
        pending += messages.receive(flats[0][cuts[other] : cuts[other + 1]], other, tag, -1)
    for other in others:
        pending += messages.send(target, other, tag, -1)
    yield pending


def gather(messages: Messages, tag: int, own: torch.Tensor, all_of_them: Sequence[torch.Tensor]) -> Steps:
    """The transfer of one tensor of each rank to all others; `all_of_them` receive them, in the order of the ranks."""
    pending: list[Message] = []
    for other, tensor in enumerate(all_of_them):
        if other == messages.rank:
            tensor.copy_(own)
        else:
            pending += messages.receive(tensor, other, tag, 0)
    for other in range(len(all_of_them)):
        if other != messages.rank:
            pending += messages.send(own, other, tag, 0)
    yield pending
