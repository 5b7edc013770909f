"""`check_schedule`: plays a schedule through, believing nothing.

It shares no code with the schedules. A sound one runs each piece of each stage and shard once, on one rank; every piece
finds what it reads; no rank waits for ever; and the backward pieces of a stage come in the order of the shards.
"""

from __future__ import annotations

from undertow.errors import PlanError
from undertow.stages.schedules import Pass, Piece, Schedule


def check_schedule(schedule: Schedule) -> Schedule:
    """`schedule` itself, if it is sound."""
    passes = {piece.which for pieces in schedule.ranks for piece in pieces}
    wanted = {
        Piece(stage, shard, which)
        for stage in range(schedule.num_stages)
        for shard in range(schedule.num_shards)
        for which in passes | {Pass.FORWARD, Pass.BACKWARD}
    }
    given = [piece for pieces in schedule.ranks for piece in pieces]
    if len(given) != len(wanted) or set(given) != wanted:
        raise PlanError(f"the schedule has {len(given)} pieces, and each of {len(wanted)} runs once")
    for rank, pieces in enumerate(schedule.ranks):
        for piece in pieces:
            if piece.stage % len(schedule.ranks) != rank:
                raise PlanError(f"{piece} is on rank {rank}")
        for stage in {piece.stage for piece in pieces}:
            for which in passes:
                shards = [piece.shard for piece in pieces if piece.stage == stage and piece.which is which]
                if shards != sorted(shards):
                    raise PlanError(f"{which.name.lower()} pieces of stage {stage} run in the order {shards}")
    _play(schedule)
    return schedule


def _play(schedule: Schedule) -> None:
    done: set[Piece] = set()
    places = [0] * len(schedule.ranks)
    while True:
        has_moved = False
        for rank, pieces in enumerate(schedule.ranks):
            while places[rank] < len(pieces) and _needs(schedule, pieces[places[rank]]) <= done:
                done.add(pieces[places[rank]])
                places[rank] += 1
                has_moved = True
        if not has_moved:
            break
    for rank, pieces in enumerate(schedule.ranks):
        if places[rank] < len(pieces):
            piece = pieces[places[rank]]
            missing = ", ".join(map(str, sorted(_needs(schedule, piece) - done, key=str)))
            raise PlanError(f"rank {rank} waits for ever: {piece} needs {missing}")


def _needs(schedule: Schedule, piece: Piece) -> set[Piece]:
    stage, shard = piece.stage, piece.shard
    if piece.which is Pass.FORWARD:
        return {Piece(stage - 1, shard, Pass.FORWARD)} if stage else set()
    if piece.which is Pass.WEIGHT:
        return {Piece(stage, shard, Pass.BACKWARD)}
    later = {Piece(stage + 1, shard, Pass.BACKWARD)} if stage + 1 < schedule.num_stages else set()
    return later | {Piece(stage, shard, Pass.FORWARD)}


def most_in_flight(schedule: Schedule, rank: int) -> int:
    """The most shards, each counted for each stage of the rank, that were begun and not ended at once."""
    last = Pass.WEIGHT if any(piece.which is Pass.WEIGHT for piece in schedule.ranks[rank]) else Pass.BACKWARD
    alive, most = 0, 0
    for piece in schedule.ranks[rank]:
        if piece.which is Pass.FORWARD:
            alive += 1
            most = max(most, alive)
        elif piece.which is last:
            alive -= 1
    return most
