"""`ut.measure`: what it runs, what it counts, and that nobody notices it."""

import pytest
import torch
from torch import nn

import undertow as ut
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
