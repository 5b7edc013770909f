"""Which gradients are reduced together, by when they are complete and how fast the link is.

In: gradients in the order in which they are complete, with the moment and their bytes; a LinkSpeed. Out: how many of
them each bucket holds. The order stays, since nothing is gained by sending late what is there early.

A small bucket starts early, and each pays the link's latency. If buckets end at gradients j, and F(j) is when the link
has sent the first j of them, then F(j) = min over i < j of max(F(i), ready(j)) + latency + bytes(i..j) / speed: by
dynamic programming, the best division with buckets of at most so many bytes. Large ones take memory and are updated
late, so several limits are tried on the lanes of a step, and the smallest counts that is nearly as fast as the best.

Not counted is the time of the updates, which comes after the last bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from undertow.costs.links import LinkSpeed
from undertow.ir.operation import COMPUTING
from undertow.lanes import Activity, find_times
from undertow.ranks.link_speed import MOST_ON_THEIR_WAY

LEAST_LIMIT_BYTES = 1 << 16  # of a bucket; twice as much is tried again and again
NEARLY = 1.02  # costs vary by more from day to day, and larger buckets take memory


@dataclass(frozen=True)
class Ready:
    """A gradient: when it is complete, its bytes, and what it can share a bucket with (its dtype and device)."""

    ready_ns: int
    num_bytes: int
    kind: object


def choose_sizes(gradients: Sequence[Ready], sent_share: float, speed: LinkSpeed, least_bytes: int) -> list[int]:
    """How many gradients each bucket holds. A rank sends `sent_share` bytes for each of a bucket.

    Buckets have at least `least_bytes`, apart from the last of a kind.
    """
    total_bytes = sum(item.num_bytes for item in gradients)
    limit_bytes = max(LEAST_LIMIT_BYTES, least_bytes)
    found: list[tuple[int, list[int]]] = []
    while True:
        sizes = _divide(gradients, sent_share, speed, least_bytes, limit_bytes)
        found.append((time_of(gradients, sizes, sent_share, speed), sizes))
        if limit_bytes >= total_bytes:
            break
        limit_bytes *= 2
    best_ns = min(time_ns for time_ns, _ in found)
    return next(sizes for time_ns, sizes in found if time_ns <= best_ns * NEARLY)


def smallest_sizes(gradients: Sequence[Ready]) -> list[int]:
    """Buckets that take least memory on their way: a gradient each, and small ones together."""
    sizes: list[int] = []
    waiting_bytes = 0
    for place, item in enumerate(gradients):
        is_new = not sizes or waiting_bytes >= LEAST_LIMIT_BYTES or item.kind != gradients[place - 1].kind
        sizes, waiting_bytes = ([*sizes, 0], 0) if is_new else (sizes, waiting_bytes)
        sizes[-1] += 1
        waiting_bytes += item.num_bytes
    return sizes


def _divide(
    gradients: Sequence[Ready], sent_share: float, speed: LinkSpeed, least_bytes: int, limit_bytes: int
) -> list[int]:
    """The division whose link ends first."""
    before = np.array([0, *accumulate(item.num_bytes for item in gradients)])  # bytes of the first so many
    ends = np.full(len(gradients) + 1, np.inf)  # when the link has sent them
    ends[0] = 0.0
    starts = [0] * len(ends)  # where the last bucket of them begins
    first_of_kind = 0
    for end, item in enumerate(gradients, start=1):
        if end > 1 and item.kind != gradients[end - 2].kind:
            first_of_kind = end - 1
        is_last = end == len(gradients) or gradients[end].kind != item.kind
        first = max(first_of_kind, min(end - 1, int(np.searchsorted(before, before[end] - limit_bytes))))
        stop = end if is_last else min(end, int(np.searchsorted(before, before[end] - least_bytes, side="right")))
        if first < stop:
            sizes = (before[end] - before[first:stop]) * sent_share
            times = np.maximum(ends[first:stop], item.ready_ns) + speed.latency_ns + sizes * speed.ns_per_byte
            starts[end] = first + int(times.argmin())
            ends[end] = times.min()
    found = [len(gradients)]
    while found[-1]:
        found.append(starts[found[-1]])
    return [end - start for start, end in pairwise(reversed(found))]


def time_of(gradients: Sequence[Ready], sizes: Sequence[int], sent_share: float, speed: LinkSpeed) -> int:
    """When the last bucket has arrived and all is computed."""
    transfers: list[Sent] = []
    first = 0
    for size in sizes:
        bucket = gradients[first : first + size]
        first += size
        sent_bytes = round(sent_share * sum(item.num_bytes for item in bucket))
        transfers.append(Sent(max(item.ready_ns for item in bucket), speed.duration_ns(sent_bytes)))
    return time_on_lanes(transfers)


@dataclass(frozen=True)
class Sent:
    """A transfer: when it can start if nothing waits, how long it takes, and what is computed when it has arrived."""

    ready_ns: int
    link_ns: int
    after_ns: int = 0


def time_on_lanes(transfers: Sequence[Sent]) -> int:
    """When all transfers have arrived and all is computed. Only so many are on their way at once."""
    activities: list[Activity] = []
    pending: list[tuple[int, Sent]] = []
    now_ns = 0

    def wait_for_oldest() -> None:
        place, item = pending.pop(0)
        activities.append(Activity(COMPUTING, item.after_ns, (place,)))

    for item in transfers:
        activities.append(Activity(COMPUTING, max(item.ready_ns - now_ns, 0)))
        activities.append(Activity("link", item.link_ns, (len(activities) - 1,)))
        pending.append((len(activities) - 1, item))
        if len(pending) > MOST_ON_THEIR_WAY:
            wait_for_oldest()
        now_ns = max(now_ns, item.ready_ns)
    while pending:
        wait_for_oldest()
    return find_times(activities).end_ns
