"""`ut.measure`: what it runs, what it counts, and that nobody notices it."""

import pytest
import torch
from torch import nn

import undertow as ut
from undertow.costs.usage import unwatched, watch_memory
from undertow.runtime.measure import measure_call


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def test_planning_and_measuring_write_nothing(capfd):
    model, x = nn.Linear(59, 11), torch.randn(5, 59)
    step = ut.train_step(model, (x,), loss=torch.sum, budget="1MiB")  # which measures costs
    ut.measure(step, x)
    assert capfd.readouterr() == ("", "")


def test_a_peak_is_what_was_held_at_once():
    def call():
        first = torch.empty(1000)
        del first
        second, third = torch.empty(300), torch.empty(500, 300)
        del second
        third.sum()

    assert measure_call(call, []).peak_bytes == 4 * (300 + 500 * 300)


def test_a_watch_counts_what_is_left_of_an_inner_one_and_not_its_peak():
    before = torch.empty(10)
    with watch_memory() as outer:
        before = torch.empty(100)
        with unwatched():
            torch.empty(100_000)
            kept = torch.empty(1000)
            with watch_memory() as inner:
                torch.empty(7)
        after = torch.empty(100)
        del before
    assert (inner.held_bytes, inner.peak_bytes) == (0, 28)
    assert outer.peak_bytes == kept.nbytes + 2 * after.nbytes
    assert outer.held_bytes == kept.nbytes + after.nbytes


def test_nothing_is_measured_inside_a_profile_of_the_user():
    with torch.profiler.profile(), pytest.raises(ut.CallError, match="it is running"):
        ut.measure(nn.Linear(3, 3), torch.randn(2, 3))


def test_a_profile_of_the_user_inside_a_measured_step_says_so():
    def call():
        with torch.profiler.profile():
            torch.randn(100, 100)

    with pytest.raises(RuntimeError, match="already enabled"):
        measure_call(call, [])
    assert measure_call(lambda: torch.randn(10), []).peak_bytes == 40


@pytest.mark.parametrize("kind", ["plan", "train_step"])
def test_a_step_that_is_planned_anew_at_every_call_is_measured(kind):
    """BatchNorm with momentum=None reads how many batches it has seen, which is another number each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64, momentum=None), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(256, 8)
    if kind == "plan":
        step = ut.plan(model, (x,), budget="1MiB")
    else:
        step = ut.train_step(model, (x,), loss=torch.sum, budget="1MiB")
    first, second = ut.measure(step, x).peak_bytes, ut.measure(step, x).peak_bytes
    assert first == second <= step.plan.peak_bytes
    assert first >= 0.9 * step.plan.peak_bytes
