"""Ranks that are planned and not there: `undertow plan --parallel stages=4` starts no processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AbsentRanks:
    """Rank 0 of a job that was not started. Nothing can be sent."""

    size: int
    rank: int = 0
