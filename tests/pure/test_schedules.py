"""Schedules of stages: sound, with as many shards in flight as their formulas say, and idle as long as they say."""

import dataclasses
import itertools

import pytest

from undertow.errors import CallError, PlanError
from undertow.stages.arrivals import Route, arriving, most_arriving_bytes, order_asks
from undertow.stages.check_schedule import check_schedule, most_in_flight
from undertow.stages.memory import StageMemory, num_unsent, others_in_flight, rank_peak
from undertow.stages.schedules import SCHEDULES, STAGES_A_RANK, Pass, Piece, make_schedule
from undertow.stages.timing import StageTimes, idle_by_formula, time_schedule

ALL = [(name, ranks, shards) for name in SCHEDULES for ranks in range(1, 9) for shards in (1, 2, 3, 5, 8, 13, 16, 21)]


@pytest.mark.parametrize(("name", "num_ranks", "num_shards"), ALL)
def test_they_are_sound(name, num_ranks, num_shards):
    check_schedule(make_schedule(name, num_ranks, num_shards))


def in_flight_by_formula(name, num_ranks, num_shards, rank):
    """Stages that were begun for a shard and not ended."""
    if name == "gpipe":
        return num_shards
    if name == "1f1b":
        return min(num_ranks - rank, num_shards)
    if name == "zero-bubble":
        return min(num_ranks, num_shards)
    ahead = (STAGES_A_RANK - 1) * num_ranks + 2 * (num_ranks - rank - 1)
    return min(ahead + 1, STAGES_A_RANK * num_shards)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_shards_in_flight(name, num_ranks):
    for num_shards, rank in itertools.product((num_ranks, 2 * num_ranks, 5 * num_ranks), range(num_ranks)):
        schedule = make_schedule(name, num_ranks, num_shards)
        assert most_in_flight(schedule, rank) == in_flight_by_formula(name, num_ranks, num_shards, rank)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_idle_time(name, num_ranks):
    """With equal stages and links that take no time, a rank waits as long as the formula says."""
    for num_shards in (num_ranks, 2 * num_ranks, 4 * num_ranks):
        schedule = make_schedule(name, num_ranks, num_shards)
        times = StageTimes(100, 100, 100) if schedule.is_in_halves else StageTimes(100, 200)
        found = time_schedule(schedule, [times] * schedule.num_stages)
        formula = idle_by_formula(name, num_ranks, num_shards, stages_a_rank=schedule.num_stages // num_ranks)
        assert found.idle_share == pytest.approx(formula, abs=1e-9)


def broken(change):
    schedule = make_schedule("1f1b", 3, 4)
    ranks = [list(pieces) for pieces in schedule.ranks]
    change(ranks)
    return dataclasses.replace(schedule, ranks=tuple(map(tuple, ranks)))


def swap(ranks, rank, first, second):
    ranks[rank][first], ranks[rank][second] = ranks[rank][second], ranks[rank][first]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ranks: ranks[1].pop(), "each of 24 runs once"),
        (lambda ranks: ranks[1].__setitem__(0, Piece(1, 0, Pass.BACKWARD)), "each of 24 runs once"),
        (lambda ranks: swap(ranks, 0, 0, 1), "run in the order"),
        (lambda ranks: ranks[0].append(ranks[1].pop()), "is on rank 0"),
        (lambda ranks: swap(ranks, 2, 0, 1), "waits for ever: B0.0 needs B0.1"),
        (lambda ranks: ranks.__setitem__(0, sorted(ranks[0], key=lambda piece: piece.shard)), "waits for ever"),
    ],
)
def test_a_broken_schedule_is_refused(change, message):
    with pytest.raises(PlanError, match=message):
        check_schedule(broken(change))


def test_a_name_that_is_not_there():
    with pytest.raises(CallError, match="schedule must be one of gpipe, 1f1b"):
        make_schedule("2f2b", 2, 2)


def neighbours(schedule):
    """A value from each stage to the next, and its cotangent; and a skip over one stage."""
    pairs = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    pairs += [(0, 2)] if schedule.num_stages > 2 else []
    forward = [Route(number, first, second, Pass.FORWARD, 10) for number, (first, second) in enumerate(pairs)]
    backward = [
        Route(len(pairs) + number, second, first, Pass.BACKWARD, 10) for number, (first, second) in enumerate(pairs)
    ]
    return [[*forward, *backward]] * schedule.num_shards


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_is_read_was_asked_for_once(name, num_ranks):
    """Played with links that carry one message at a time, which waits for its receiver: everything arrives."""
    schedule = make_schedule(name, num_ranks, 7)
    routes = neighbours(schedule)
    asks = [order_asks(schedule, rank, routes) for rank in range(num_ranks)]
    places, asked = [0] * num_ranks, [set() for _ in range(num_ranks)]
    links = {pair: [] for pair in itertools.permutations(range(num_ranks), 2)}
    received = set()
    while any(places[rank] < len(schedule.ranks[rank]) for rank in range(num_ranks)):
        before = list(places), len(received)
        for rank, pieces in enumerate(schedule.ranks):
            if places[rank] == len(pieces):
                continue
            piece = pieces[places[rank]]
            new = asks[rank][places[rank]]
            asked[rank].update((ask.route.number, ask.shard) for ask in new)
            for (sender, receiver), waiting in links.items():
                while waiting and waiting[0] in asked[receiver]:
                    received.add((receiver, waiting.pop(0)))
                assert sender != receiver
            needed = [route for route in arriving(piece, routes) if schedule.rank_of(route.source) != rank]
            if all((rank, (route.number, piece.shard)) in received for route in needed):
                places[rank] += 1
                for route in routes[piece.shard]:
                    target = schedule.rank_of(route.target)
                    if route.source == piece.stage and route.which is piece.which and target != rank:
                        links[rank, target].append((route.number, piece.shard))
        assert (list(places), len(received)) != before, "nothing moves any more"
    counts = [len(items) for rows in asks for items in rows]
    crossing = [route for route in routes[0] if schedule.rank_of(route.source) != schedule.rank_of(route.target)]
    assert sum(counts) == len(crossing) * schedule.num_shards
    assert most_arriving_bytes(schedule, 0, routes) > 0


def test_what_shards_in_flight_hold():
    schedule = make_schedule("1f1b", 2, 6)
    stages = {0: StageMemory(100, (40,), 0)}
    assert others_in_flight(schedule, 0, stages) == {0: 40}  # of two in flight, the other one
    assert rank_peak(schedule, 0, stages, 7) == 147
    assert num_unsent(schedule, 0) == 0
    assert num_unsent(schedule, 1) == 2  # the stage before has two in flight
    assert others_in_flight(schedule, 1, {1: StageMemory(100, (40,), 3)}) == {1: 6}
    gpipe = make_schedule("gpipe", 2, 6)
    assert others_in_flight(gpipe, 0, {0: StageMemory(100, (40,), 0)}) == {0: 200}
