"""What a rank holds while it runs the pieces of a schedule.

In: a rank's pieces, and for each of its stages what a piece takes and what a shard keeps between its pieces. Out: for
each stage, what shards in flight hold while one of its pieces runs, at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from undertow.stages.schedules import Pass, Schedule


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage's Program, without what is held throughout."""

    most_bytes: int  # while any of its pieces runs
    kept_bytes: tuple[int, ...]  # after the forward piece, and after the first half of the backward pass
    unsent_bytes: int  # cotangents of a shard that is done


def others_in_flight(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]) -> dict[int, int]:
    """For each stage, what other shards hold while one of its pieces runs."""
    last = Pass.WEIGHT if schedule.is_in_halves else Pass.BACKWARD
    waiting: dict[tuple[int, int], int] = {}
    most = dict.fromkeys(stages, 0)
    for piece in schedule.ranks[rank]:
        key = piece.stage, piece.shard
        waiting.pop(key, None)
        most[piece.stage] = max(most[piece.stage], sum(waiting.values()))
        if piece.which is not last:
            kept = stages[piece.stage].kept_bytes
            waiting[key] = kept[0] if piece.which is Pass.FORWARD else kept[-1]
    unsent = sum(num_unsent(schedule, stage) * memory.unsent_bytes for stage, memory in stages.items())
    return {stage: size + unsent for stage, size in most.items()}


def num_unsent(schedule: Schedule, stage: int) -> int:
    """The most shards that a stage has ended and whose cotangents the stage before has not read.

    The stage before holds these shards as well, so they are no more than it has in flight.
    """
    if stage == 0:
        return 0
    alive, most = 0, 0
    for piece in schedule.ranks[schedule.rank_of(stage - 1)]:
        if piece.stage == stage - 1 and piece.which is not Pass.WEIGHT:
            alive += 1 if piece.which is Pass.FORWARD else -1
            most = max(most, alive)
    return most


def rank_peak(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory], held_bytes: int) -> int:
    """The peak of a rank."""
    others = others_in_flight(schedule, rank, stages)
    return held_bytes + max(others[stage] + memory.most_bytes for stage, memory in stages.items())
