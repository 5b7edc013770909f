"""Training runs on real data, compared with eager: accuracy, peak, and the losses step by step.

LeNet-5 and LeNet-300-100 on MNIST, a character GPT on a text. Eager's peak is measured on a whole batch. LeNet-5
reaches half of it only by accumulation: at batch 64, convolution_backward alone needs more, with its argument, its
result and its workspace. DATA is a folder with `mnist` (the four idx files) and
`tinyshakespeare/input.txt`. Usage: scripts/bench training DATA [--only NAME] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

from undertow.cli.workloads import load_workload
from undertow.errors import InfeasibleBudget
from undertow.runtime.measure import measure_call
from undertow.train.config import TrainConfig
from undertow.train.feeding import Feed
from undertow.train.folder import RunFolder
from undertow.train.objective import Objective
from undertow.train.optimizing import make_optimizer, set_learning_rates
from undertow.train.progress import Display, Silent, make_display
from undertow.train.run import Run, UserCode
from undertow.train.schedules import make_schedule

HALF, LEAST = "half of eager's peak", "the planner's minimum"


@dataclass(frozen=True)
class Case:
    """A run, its budget, and the accuracy that it has to reach."""

    config: TrainConfig
    data: str
    budget: str
    min_accuracy: float | None = None


CASES = {
    "lenet5": Case(
        TrainConfig("lenet5", epochs=5, batch=16, accumulate=4, lr=0.02, weight_decay=5e-4, schedule="cosine"),
        "mnist",
        HALF,
        0.99,
    ),
    "lenet300": Case(
        TrainConfig("lenet300", epochs=20, batch=64, lr=0.05, weight_decay=1e-4, schedule="cosine"),
        "mnist",
        LEAST,
        0.982,
    ),
    "char_gpt": Case(
        TrainConfig("char_gpt", optimizer="adamw", epochs=1, max_steps=300, batch=32, warmup=50, schedule="cosine"),
        "tinyshakespeare/input.txt",
        HALF,
    ),
}


def train_eagerly(config: TrainConfig, num_steps: int) -> tuple[list[float], int]:
    """The losses of the first steps with PyTorch alone, and the peak of the second."""
    workload = load_workload(config)
    model, optimizer = workload.model, make_optimizer(config, workload.model)
    loss_of = Objective(is_sequence=workload.is_sequence, accumulate=config.accumulate).training_loss
    schedule = make_schedule(config, [group["lr"] for group in optimizer.param_groups])
    feed = Feed(workload.train_loader, config.seed)
    total = len(feed) // config.accumulate * config.epochs if config.max_steps is None else config.max_steps
    losses: list[float] = []

    def step(group: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        set_learning_rates(optimizer, schedule.at(len(losses), total))
        loss = 0.0
        for inputs, targets in group:
            part = loss_of(model(inputs), targets)
            part.backward()
            loss += part.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)

    peak = 0
    batches = feed.batches(0, 0)
    while len(losses) < num_steps:
        group = list(itertools.islice(batches, config.accumulate))
        if len(losses) == 1:
            gc.collect()
            state = [item for entry in optimizer.state.values() for item in entry.values()]
            tensors: list[Any] = [*model.parameters(), *model.buffers(), *state, *itertools.chain(*group)]
            persistent = [item for item in tensors if isinstance(item, torch.Tensor)]
            peak = measure_call(lambda group=group: step(group), persistent).peak_bytes
        else:
            step(group)
    return losses, peak


def make_run(config: TrainConfig, folder: Path, display: Display) -> Run:
    """A run on the CPU."""
    return Run(config, load_workload(config), RunFolder(folder), display, torch.device("cpu"), UserCode())


def find_minimum(config: TrainConfig) -> int:
    """The least peak that the planner finds for the step: it says so when it refuses a budget of one byte."""
    requested = replace(config, budget="1")
    try:
        make_run(requested, Path(), Silent()).prepare()
    except InfeasibleBudget as refusal:
        return refusal.minimum_bytes
    raise AssertionError("a step within one byte")


def run_case(name: str, data: Path) -> dict[str, Any]:
    """One run beside eager."""
    case = CASES[name]
    config = replace(case.config, data=str(data / case.data))
    num_compared = config.max_steps or 200
    losses, _ = train_eagerly(config, num_compared)
    whole = replace(config, batch=config.batch * config.accumulate, accumulate=1)
    _, eager_peak = train_eagerly(whole, 2)
    minimum = find_minimum(config)
    config = replace(config, budget=str(eager_peak // 2 if case.budget == HALF else minimum))
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(config, Path(folder), make_display())
        run.prepare()
        result = run.train()
        curve = [item["loss"] for item in run.folder.read_metrics() if item["kind"] == "train"]
    progress = result.progress
    assert progress.measured_peak_bytes is not None
    return {
        "case": name,
        "budget": case.budget,
        "batch": config.batch,
        "accumulate": config.accumulate,
        "budget_bytes": result.budget_bytes,
        "minimum_bytes": minimum,
        "eager_peak_bytes": eager_peak,
        "predicted_peak_bytes": progress.predicted_peak_bytes,
        "measured_peak_bytes": progress.measured_peak_bytes,
        "is_within_budget": progress.measured_peak_bytes <= int(config.budget or 0),
        "test_accuracy": progress.test_accuracy,
        "is_accurate": case.min_accuracy is None or (progress.test_accuracy or 0) >= case.min_accuracy,
        "test_loss": progress.test_loss,
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "compared_steps": len(losses),
        "is_loss_curve_eagers": curve[: len(losses)] == losses,
    }


def main() -> None:
    """Run the cases; the exit code is 1 if one fails its checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "training.json")
    options = parser.parse_args()
    results = {"machine": describe_machine(), "results": []}
    for name in [options.only] if options.only else CASES:
        results["results"].append(run_case(name, options.data))
        print(json.dumps(results["results"][-1], indent=2), flush=True)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")
    checks = ("is_within_budget", "is_accurate", "is_loss_curve_eagers")
    if not all(item[check] for item in results["results"] for check in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
