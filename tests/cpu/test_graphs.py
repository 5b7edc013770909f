"""When a step is captured and when its graph is freed, with a stand-in for the graph; real ones are in tests/gpu."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import undertow as ut
from undertow.runtime.cuda_graphs import WARM_CALLS, GraphedStep, why_not_captured


@pytest.fixture
def made(monkeypatch):
    """A graphed step of a small model, with what it ran, captured and replayed."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    plan = ut.train_step(model, (x,), loss=lambda y: y.square().mean()).plan
    log = []
    step = GraphedStep(plan, {}, lambda inputs: log.append("run") or [torch.zeros(())])
    step.reason = None  # it is on the CPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("given back"))
    sizes = {"needed": 0}

    def capture(inputs, num_bytes):
        log.append("capture")
        is_whole = num_bytes >= sizes["needed"]
        return SimpleNamespace(
            num_bytes=num_bytes + (0 if is_whole else 50 << 20),
            is_whole=is_whole,
            is_in_use=lambda: sizes.get("held", False),
            replay=lambda inputs: log.append("replay") or [torch.zeros(())],
        )

    monkeypatch.setattr(step, "_capture_within", capture)
    values = {"weight": model.weight, "bias": model.bias}
    inputs = [values.get(item.path, x) for item in plan.program.inputs]
    return SimpleNamespace(step=step, inputs=inputs, log=log, sizes=sizes, model=model, plan=plan)


def run(made, count):
    start = len(made.log)
    for _ in range(count):
        made.step.run(made.inputs)
    return made.log[start:]


def test_a_step_is_captured_once_things_stay_the_same(made):
    assert run(made, WARM_CALLS + 3) == ["run"] * WARM_CALLS + ["capture", "replay", "replay", "replay"]
    assert made.step.note.startswith("captured as a CUDA graph")


def test_a_graph_is_freed_when_something_moves(made):
    run(made, WARM_CALLS + 1)
    made.model.weight.data = made.model.weight.data.clone()
    assert run(made, WARM_CALLS + 1) == ["given back", *["run"] * WARM_CALLS, "capture", "replay"]


def test_gradients_that_somebody_holds_are_not_written_over(made):
    run(made, WARM_CALLS + 1)
    made.sizes["held"] = True
    assert run(made, 1) == ["given back", "run"]


def test_too_small_a_stretch_is_tried_in_other_sizes(made):
    made.sizes["needed"] = 20 << 20
    log = run(made, WARM_CALLS + 1)
    assert log.count("capture") > 2 and log[-1] == "replay"
    assert 20 << 20 <= made.step._captured.num_bytes <= 25 << 20


def test_a_graph_over_the_budget_is_given_up(made):
    made.step._plan = replace(made.plan, budget_bytes=1)
    log = run(made, WARM_CALLS + 2)
    assert log == ["run"] * WARM_CALLS + ["capture", "given back", "run", "run"]
    assert "over the budget" in made.step.note


def test_reasons_are_named(monkeypatch, made):
    assert "works on the CPU" in why_not_captured(made.plan.program)
    planned = ut.plan(made.model, (torch.randn(5, 4),))
    assert why_not_captured(planned.plan.program) == "only whole training steps are"
    monkeypatch.setenv("UNDERTOW_GRAPHS", "off")
    assert why_not_captured(made.plan.program) == "UNDERTOW_GRAPHS=off"
