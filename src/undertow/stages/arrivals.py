"""When a rank asks for what it will receive.

In: a schedule, and what each kind of piece sends. Out: for each piece of a rank, what it asks for before that piece
begins: all that this piece and the next one read, so that it arrives meanwhile. A link carries messages in the order
in which they are sent, and one that nobody has asked for holds up those after it. So whoever asks for a message also
asks for those that the same rank sends before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from undertow.stages.schedules import Pass, Piece, Schedule


class Route(NamedTuple):
    """A value that crosses from one stage to another, for every shard."""

    number: int
    source: int
    target: int
    which: Pass
    num_bytes: int


class Ask(NamedTuple):
    """One shard's value on its way."""

    route: Route
    shard: int


Routes = Sequence[Sequence[Route]]  # of each shard, in the order in which a piece sends them


def order_asks(schedule: Schedule, rank: int, routes: Routes) -> list[list[Ask]]:
    """What the rank asks for before each of its pieces."""
    queues = {
        sender: _messages(schedule, sender, rank, routes) for sender in range(schedule.num_ranks) if sender != rank
    }
    places = {sender: {ask: place for place, ask in enumerate(queue)} for sender, queue in queues.items()}
    num_asked = dict.fromkeys(queues, 0)
    found: list[list[Ask]] = []
    pieces = schedule.ranks[rank]
    for position in range(len(pieces)):
        asks: list[Ask] = []
        for piece in pieces[position : position + 2]:
            for route in arriving(piece, routes):
                sender = schedule.rank_of(route.source)
                if sender != rank:
                    end = places[sender][Ask(route, piece.shard)] + 1
                    asks += queues[sender][num_asked[sender] : end]
                    num_asked[sender] = max(num_asked[sender], end)
        found.append(asks)
    return found


def arriving(piece: Piece, routes: Routes) -> list[Route]:
    """What a piece reads of other stages."""
    return [route for route in routes[piece.shard] if route.target == piece.stage and route.which is piece.which]


def most_arriving_bytes(schedule: Schedule, rank: int, routes: Routes) -> int:
    """The most that is asked for and not read yet while a piece runs."""
    waiting, most = 0, 0
    for piece, asks in zip(schedule.ranks[rank], order_asks(schedule, rank, routes), strict=True):
        waiting += sum(ask.route.num_bytes for ask in asks)
        waiting -= sum(route.num_bytes for route in arriving(piece, routes) if schedule.rank_of(route.source) != rank)
        most = max(most, waiting)
    return most


def _messages(schedule: Schedule, sender: int, rank: int, routes: Routes) -> list[Ask]:
    """What one rank sends another during a step, in order."""
    return [
        Ask(route, piece.shard)
        for piece in schedule.ranks[sender]
        for route in routes[piece.shard]
        if route.source == piece.stage and route.which is piece.which and schedule.rank_of(route.target) == rank
    ]
