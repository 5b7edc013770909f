"""Sums over the ranks in the order of the tree, with the bytes of a ring.

In: on each rank, for each of its blocks of shards, a flat tensor of all gradients of a bucket. Out: in the first of
these tensors the sum over all shards, on every rank with the same bits. Or on each rank only the sum of its own part
(`scatter`): then it updates that part of the parameters, and sends the parameters instead of the sum (`spread`).

Each rank owns a part of the bucket. It gets that part of every block from the others, adds the blocks in the order of
the tree, and sends the sum to the others. Where each of W ranks has one block, that is what a ring sends: 2 (W - 1) / W
of the bucket. A rank with several blocks sends each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from undertow.ranks.lane import Steps
from undertow.ranks.messages import SMALL_BYTES, Messages, Pending, Urgency
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
        """What a rank sends for one bucket, whether its sum comes to all ranks or its updated parameters do."""
        return self.scattered_bytes(cuts, itemsize, rank) + self.spread_bytes(cuts, itemsize, rank)

    def scattered_bytes(self, cuts: Sequence[int], itemsize: int, rank: int) -> int:
        """What a rank sends for one bucket until each has the sum of its own part."""
        return itemsize * (cuts[-1] - cuts[rank + 1] + cuts[rank]) * len(self.blocks[rank])

    def spread_bytes(self, cuts: Sequence[int], itemsize: int, rank: int) -> int:
        """What a rank sends of its own part, of the sum or of updated parameters."""
        return itemsize * (cuts[rank + 1] - cuts[rank]) * (len(self.spans) - 1)

    def most_bytes(self, sent: Callable[[Sequence[int], int, int], int], cuts: Sequence[int], itemsize: int) -> int:
        """What the rank sends that sends most, for which the others wait; `sent` is one of the three above."""
        return max(sent(cuts, itemsize, rank) for rank in range(len(self.spans)))

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
    values = yield from _collect(messages, division, cuts, tag, flats)
    own = flats[0][cuts[messages.rank] : cuts[messages.rank + 1]]
    _add_up(division, values, own)
    values.clear()
    pending: list[Pending] = []
    for other in messages.others:
        pending += messages.receive(flats[0][cuts[other] : cuts[other + 1]], other, tag, -1)
    for other in messages.others:
        pending += messages.send(own, other, tag, -1)
    yield pending


@dataclass(eq=False)
class OwnSum:
    """The sum of a rank's own part of a bucket, when its transfer has ended; on a GPU it may lie beside it.

    `used` is what the transfer worked with. It is freed where the sum is taken, as plans count it: a measurement of
    memory sees what the thread that runs the step frees, and not what the transfer's thread does.
    """

    device: torch.device
    total: torch.Tensor | None = None
    used: Sequence[torch.Tensor] = ()

    def take(self) -> torch.Tensor:
        """The sum, on the device; its memory is the caller's from now on."""
        total, self.total, self.used = self.total, None, ()
        assert total is not None
        if total.is_cuda:  # made on the stream of the link
            total.record_stream(torch.cuda.current_stream(total.device))
        return total.to(self.device)


def scatter(
    messages: Messages,
    division: Division,
    cuts: Sequence[int],
    tag: int,
    flats: Sequence[torch.Tensor],
    found: OwnSum,
) -> Steps:
    """The transfer that leaves each rank with the sum of its own part, in memory that was received into."""
    values = yield from _collect(messages, division, cuts, tag, flats)
    places = [rank for rank, blocks in enumerate(division.blocks) for _ in blocks]
    total = next(value for value, rank in zip(values, places, strict=True) if rank != messages.rank)
    _add_up(division, values, total)
    found.total, found.used = total, (*flats, *values)


def _collect(
    messages: Messages, division: Division, cuts: Sequence[int], tag: int, flats: Sequence[torch.Tensor]
) -> Generator[Sequence[Pending], None, list[torch.Tensor]]:
    """Get this rank's part of every block, in the order of the ranks; the others get theirs of this rank's blocks."""
    own = slice(cuts[messages.rank], cuts[messages.rank + 1])
    pending: list[Pending] = []
    values: list[torch.Tensor] = []
    for rank, blocks in enumerate(division.blocks):
        for place, _ in enumerate(blocks):
            if rank == messages.rank:
                values.append(flats[place][own])
            else:
                values.append(flats[0].new_empty(own.stop - own.start))
                pending += messages.receive(values[-1], rank, tag, place)
    for other in messages.others:
        for place, flat in enumerate(flats):
            pending += messages.send(flat[cuts[other] : cuts[other + 1]], other, tag, place)
    yield pending
    return values


def _add_up(division: Division, values: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """The sum of all blocks, in the order of the tree; the values are written over, and `target` may be one of them."""
    *earlier, (left, right) = division.additions
    for one, two in earlier:
        values[one].add_(values[two])
    torch.add(values[left], values[right], out=target)


def spread(messages: Messages, pieces: Sequence[Sequence[torch.Tensor]], tag: int, urgency: Urgency) -> Steps:
    """The transfer of each rank's pieces to all others, into the same pieces there.

    `pieces` are those of every rank, flat tensors in the memory of parameters. Small ones travel together.
    """
    small = [[item.view(torch.uint8) for item in own if is_packed(item.nbytes)] for own in pieces]
    large = [[item for item in own if not is_packed(item.nbytes)] for own in pieces]
    pending: list[Pending] = []
    arriving: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for other in messages.others:
        # Messages of one tag arrive in the order in which they were sent.
        for item in large[other]:
            pending += messages.receive(item, other, tag, 0)
        if small[other]:
            packed = torch.empty(sum(map(len, small[other])), dtype=torch.uint8)
            arriving.append((packed, small[other]))
            pending += messages.receive(packed, other, tag, 1)
    own_small = torch.cat(small[messages.rank]) if small[messages.rank] else torch.empty(0, dtype=torch.uint8)
    for other in messages.others:
        for item in large[messages.rank]:
            pending += messages.send(item, other, tag, 0, urgency)
        pending += messages.send(own_small, other, tag, 1, urgency)
    yield pending
    for packed, items in arriving:
        for item, part in zip(items, packed.split(list(map(len, items))), strict=True):
            item.copy_(part)


def is_packed(num_bytes: int) -> bool:
    """Whether a piece of so many bytes travels together with others, which takes a copy of it."""
    return num_bytes <= SMALL_BYTES


def gather(messages: Messages, tag: int, own: torch.Tensor, all_of_them: Sequence[torch.Tensor]) -> Steps:
    """The transfer of one tensor of each rank to all others; `all_of_them` receive them, in the order of the ranks."""
    all_of_them[messages.rank].copy_(own)
    pending: list[Pending] = []
    for other in messages.others:
        pending += messages.receive(all_of_them[other], other, tag, 0)
    for other in messages.others:
        pending += messages.send(own, other, tag, 0)
    yield pending
