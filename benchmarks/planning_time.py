"""How long planning takes with a warm cost cache, and how near to the bound its plans are.

Usage: scripts/bench planning_time [--out F]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch import nn

from undertow.api.training import make_step
from undertow.models import ZOO
from undertow.pipeline import derive, find_planner, record
from undertow.planner import curve
from undertow.terms import Terms


class Long(nn.Module):
    """A chain of `num_blocks` small residual blocks: about ten operations of the step each."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The chain's output."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def gpt(num_layers: int) -> tuple[nn.Module, Any, Any, Any]:
    """GPT-2 of this depth and a width that fits any machine: the number of operations is what counts."""
    model = ZOO["gpt"].build(num_layers=num_layers, width=64, num_heads=4, vocabulary=512, context=64)
    tokens = torch.randint(512, (2, 64))
    return model, (tokens,), (tokens,), ZOO["gpt"].loss


def long() -> tuple[nn.Module, Any, Any, Any]:
    """A program of 20,160 operations before planning."""
    return Long(1260), (torch.randn(64, 16),), (torch.randn(64, 16),), nn.functional.mse_loss


WORKLOADS: dict[str, Callable[[], tuple[nn.Module, Any, Any, Any]]] = {
    "gpt2, 12 layers": lambda: gpt(12),
    "gpt2, 48 layers": lambda: gpt(48),
    "20,000 operations": long,
}


def plan_once(make: Callable[[], tuple[nn.Module, Any, Any, Any]]) -> dict[str, Any]:
    """Plan twice, the second time with all costs known, for half of the way from the most memory to the least."""
    model, args, targets, loss = make()
    step = make_step(model, len(args), loss, None, Terms())
    for _ in range(2):
        curve._KNOWN.clear()
        start = time.perf_counter()
        with torch.enable_grad():
            captured = record(step.request, (*args, *targets), {})
        program = derive(step.request, captured.program, ())
        captured_s = time.perf_counter() - start
        planner = find_planner(step.request, program, captured.live)
        points = planner.curve.points
        budget = (points[0].peak_bytes + points[-1].peak_bytes) // 2
        plan = planner.plan_within(budget)
        seconds = time.perf_counter() - start
    return {
        "num_operations": len(program.nodes),
        "num_operations_planned": len(plan.nodes),
        "capture_and_derive_s": round(captured_s, 2),
        "seconds": round(seconds, 2),
        "peak_share": plan.peak_bytes / points[-1].peak_bytes,
        "gap": plan.gap,
        "outcome": plan.outcome.name.lower(),
    }


def main() -> None:
    """Time all workloads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="benchmarks/results/planning_time.json")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe_machine()}
    for name, make in WORKLOADS.items():
        results[name] = plan_once(make)
        print(name, json.dumps(results[name]), flush=True)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
