"""The search against exhaustive search, the reference replay and its own bounds."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from exhaustive_schedules import frontier
from planner_instances import chain, tiny, transformer, unet

from undertow.planner.bounds import lower_bound_peak, lower_bound_time
from undertow.planner.instance import check_first_runs_in_order, make_instance, replay
from undertow.planner.search import minimum_peak, search
from undertow.planner.sequence import current_schedule, make_sequence
from undertow.planner.state import EXCESS, TIME

MAX_RUNS = 7
MOVES = 10_000


@pytest.mark.parametrize("is_fixed_order", [True, False])
@pytest.mark.parametrize("num_instances", [35, pytest.param(520, marks=pytest.mark.exhaustive)])
def test_tiny_instances_agree_with_exhaustive_search(is_fixed_order, num_instances):
    num_checked = num_missed = 0
    for seed in range(num_instances) if is_fixed_order else range(520, 520 + num_instances):
        instance = tiny(seed)
        points = frontier(instance, MAX_RUNS, is_fixed_order)
        if not points:
            continue
        peak_bound = lower_bound_peak(instance, is_fixed_order)
        assert peak_bound.amount <= points[0][0], seed
        for budget, best_time in points:
            bound = lower_bound_time(instance, budget, is_fixed_order)
            # Schedules longer than those enumerated may be faster, so the bound is compared with the search below.
            found = search(instance, budget, is_fixed_order=is_fixed_order, num_moves=MOVES, seed=seed)
            num_checked += 1
            assert bound.amount <= best_time, (seed, budget)
            if found is None or found.time > best_time:
                num_missed += 1
                continue
            assert found.peak_bytes <= budget
            assert bound.amount <= found.time, (seed, budget)
    assert num_checked > num_instances  # in each of the two order modes
    assert num_missed <= 0.005 * num_checked, (num_missed, num_checked)


@pytest.mark.parametrize("is_fixed_order", [True, False])
@pytest.mark.parametrize("make", [lambda: chain(30), lambda: unet(3, 2), lambda: transformer(2)])
def test_profile_and_time_agree_with_the_replay_after_many_moves(make, is_fixed_order):
    instance = make()
    base = replay(instance, instance.order)
    budget = int(0.6 * base.peak_bytes)
    found = search(instance, budget, is_fixed_order=is_fixed_order, num_moves=20_000)
    assert found is not None
    assert found.peak_bytes <= budget
    state = make_sequence(instance, found.schedule, is_fixed_order, budget // 2, 0)
    again = replay(instance, found.schedule)
    assert state[TIME] == again.time
    assert state[EXCESS] == np.maximum(again.run_bytes - budget // 2, 0).sum()
    assert current_schedule(state).tolist() == found.schedule.tolist()


def test_the_same_seed_gives_the_same_schedule():
    instance = transformer(3)
    budget = replay(instance, instance.order).peak_bytes // 2
    first, second = (search(instance, budget, is_fixed_order=False, num_moves=10_000, seed=5) for _ in range(2))
    assert first is not None and second is not None
    assert first.schedule.tolist() == second.schedule.tolist()


@pytest.mark.parametrize("make", [lambda: chain(100), lambda: unet(5, 4), lambda: transformer(8)])
@pytest.mark.parametrize("fraction", [0.8, 0.5, 0.3])
def test_training_graphs_come_close_to_the_bound(make, fraction):
    instance = make()
    base = replay(instance, instance.order)
    budget = max(int(fraction * base.peak_bytes), int(1.1 * lower_bound_peak(instance, True).amount))
    bound = lower_bound_time(instance, budget, True)
    found = search(instance, budget, is_fixed_order=True, num_moves=200_000, lower_bound_time=bound.amount)
    assert found is not None
    check_first_runs_in_order(instance, found.schedule)
    assert bound.amount <= found.time <= 1.03 * bound.amount


def test_several_starts_are_accepted_and_none_is_made_worse():
    instance = chain(40)
    budget = replay(instance, instance.order).peak_bytes // 2
    good = search(instance, budget, is_fixed_order=True, num_moves=50_000)
    assert good is not None
    again = search(instance, budget, is_fixed_order=True, starts=[instance.order, good.schedule], num_moves=1000)
    assert again is not None and again.time <= good.time


@pytest.mark.parametrize("is_fixed_order", [True, False])
def test_minimum_peak_lies_between_the_bound_and_the_base(is_fixed_order):
    instance = transformer(4)
    bound = lower_bound_peak(instance, is_fixed_order)
    smallest = minimum_peak(instance, instance.order, bound.amount - 1, is_fixed_order=is_fixed_order, num_moves=20_000)
    assert bound.amount <= smallest.peak_bytes < 0.3 * replay(instance, instance.order).peak_bytes
    assert search(instance, bound.amount - 1, is_fixed_order=is_fixed_order, num_moves=5000) is None


def test_bounds_know_that_a_single_target_needs_every_kind():
    instance = make_instance([4, 4, 4], [5, 5, 5], [[], [0], [1]], [[0], [1], [2]], targets=[2])
    assert lower_bound_peak(instance, False).amount == 8
    assert lower_bound_time(instance, 8, False).amount == 15


def test_a_value_that_two_kinds_make_once_each_need_not_stay_alive():
    reads, writes = [[], [1], [0, 2], []], [[0, 1], [2, 3], [4], [0]]
    instance = make_instance(
        [10, 1, 1, 10, 1], [1] * 4, reads, writes, can_repeat=[False] * 4, order=[0, 1, 2], targets=[4]
    )
    assert replay(instance, [0, 1, 3, 2]).peak_bytes == 12
    assert lower_bound_peak(instance, False).amount <= 12


def test_importing_the_planner_changes_no_warning_filter():
    code = "import warnings, numpy, numba; before = list(warnings.filters); import undertow.planner.bounds; "
    subprocess.run([sys.executable, "-c", f"{code}assert warnings.filters == before"], check=True)
