"""Extra time at the memory ratios that MONeT reports (Shah et al., ICLR 2021, figure 1; on a GPU, at other batches).

A step is forward pass, loss, backward pass and the update by SGD. Memory and time are shares of eager's step: its
measured peak, and its time in the same interleaved run. Undertow is planned for the published share of that peak, with
exact and with fast numerics, and exact without a limit. Where the share cannot be reached, the least memory is used.

Usage: scripts/bench ratios [--models ...] [--rounds N] [--out F]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from budgets import WORKLOADS, Workload
from machine import describe_machine

import undertow as ut
from undertow.runtime.measure import measure_call

# Share of PyTorch's memory and extra time in percent, as published.
PUBLISHED = {"resnet50": (0.33, 12), "unet": (0.35, 12), "mobilenet": (0.35, 9), "vgg16": (0.39, 9)}
# Large enough that activations, and not parameters, fill the memory, as in the paper.
SIZES: dict[str, dict[str, int]] = {
    "resnet50": {"batch": 32, "side": 224},
    "unet": {"batch": 4, "side": 320},
    "mobilenet": {"batch": 48, "side": 224},
    "vgg16": {"batch": 32},
}


def _eager(work: Workload, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        work.loss(work.model(*work.args), *work.targets).backward()
        optimizer.step()

    return step


def _planned(work: Workload, optimizer: torch.optim.Optimizer, budget: int, numerics: str) -> tuple[Any, bool]:
    """A step within the budget, or the one of least memory if that is infeasible; and whether it is within."""
    settings: dict[str, Any] = {
        "targets": work.targets, "loss": work.loss, "optimizer": optimizer, "numerics": numerics
    }  # fmt: skip
    try:
        return ut.train_step(work.model, work.args, **settings, budget=budget), True
    except ut.InfeasibleBudget as refusal:
        return ut.train_step(work.model, work.args, **settings, budget=refusal.minimum_bytes), False


def compare(name: str, num_rounds: int) -> dict[str, Any]:
    """One model at its published share, or at the least memory."""
    torch.manual_seed(0)
    work = WORKLOADS[name](**SIZES[name])
    optimizer = torch.optim.SGD(work.model.parameters(), lr=1e-4)
    share, published = PUBLISHED[name]
    eager = _eager(work, optimizer)
    eager()
    work.model.zero_grad(set_to_none=True)
    gc.collect()
    persistent = [*work.model.parameters(), *work.model.buffers(), *work.args, *work.targets]
    peak_bytes = measure_call(eager, persistent).peak_bytes
    budgets = {"exact": (int(share * peak_bytes), "exact"), "fast": (int(share * peak_bytes), "fast")}
    budgets["exact, no limit"] = (4 * peak_bytes, "exact")
    planned = {which: _planned(work, optimizer, *terms) for which, terms in budgets.items()}
    runs: dict[str, Callable[[], Any]] = {"eager": eager}
    for which, (step, _) in planned.items():
        runs[which] = lambda step=step: step(*work.args, *work.targets)
    seconds: dict[str, list[float]] = {which: [] for which in runs}
    for number in range(num_rounds + 1):
        for which, run in runs.items():
            work.model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            run()
            if number:
                seconds[which].append(time.perf_counter() - start)
    found: dict[str, Any] = {"eager_peak_bytes": peak_bytes, "published_percent": published, "asked_share": share}
    found["eager_s"] = statistics.median(seconds["eager"])
    for which, (step, is_within) in planned.items():
        ratios = [a / b for a, b in zip(seconds[which], seconds["eager"], strict=True)]
        found[which] = {
            "share": step.plan.peak_bytes / peak_bytes,
            "is_within": is_within,
            "percent_over_eager": 100 * (statistics.median(ratios) - 1),
            "least_and_most_percent": [100 * (min(ratios) - 1), 100 * (max(ratios) - 1)],
            "gap": step.plan.gap,
        }
    free_us = planned["exact, no limit"][0].plan.step_us
    found["exact"]["predicted_percent_over_no_limit"] = 100 * (planned["exact"][0].plan.step_us / free_us - 1)
    return found


def main() -> None:
    """Compare; the results of models that are not named stay in the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(PUBLISHED))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="benchmarks/results/ratios.json")
    options = parser.parse_args()
    out = Path(options.out)
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name in options.models:
        results[name] = compare(name, options.rounds) | {"machine": describe_machine()}
        print(name, json.dumps(results[name]), flush=True)
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
