"""Schedules: which piece of which shard a rank runs, one after the other.

In: a number of stages, of ranks and of shards. Out: a list of pieces for each rank. A piece is the forward or the
backward pass of one stage for one shard; a schedule in halves runs the derivatives of parameters as a piece of its own.
Nothing here knows of time: what a rank runs next is decided before anything runs.

- `gpipe` (Huang et al. 2019): all forward pieces, then all backward pieces. Every shard is in flight at once.
- `1f1b` (Narayanan et al. 2019): a rank begins as many shards as there are stages after it, and then ends one for each
  that it begins. As fast as `gpipe`, and stage s of S has at most S - s shards in flight.
- `interleaved` (Narayanan et al. 2021): each rank has several stages, R apart, so that the pipeline fills sooner.
- `zero-bubble` (Qi et al. 2024, ZB-H1): the weights' half of a backward pass is a piece of its own, which runs where a
  rank would wait. At most S shards are in flight on a rank.

Backward pieces of a stage run in the order of the shards, because their gradients are added in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from undertow.errors import CallError

STAGES_A_RANK = 2  # of the interleaved schedule


class Pass(Enum):
    """What a piece computes."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward pass, or what the stage before waits for
    WEIGHT = "W"  # the other half


@dataclass(frozen=True, order=True, slots=True)
class Piece:
    """One pass of one stage for one shard."""

    stage: int
    shard: int
    which: Pass

    def __str__(self) -> str:
        return f"{self.which.value}{self.shard}.{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """The pieces of each rank, in order. Stage s is on rank s modulo the ranks."""

    name: str
    num_shards: int
    num_stages: int
    ranks: tuple[tuple[Piece, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks in a row."""
        return len(self.ranks)

    @property
    def is_in_halves(self) -> bool:
        """Whether backward passes are divided."""
        return any(piece.which is Pass.WEIGHT for piece in self.ranks[0])

    def rank_of(self, stage: int) -> int:
        """Who runs a stage."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> range:
        """The stages of a rank."""
        return range(rank, self.num_stages, self.num_ranks)


def make_schedule(name: str, num_ranks: int, num_shards: int) -> Schedule:
    """The schedule of this name; raises CallError for one that is not there."""
    if name not in _MAKERS:
        raise CallError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
    return _MAKERS[name](num_ranks, num_shards)


def _gpipe(num_ranks: int, num_shards: int) -> Schedule:
    ranks = tuple(
        tuple(Piece(rank, shard, which) for which in (Pass.FORWARD, Pass.BACKWARD) for shard in range(num_shards))
        for rank in range(num_ranks)
    )
    return Schedule("gpipe", num_shards, num_ranks, ranks)


def _one_forward_one_backward(num_ranks: int, num_shards: int) -> Schedule:
    ranks = []
    for rank in range(num_ranks):
        forward = [Piece(rank, shard, Pass.FORWARD) for shard in range(num_shards)]
        backward = [Piece(rank, shard, Pass.BACKWARD) for shard in range(num_shards)]
        ranks.append(_alternate(forward, backward, num_ranks - rank - 1))
    return Schedule("1f1b", num_shards, num_ranks, tuple(ranks))


def _interleaved(num_ranks: int, num_shards: int) -> Schedule:
    """Shards go in groups of as many as there are ranks; what is left over belongs to the last group."""
    num_stages = STAGES_A_RANK * num_ranks
    ends = [num_ranks * (group + 1) for group in range(num_shards // num_ranks - 1)] + [num_shards]
    groups = [range(first, end) for first, end in pairwise([0, *ends])]
    largest = max(map(len, groups)) if num_shards > num_ranks else num_ranks
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        forward = [Piece(stage, shard, Pass.FORWARD) for group in groups for stage in stages for shard in group]
        backward = [
            Piece(stage, shard, Pass.BACKWARD) for group in groups for stage in reversed(stages) for shard in group
        ]
        ahead = (STAGES_A_RANK - 1) * largest + 2 * (num_ranks - rank - 1)
        ranks.append(_alternate(forward, backward, ahead))
    return Schedule("interleaved", num_shards, num_stages, tuple(ranks))


def _zero_bubble(num_ranks: int, num_shards: int) -> Schedule:
    """As 1f1b, and on rank r the weights' half of a shard comes r shards later: the last ranks wait first."""
    ranks = []
    for rank in range(num_ranks):
        ahead = min(num_ranks - rank - 1, num_shards)
        pieces = [Piece(rank, shard, Pass.FORWARD) for shard in range(ahead)]
        for shard in range(num_shards):
            if shard + ahead < num_shards:
                pieces.append(Piece(rank, shard + ahead, Pass.FORWARD))
            pieces.append(Piece(rank, shard, Pass.BACKWARD))
            if shard >= rank:
                pieces.append(Piece(rank, shard - rank, Pass.WEIGHT))
        left = range(max(num_shards - rank, 0), num_shards)
        ranks.append((*pieces, *(Piece(rank, shard, Pass.WEIGHT) for shard in left)))
    return Schedule("zero-bubble", num_shards, num_ranks, tuple(ranks))


def _alternate(forward: list[Piece], backward: list[Piece], ahead: int) -> tuple[Piece, ...]:
    """So many forward pieces; then one forward and one backward piece in turns; then the backward pieces left."""
    ahead = min(ahead, len(forward))
    pieces = forward[:ahead]
    for first, second in zip(forward[ahead:], backward, strict=False):
        pieces += [first, second]
    return (*pieces, *backward[len(forward) - ahead :])


_MAKERS: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}

SCHEDULES = tuple(_MAKERS)
