"""How long a transfer occupies a link: a latency, and a time for each byte.

In: the table of costs, in which a job over ranks has the times of a few transfers that it measured at its start. Out: a
LinkSpeed. Where nothing was measured it is a model, as for other operations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from undertow.ir.cost import Cost

_MEASURED = re.compile(r"transfer of (\d+) bytes over a link")

# The loopback of a machine of 2 cores, two ranks: for planning without measuring.
MODEL_LATENCY_NS = 200_000
MODEL_BYTES_PER_NS = 1.5


@dataclass(frozen=True)
class LinkSpeed:
    """latency + bytes times ns_per_byte"""

    latency_ns: float
    ns_per_byte: float

    def duration_ns(self, sent_bytes: int) -> int:
        """How long a transfer occupies the link, if a rank sends so many bytes at most."""
        return round(self.latency_ns + self.ns_per_byte * sent_bytes) if sent_bytes else 0


def link_costs(measured: Mapping[int, int]) -> dict[str, Cost]:
    """Measured times of transfers as entries of the table of costs."""
    return {f"transfer of {sent_bytes} bytes over a link": Cost(time, 0) for sent_bytes, time in measured.items()}


def knows_link(table: Mapping[str, Cost]) -> bool:
    """Whether a link was measured."""
    return any(map(_MEASURED.fullmatch, table))


def find_link_speed(table: Mapping[str, Cost]) -> LinkSpeed:
    """The speed by the largest transfer that was measured, and the smallest."""
    found = {int(match[1]): cost.duration_ns for key, cost in table.items() if (match := _MEASURED.fullmatch(key))}
    if len(found) < 2:
        return LinkSpeed(MODEL_LATENCY_NS, 1 / MODEL_BYTES_PER_NS)
    small, large = min(found), max(found)
    ns_per_byte = max(0.0, (found[large] - found[small]) / (large - small))
    return LinkSpeed(max(0.0, found[small] - small * ns_per_byte), ns_per_byte)
