"""How far plans are from their proved bounds over the zoo, at half the memory that the step takes without a budget.

Batches are large enough that activations, and not parameters, fill the memory. Where half cannot be reached, the least
memory is used, and the file says so. The gap is (step - bound) / bound. The file also has what the plan adds to the
unconstrained step, and which share of that is unproved. Costs are modelled, so all machines give the same figures.

Usage: scripts/bench gaps [--models vgg16,gpt] [--share 0.5] [--out F]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

import undertow as ut
from undertow.models import ZOO

BATCH = {
    "mlp": 16384, "lenet300": 65536, "lenet5": 4096, "alexnet": 256, "vgg_small": 512, "vgg16": 64, "resnet50": 64,
    "unet": 8, "gpt": 16, "lstm": 256,
}  # fmt: skip


def measure_gap(name: str, share: float) -> dict[str, Any]:
    """Plan one model and compare the plan with its bound."""
    zoo = ZOO[name]
    torch.manual_seed(0)
    model = zoo.build()
    args, targets = zoo.example_inputs(BATCH[name]), zoo.example_targets(BATCH[name])
    settings: dict[str, Any] = {"targets": targets, "loss": zoo.loss, "costs": "model"}
    free = ut.train_step(model, args, **settings, budget=2**34).plan
    budget = int(share * free.peak_bytes)
    start = time.perf_counter()
    try:
        plan = ut.train_step(model, args, **settings, budget=budget).plan
    except ut.InfeasibleBudget as refusal:
        budget = refusal.minimum_bytes
        plan = ut.train_step(model, args, **settings, budget=budget).plan
    added = plan.step_us - free.step_us
    return {
        "batch": BATCH[name],
        "share": budget / free.peak_bytes,
        "gap_percent": 100 * plan.gap,
        "added_percent": 100 * added / free.step_us,
        "unproved_share_of_added": (plan.step_us - plan.lower_bound_us) / added if added > 0 else 0.0,
        "outcome": plan.outcome.value,
        "planning_s": time.perf_counter() - start,
    }


def main() -> None:
    """Measure all models, then print the median."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(BATCH))
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--out", default="benchmarks/results/gaps.json")
    options = parser.parse_args()
    rows = {}
    for name in options.models.split(","):
        rows[name] = measure_gap(name, options.share)
        print(
            name,
            json.dumps({key: round(item, 3) if isinstance(item, float) else item for key, item in rows[name].items()}),
            flush=True,
        )
    median = statistics.median(row["gap_percent"] for row in rows.values())
    print(f"median gap {median:.2f} %")
    results = {"machine": describe_machine(), "median_gap_percent": median, "models": rows}
    Path(options.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
