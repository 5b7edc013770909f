"""A budget as the operating system sees it: how much a process grows, measuring in another process, free memory."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import undertow as ut
from undertow.api.fitting import estimate_fit
from undertow.costs import apart, measuring
from undertow.costs.apart import measure_apart
from undertow.costs.measuring import measure_costs
from undertow.free_memory import FreeMemory
from undertow.ir.operation import Operation
from undertow.ops.interpret import NO_LIVE
from undertow.runtime import resident

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read as Linux shows it")

GROWTH = """
import json, sys
import torch
from torch import nn

def resident(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

torch.manual_seed(0)
widths = (3, 24, 40, 56, 72, 64, 48, 32)
layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b),
                                                                  nn.SiLU())]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
x, y = torch.randn(16, 3, 96, 96), torch.randint(10, (16,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
if sys.argv[1] == "eager":
    def step(x, y):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    import undertow as ut
    how = {"targets": (y,), "loss": nn.functional.cross_entropy, "optimizer": optimizer}
    step = ut.train_step(model, (x,), **how, budget=int(sys.argv[1]))
for _ in range(3):
    step(x, y)
print(resident("VmHWM") - before)
"""


def growth(how):
    done = subprocess.run([sys.executable, "-c", GROWTH, str(how)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@LINUX
def test_the_process_keeps_to_the_budget():
    """Beside the budget: 5 % of it, and 200 MiB for libraries and compiled kernels."""
    eager = growth("eager")
    budget = eager * 2 // 5
    assert growth(budget) <= budget * 1.05 + (200 << 20) < eager


@LINUX
def test_free_memory_is_returned_only_where_it_would_exceed_the_limit(monkeypatch):
    counts = {"resident": 1000, "trims": 0}

    def trim():
        counts["trims"] += 1
        counts["resident"] = 700

    monkeypatch.setattr(resident, "resident_bytes", lambda: counts["resident"])
    monkeypatch.setattr(resident, "trim_memory", trim)
    monkeypatch.setattr(resident, "drop_compiler", lambda: None)
    monkeypatch.setattr(resident, "SLACK_BYTES", 0)
    limit = resident.ResidentLimit(1 << 10)
    limit.make_room(10, 600)  # of 700 bytes that are left 100 are not the step's: the limit is 1140
    assert counts["trims"] == 1
    limit.make_room(400, 600)
    assert counts["trims"] == 1
    limit.make_room(450, 600)
    assert counts["trims"] == 2


@LINUX
def test_the_compiler_is_dropped_and_comes_back():
    numba = pytest.importorskip("numba")
    resident.drop_compiler()
    without = resident.resident_bytes()
    assert numba.njit(lambda x: x + 1)(1) == 2
    grown = resident.resident_bytes() - without
    resident.drop_compiler()
    assert resident.resident_bytes() < without + grown // 2


def step_nodes(width=8):
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    return ut.plan(model, (torch.randn(4, width),)).plan.nodes


def test_operations_are_measured_in_another_process(monkeypatch):
    monkeypatch.setattr(apart, "FEWEST_BYTES", 0)
    monkeypatch.setattr(measuring, "_measure_duration", None)  # here nothing is measured
    costs = {}
    assert measure_costs(step_nodes(), costs, NO_LIVE, is_apart=True) == len(costs) > 0
    assert all(cost.duration_ns > 0 for cost in costs.values())


def test_an_operation_that_only_this_process_knows_is_measured_here(monkeypatch):
    monkeypatch.setattr(apart, "FEWEST_BYTES", 0)
    (node, *_) = [node for node in step_nodes() if node.name.startswith("tanh")]
    own = type(node)(Operation("own", torch.clone), node.args, {}, node.outputs, node.origin)
    costs = {}
    measure_costs([own], costs, NO_LIVE, is_apart=True)
    assert [cost.duration_ns > 0 for cost in costs.values()] == [True]


def test_a_process_that_dies_takes_nothing_with_it(monkeypatch):
    start, num_started = apart._start, []

    def start_one_that_dies_first():
        num_started.append(1)
        if len(num_started) > 1:
            return start()
        code = "import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 9)"
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)

    monkeypatch.setattr(apart, "_start", start_one_that_dies_first)
    nodes = {str(place): node for place, node in enumerate(step_nodes()) if not node.operation.costs_nothing}
    with pytest.warns(UserWarning, match="ended with code -9.*estimated"):
        costs, strangers = measure_apart(nodes, iter)
    assert not strangers and [*costs] == [*nodes][1:]


def test_a_budget_of_what_is_free(monkeypatch):
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    monkeypatch.setattr(
        "undertow.api.budgets.find_free_memory", lambda device: FreeMemory(1 << 30, 2 << 30, "the container")
    )
    plan = ut.plan(model, (x,), budget="auto", costs="model").plan
    held = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert plan.budget_bytes == (1 << 30) * 95 // 100 - (200 << 20) + held
    assert "budget auto" in str(plan) and "1.0 GiB of 2.0 GiB are free in the container" in str(plan)
    monkeypatch.setattr(
        "undertow.api.budgets.find_free_memory", lambda device: FreeMemory(1 << 20, 2 << 30, "the container")
    )
    with pytest.raises(ut.CallError, match="finds no room: 1.0 MiB of 2.0 GiB are free in the container"):
        ut.plan(model, (x,), budget="auto")
    with pytest.warns(UserWarning, match="is more than there is: 1.0 MiB of 2.0 GiB are free in the container"):
        ut.plan(model, (x,), budget="1TiB", costs="model")


def test_will_it_fit(monkeypatch, capsys):
    from undertow.cli.commands import main

    monkeypatch.setattr("undertow.api.fitting.find_free_memory", lambda device: FreeMemory(1 << 20, 1 << 30, "here"))
    assert main(["plan", "lenet5", "--batch", "64"]) == 1  # nothing is run
    assert capsys.readouterr().out.rstrip().endswith("does not fit without a budget: try --budget auto")
    monkeypatch.setattr("undertow.api.fitting.find_free_memory", lambda device: FreeMemory(1 << 30, 1 << 30, "here"))
    assert main(["plan", "lenet5", "--batch", "64", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["least_peak_bytes"] <= found["peak_bytes"]


def test_the_estimate_encloses_what_is_measured():
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)), torch.randn(8, 3, 64, 64)
    estimate = estimate_fit(model, (x,))
    measured = ut.measure(ut.plan(model, (x,)), x).peak_bytes
    assert estimate.least_peak_bytes <= measured <= estimate.peak_bytes
