"""Which gradients are reduced together: beside every division there is, each timed on lanes."""

import random
from itertools import combinations, pairwise

import pytest

from undertow.costs.links import LinkSpeed, find_link_speed, link_costs
from undertow.passes.bucket_sizes import LEAST_LIMIT_BYTES, NEARLY, Ready, choose_sizes, time_of

MIB = 1 << 20


def divisions(number):
    """Every way to cut a row of so many."""
    for count in range(number):
        for cuts in combinations(range(1, number), count):
            ends = (0, *cuts, number)
            yield [end - start for start, end in pairwise(ends)]


def draw_gradients(seed):
    draw = random.Random(seed)
    now, gradients = 0, []
    for _ in range(draw.randint(1, 9)):
        now += draw.randint(0, 4_000_000)
        gradients.append(Ready(now, draw.choice([1 << 10, 1 << 16, MIB, 4 * MIB]), "float32"))
    return gradients, LinkSpeed(draw.choice([0, 100_000, 2_000_000]), draw.choice([0.1, 1.0, 5.0]))


@pytest.mark.parametrize("seed", range(40))
def test_no_division_is_much_faster(seed):
    gradients, speed = draw_gradients(seed)
    sizes = choose_sizes(gradients, 1.0, speed, 0)
    assert sum(sizes) == len(gradients)
    best_ns = min(time_of(gradients, other, 1.0, speed) for other in divisions(len(gradients)))
    assert best_ns <= time_of(gradients, sizes, 1.0, speed) <= best_ns * NEARLY + 1


def test_a_slow_start_makes_few_buckets_and_a_quick_one_many():
    gradients = [Ready(number * 1_000_000, MIB, "float32") for number in range(1, 41)]
    slow_start = choose_sizes(gradients, 1.0, LinkSpeed(20_000_000, 1.0), 0)
    quick_start = choose_sizes(gradients, 1.0, LinkSpeed(1_000, 1.0), 0)
    assert len(slow_start) < 5 < len(quick_start)
    assert quick_start[-1] == 1  # nothing hides the last


def test_kinds_never_share_a_bucket_and_small_buckets_are_joined():
    kinds = ["float32"] * 5 + ["bfloat16"] * 5 + ["float32"] * 3
    gradients = [Ready(number, 10, kind) for number, kind in enumerate(kinds)]
    assert choose_sizes(gradients, 1.0, LinkSpeed(10, 1.0), 0) == [5, 5, 3]
    many = [Ready(number * 1_000_000, LEAST_LIMIT_BYTES, "float32") for number in range(64)]
    sizes = choose_sizes(many, 1.0, LinkSpeed(0, 0.001), 4 * LEAST_LIMIT_BYTES)
    assert all(size >= 4 for size in sizes[:-1]) and sum(sizes) == 64


def test_the_line_through_two_measurements():
    speed = find_link_speed(link_costs({1000: 51_000, 1_001_000: 1_051_000, 5000: 70_000}))
    assert (speed.latency_ns, speed.ns_per_byte) == (50_000, 1.0)
    assert speed.duration_ns(0) == 0 and speed.duration_ns(2000) == 52_000
    assert find_link_speed(link_costs({1000: 9000, 2000: 8000})).ns_per_byte == 0  # noise is no negative time
    assert find_link_speed({}).ns_per_byte > 0
