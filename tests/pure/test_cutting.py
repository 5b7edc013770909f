"""The search for a cut, beside all cuts tried one by one, and what it says of a model that cannot be balanced."""

import itertools
import random

import pytest

from undertow.errors import CallError
from undertow.stages.cutting import (
    Flow,
    Held,
    Profile,
    find_cut,
    held_bytes,
    judge,
    link_ns,
    most_of_a_step,
    stage_times,
)
from undertow.stages.schedules import make_schedule


def random_profile(seed):
    """A chain of operations with some skips."""
    draw = random.Random(seed)
    count = draw.randint(6, 12)
    forward = [int(10 ** draw.uniform(5, 7)) for _ in range(count)]
    flows = [Flow(place, (place + 1,), *[int(10 ** draw.uniform(3, 7))] * 2) for place in range(count - 1)]
    for _ in range(2):
        first = draw.randrange(count - 2)
        flows.append(Flow(first, (draw.randrange(first + 2, count),), 10**6, 10**6))
    names = [f"layer {place}" for place in range(count)]
    return Profile(names, forward, [2 * time for time in forward], [0] * count, flows)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 2), ("1f1b", 3), ("gpipe", 4), ("interleaved", 2)])
def test_within_five_percent_of_all_cuts(seed, name, num_ranks):
    profile, schedule = random_profile(seed), make_schedule(name, num_ranks, 5)
    places = range(1, len(profile.names))
    cuts = [judge(profile, schedule, starts) for starts in itertools.combinations(places, schedule.num_stages - 1)]
    best = min(cut.timing.step_ns for cut in cuts)
    found = find_cut(profile, schedule)
    assert best <= found.timing.step_ns <= 1.05 * best
    assert max(cut.timing.step_ns for cut in cuts) > 1.05 * best  # else any cut would do


def test_bytes_over_each_boundary():
    profile = Profile(
        [""] * 6, [1] * 6, [2] * 6, [0] * 6, [Flow(0, (1, 3, 5), 100, 100), Flow(1, (2,), 40, 0), Flow(2, (5,), 0, 70)]
    )
    first, second, third = stage_times(profile, (2, 4))
    assert first.forward_link_ns == {}
    assert second.forward_link_ns == {0: link_ns(100) + link_ns(40)}
    assert third.forward_link_ns == {0: link_ns(100)}
    # The cotangents of what three stages read come back from stage to stage, and are added on the way.
    assert second.backward_link_ns == {2: link_ns(100) + link_ns(70)}
    assert first.backward_link_ns == {1: link_ns(100)}
    assert (first.forward_ns, second.backward_ns) == (2, 4)


def test_memory_decides_where_it_must():
    profile = Profile(
        ["a", "b", "c", "d"],
        [1000, 1000, 1000, 9000],
        [2000, 2000, 2000, 18000],
        [0] * 4,
        held=[Held((0,), 10, 20), Held((1, 3), 50, 50), Held((2,), 10, 20)],
    )
    schedule = make_schedule("1f1b", 2, 4)
    assert find_cut(profile, schedule).starts == (3,)
    assert [held_bytes(profile, (3,), stage) for stage in (0, 1)] == [160, 50]  # the tied weight is on both
    fitting = find_cut(profile, schedule, lambda starts: held_bytes(profile, starts, 0) <= 130)
    assert fitting.starts == (2,)
    assert find_cut(profile, schedule, lambda starts: False) is None


def test_one_operation_is_most_of_the_time():
    profile = Profile(["first", "second", "decoder.conv1"], [10, 10, 70], [20, 20, 140], [0] * 3)
    cut = find_cut(profile, make_schedule("1f1b", 2, 4))
    assert most_of_a_step(profile, cut) == "stage 1 is 78% of a step: decoder.conv1"


def test_more_stages_than_operations():
    with pytest.raises(CallError, match="4 stages are more than the 3 operations"):
        find_cut(Profile([""] * 3, [1] * 3, [1] * 3, [0] * 3), make_schedule("1f1b", 4, 4))
