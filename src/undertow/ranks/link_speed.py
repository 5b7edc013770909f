"""How fast the link is: transfers of a few sizes between all ranks, at the start of a job.

In: the ranks; all of them call this. Out: how long a rank occupies its link when it sends so many bytes. What is
timed is what a step does: as many sums over the ranks at once as a step has on their way. So latency, both directions,
waking threads and adding up are in it. Not in it is what happens while the processor computes as well.

Sizes grow until a time is long enough to be trusted, so a slow link is not kept busy. Every rank calls it, rank 0's
clock counts, and the least of several times, since the others were disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from undertow.ranks.lane import Steps, Transfer
from undertow.ranks.messages import Messages
from undertow.ranks.reduction import Division, reduce
from undertow.ranks.tree import Span, Tree

if TYPE_CHECKING:
    from undertow.ranks.ranks import Ranks

SMALLEST_BYTES, LARGEST_BYTES = 4 << 10, 8 << 20  # of a bucket
GROWTH = 8
NUM_REPEATS = 4
LONG_ENOUGH_NS = 5_000_000
MOST_ON_THEIR_WAY = 2  # sums, beside the one that was started last; then a step waits for the oldest
TAG = 1 << 18  # steps have smaller tags, and parameters larger ones


def measure_link(ranks: Ranks, device: torch.device) -> dict[int, int]:
    """Nanoseconds that a transfer of tensors of a device occupies the link, by the bytes that a rank sends."""
    found: dict[int, int] = {}
    num_bytes = SMALLEST_BYTES
    while num_bytes <= LARGEST_BYTES:
        sent_bytes, duration_ns = _time(ranks, device, num_bytes)
        found[sent_bytes] = duration_ns
        if ranks.send_number(int(duration_ns >= LONG_ENOUGH_NS)):
            break
        num_bytes *= GROWTH
    return found


def _time(ranks: Ranks, device: torch.device, num_bytes: int) -> tuple[int, int]:
    """What a rank sends for a bucket of so many bytes, and how long that takes."""
    size, number = ranks.size, num_bytes // 4
    division = Division(Tree(size), tuple(Span(rank, rank + 1) for rank in range(size)))
    cuts = [number * rank // size for rank in range(size + 1)]
    flats = [torch.zeros(number, device=device) for _ in range(MOST_ON_THEIR_WAY + 1)]
    times: list[int] = []
    for _ in range(NUM_REPEATS):
        ranks.send_number(0)  # all begin together
        start = time.perf_counter_ns()
        transfers = [_start(ranks, division, cuts, TAG + place, flat) for place, flat in enumerate(flats)]
        for transfer in transfers:
            ranks.finish(transfer)
        times.append(time.perf_counter_ns() - start)
    return division.most_bytes(division.payload_bytes, cuts, 4), min(times) // len(flats)


def _start(ranks: Ranks, division: Division, cuts: Sequence[int], tag: int, flat: torch.Tensor) -> Transfer:
    def make(messages: Messages, at: Callable[[torch.Tensor], torch.Tensor]) -> Steps:
        return reduce(messages, division, cuts, tag, [at(flat)])

    return ranks.start("measuring the link", make, flat.device, [flat], [flat])
