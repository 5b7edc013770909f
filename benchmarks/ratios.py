"""Extra time at the memory ratios that MONeT reports (Shah et al., ICLR 2021, figure 1; on a GPU, at other batches).

The memory is that of eager's step, measured; the extra time is that of the plan for this share of it over the plan
without a limit, by measured costs, and once more as run, interleaved.

Usage: scripts/bench ratios [--models ...] [--rounds N] [--out F]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from budgets import WORKLOADS
from machine import describe_machine

import undertow as ut
from undertow.runtime.measure import measure_call

# Share of PyTorch's memory and extra time in percent, as published.
PUBLISHED = {"resnet50": (0.33, 12), "unet": (0.35, 12), "mobilenet": (0.35, 9), "vgg16": (0.39, 9)}
# Large enough that activations, and not parameters, fill the memory, as in the paper.
BATCH = {"resnet50": 64, "unet": 8, "mobilenet": 64, "vgg16": 32}


def compare(name: str, num_rounds: int) -> dict[str, Any]:
    """One model at its published ratio, or at the least that can be reached."""
    torch.manual_seed(0)
    work = WORKLOADS[name](BATCH[name])
    share, published = PUBLISHED[name]

    def eager() -> None:
        work.model.zero_grad(set_to_none=True)
        work.loss(work.model(*work.args), *work.targets).backward()

    eager()
    work.model.zero_grad(set_to_none=True)
    gc.collect()
    persistent = [*work.model.parameters(), *work.model.buffers(), *work.args, *work.targets]
    peak_bytes = measure_call(eager, persistent).peak_bytes
    settings: dict[str, Any] = {"targets": work.targets, "loss": work.loss}
    budget = int(share * peak_bytes)
    found: dict[str, Any] = {"eager_peak_bytes": peak_bytes, "published_percent": published}
    try:
        small = ut.train_step(work.model, work.args, **settings, budget=budget)
    except ut.InfeasibleBudget as refusal:
        found["least_share"] = refusal.minimum_bytes / peak_bytes
        small = ut.train_step(work.model, work.args, **settings, budget=refusal.minimum_bytes)
    free = ut.train_step(work.model, work.args, **settings, budget=4 * peak_bytes)
    seconds: dict[str, list[float]] = {"small": [], "free": []}
    for number in range(num_rounds + 1):
        for which, step in (("small", small), ("free", free)):
            step.drop_gradients()
            start = time.perf_counter()
            step(*work.args, *work.targets)
            if number:
                seconds[which].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["small"], seconds["free"], strict=True)]
    return found | {
        "share": small.plan.peak_bytes / peak_bytes,
        "predicted_percent": 100 * (small.plan.step_us / free.plan.step_us - 1),
        "run_percent": 100 * (statistics.median(ratios) - 1),
        "gap": small.plan.gap,
    }


def main() -> None:
    """Compare all four models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(PUBLISHED))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="benchmarks/results/ratios.json")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe_machine()}
    for name in options.models:
        results[name] = compare(name, options.rounds)
        print(name, json.dumps(results[name]), flush=True)
    Path(options.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
