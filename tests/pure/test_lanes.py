"""When activities on lanes start and end, beside a clock that ticks one nanosecond at a time."""

import itertools
import random

import pytest

from undertow.errors import PlanError
from undertow.lanes import Activity, find_times


def ticking_clock(activities, by_urgency):
    """Starts and ends by looking at everything again at every tick, until a tick changes nothing more."""
    starts, ends = {}, {}
    for now in itertools.count():
        if len(ends) == len(activities) and all(end <= now for end in ends.values()):
            return starts, ends
        done = {place for place, end in ends.items() if end <= now}
        while True:
            free = {item.lane for item in activities} - {activities[place].lane for place in ends.keys() - done}
            started = set()
            for lane in free:
                left = [place for place, item in enumerate(activities) if item.lane == lane and place not in starts]
                if lane is not None and lane not in by_urgency:
                    left = left[:1]
                ready = [place for place in left if done.issuperset(activities[place].after)]
                if lane is not None:
                    ready = sorted(ready, key=lambda place: (activities[place].urgency, place))[:1]
                started.update(ready)
            if None not in free:  # what has no lane never waits for one
                started |= {
                    place
                    for place, item in enumerate(activities)
                    if item.lane is None and place not in starts and done.issuperset(item.after)
                }
            for place in started:
                starts[place], ends[place] = now, now + activities[place].duration_ns
            newly_done = {place for place, end in ends.items() if end <= now} - done
            if not newly_done:
                break
            done |= newly_done
        if not started and len(done) == len(ends) < len(activities):
            return None  # nothing runs, and nothing ever will


def draw_activities(seed):
    draw = random.Random(seed)
    lanes = [None, "computing", "link", ("rank 1", "computing")][: draw.randint(1, 4)]
    number = draw.randint(1, 14)
    order = draw.sample(range(number), number)  # waits may point forward in the list
    after = dict.fromkeys(order, ())
    for position, place in enumerate(order):
        after[place] = tuple(draw.choices(order[:position], k=draw.randint(0, min(3, position)))) if position else ()
    activities = [
        Activity(draw.choice(lanes), draw.choice([0, 0, 1, 2, 3, 7]), after[place], draw.randint(0, 2))
        for place in range(number)
    ]
    return activities, frozenset(lane for lane in lanes if lane is not None and draw.random() < 0.5)


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_the_clock_says_the_same(first):
    num_circles = 0
    for seed in range(first, first + 500):
        activities, by_urgency = draw_activities(seed)
        expected = ticking_clock(activities, by_urgency)
        if expected is None:
            num_circles += 1
            with pytest.raises(PlanError, match="in a circle"):
                find_times(activities, by_urgency)
            continue
        found = find_times(activities, by_urgency)
        assert dict(enumerate(found.starts_ns)) == expected[0], seed
        assert dict(enumerate(found.ends_ns)) == expected[1], seed
        for place, cause in enumerate(found.held_up_by):  # nothing starts for no reason
            assert found.starts_ns[place] == (0 if cause is None else found.ends_ns[cause])
        chain = found.critical_chain()
        assert sum(activities[place].duration_ns for place in chain) == found.end_ns
        assert found.bound_ns <= found.end_ns
    assert 0 < num_circles < 400  # orders of lanes against waits: some cannot run, most can


def test_no_order_of_the_lanes_is_below_the_bound():
    for seed in range(60):
        draw = random.Random(seed)
        activities = [
            Activity(draw.choice("ab"), draw.randint(0, 4), tuple(draw.choices(range(place), k=min(place, 2))))
            for place in range(5)
        ]
        bound_ns = find_times(activities).bound_ns
        for order in itertools.permutations(range(len(activities))):
            places = {old: new for new, old in enumerate(order)}
            shuffled = [
                Activity(
                    activities[old].lane, activities[old].duration_ns, tuple(places[i] for i in activities[old].after)
                )
                for old in order
            ]
            try:
                assert find_times(shuffled).end_ns >= bound_ns
            except PlanError:  # an order against the waits
                continue


def test_a_transfer_overlaps_what_does_not_need_it():
    step = [
        Activity("computing", 10),
        Activity("link", 30, after=(0,)),  # starts when its gradient is there
        Activity("computing", 15),
        Activity("computing", 5, after=(1,)),  # the update waits for it
    ]
    found = find_times(step)
    assert found.starts_ns == (0, 10, 10, 40) and found.end_ns == 45
    assert found.busy_ns == {"computing": 30, "link": 30}
    assert found.idle_share("computing") == found.idle_share("link") == pytest.approx(1 / 3)
    assert found.critical_path_ns == 45 == found.bound_ns
    assert found.critical_chain() == (0, 1, 3)


def test_ranks_wait_for_each_other_and_for_latency():
    step = [
        Activity((0, "computing"), 10),
        Activity((1, "computing"), 25),
        Activity((0, "link"), 5, after=(0,)),
        Activity((1, "link"), 5, after=(1,)),
        Activity(None, 2, after=(2, 3)),
        Activity((0, "computing"), 1, after=(4,)),
        Activity((1, "computing"), 1, after=(4,)),
    ]
    found = find_times(step)
    assert found.starts_ns[5] == found.starts_ns[6] == 32 and found.end_ns == 33
    assert found.idle_share((0, "computing")) == pytest.approx(22 / 33)
    assert found.held_up_by[5] == 4 and found.critical_chain() == (1, 3, 4, 5)


def test_what_is_urgent_overtakes_what_waits():
    step = [
        Activity("link", 10, urgency=5),
        Activity("link", 10, urgency=4),
        Activity("link", 10, urgency=1),
        Activity(None, 12),
        Activity("link", 10, (3,), urgency=0),
    ]
    # At 0 the third goes first; at 20 the fifth is there, and overtakes the first.
    assert find_times(step, by_urgency=["link"]).starts_ns == (30, 10, 0, 0, 20)
    assert find_times(step).starts_ns == (0, 10, 20, 0, 30)  # in their order


def test_nothing_takes_no_time():
    found = find_times([])
    assert found.end_ns == found.bound_ns == 0 and found.critical_chain() == () and found.idle_share("link") == 0


@pytest.mark.parametrize(
    "bad", [Activity("a", -1), Activity("a", 1, (1,)), Activity("a", 1, (-1,)), Activity("a", 1, (0,))]
)
def test_what_makes_no_sense_is_refused(bad):
    with pytest.raises(PlanError, match="activit"):
        find_times([bad])
