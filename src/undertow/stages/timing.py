"""How long a schedule takes: when each piece begins and ends.

In: a schedule, and the times of the pieces and transfers of each stage. Out: a stretch of time for each piece. A rank
runs its pieces in order; a piece begins when the rank is free and what it reads has come. Each link carries one
transfer after the other, in the order in which they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from undertow.stages.schedules import Pass, Piece, Schedule


@dataclass(frozen=True)
class StageTimes:
    """What a stage takes for one shard. `arriving` are transfers from earlier stages and their way back."""

    forward_ns: int
    backward_ns: int  # or the half that the stage before waits for
    weight_ns: int = 0
    # By the stage that sends: time on the link of what this stage's forward pass reads, and of the cotangents that this
    # stage's backward pass reads.
    forward_link_ns: Mapping[int, int] | None = None
    backward_link_ns: Mapping[int, int] | None = None

    def of(self, which: Pass) -> int:
        """The time of a piece."""
        return {Pass.FORWARD: self.forward_ns, Pass.BACKWARD: self.backward_ns, Pass.WEIGHT: self.weight_ns}[which]


@dataclass(frozen=True)
class Timing:
    """When each piece runs, in nanoseconds."""

    stretches: Mapping[Piece, tuple[int, int]]
    busy_ns: tuple[int, ...]  # of each rank

    @property
    def step_ns(self) -> int:
        """The end of the last piece."""
        return max((end for _, end in self.stretches.values()), default=0)

    @property
    def idle_share(self) -> float:
        """The part of the ranks' time in which they wait."""
        total = self.step_ns * len(self.busy_ns)
        return 1 - sum(self.busy_ns) / total if total else 0.0


def time_schedule(schedule: Schedule, stages: Sequence[StageTimes]) -> Timing:
    """Play a schedule through with these times."""
    stretches: dict[Piece, tuple[int, int]] = {}
    arrived: dict[tuple[int, Piece], int] = {}  # when what a piece made is with another stage
    links: dict[tuple[int, int], int] = {}  # until when the link from one rank to another is taken
    free, places = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    readers = _find_readers(stages)
    while True:
        waiting = [
            (start, rank)
            for rank, pieces in enumerate(schedule.ranks)
            if places[rank] < len(pieces)
            and (start := _find_start(schedule, pieces[places[rank]], free[rank], arrived, stretches)) is not None
        ]
        if not waiting:
            break
        start, rank = min(waiting)
        piece = schedule.ranks[rank][places[rank]]
        end = start + stages[piece.stage].of(piece.which)
        stretches[piece] = start, end
        free[rank] = end
        places[rank] += 1
        for reader, link_ns in readers.get((piece.stage, piece.which), {}).items():
            link = rank, schedule.rank_of(reader)
            begin = max(end, links.get(link, 0)) if link_ns else end
            links[link] = max(links.get(link, 0), begin + link_ns)
            arrived[reader, piece] = begin + link_ns
    busy = tuple(sum(stages[piece.stage].of(piece.which) for piece in pieces) for pieces in schedule.ranks)
    return Timing(stretches, busy)


def _find_readers(stages: Sequence[StageTimes]) -> dict[tuple[int, Pass], dict[int, int]]:
    """For each stage and pass, which stages read what it makes, with the time on the link."""
    found: dict[tuple[int, Pass], dict[int, int]] = {}
    for stage, times in enumerate(stages):
        for source, link_ns in {stage - 1: 0, **(times.forward_link_ns or {})}.items():
            found.setdefault((source, Pass.FORWARD), {})[stage] = link_ns
        for source, link_ns in {stage + 1: 0, **(times.backward_link_ns or {})}.items():
            found.setdefault((source, Pass.BACKWARD), {})[stage] = link_ns
    return found


def _find_start(
    schedule: Schedule,
    piece: Piece,
    free_ns: int,
    arrived: Mapping[tuple[int, Piece], int],
    stretches: Mapping[Piece, tuple[int, int]],
) -> int | None:
    """When a piece can begin; None where what it reads is not made yet."""
    stage, shard = piece.stage, piece.shard
    if piece.which is Pass.FORWARD:
        sources = range(stage)
    else:
        sources = range(stage + 1, schedule.num_stages) if piece.which is Pass.BACKWARD else range(0)
    starts = [free_ns]
    for source in sources:
        made = Piece(source, shard, piece.which)
        if made not in stretches:
            return None
        starts.append(arrived.get((stage, made), 0))
    return max(starts)


def idle_by_formula(name: str, num_ranks: int, num_shards: int, *, stages_a_rank: int = 1) -> float:
    """The share of time that ranks wait, where stages take equal times, links take none, and halves are equal.

    gpipe and 1f1b: (R - 1) / (M + R - 1) for M shards. With V stages a rank: (R - 1) / (V M + R - 1). zero-bubble with
    forward passes, halves and halves of equal times: (R - 1) / (3 M + R - 1).
    """
    rounds = {"gpipe": 1, "1f1b": 1, "interleaved": stages_a_rank, "zero-bubble": 3}[name]
    return (num_ranks - 1) / (rounds * num_shards + num_ranks - 1)
