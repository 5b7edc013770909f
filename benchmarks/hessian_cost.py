#!/usr/bin/env python3
"""What a Hessian costs: time and peak memory against the number of parameters.

In: nothing. Out: benchmarks/results/hessian_cost.json, which docs/hessian-cost.md shows.

The function is the loss of a network with one hidden layer, tanh(x w0 + b0) w1 + b1, in float64; its width sets the
number of parameters. Times are medians of interleaved calls. Peak memory is the profiler's, of one further call each.
Other networks and GPUs are not measured.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import undertow as ut
from undertow.runtime.measure import measure_call

RESULTS = Path(__file__).resolve().parent / "results" / "hessian_cost.json"
NUM_EXAMPLES, NUM_FEATURES = 32, 10
WIDTHS = (8, 25, 83, 250, 500)  # 12 parameters per unit of width, and one more: 97 to 6,001
NUM_REPEATS = 5


def make_loss(width: int) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """The loss as a function of its four parameter tensors, and values for them."""
    generator = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, y = normal(NUM_EXAMPLES, NUM_FEATURES), normal(NUM_EXAMPLES, 1)

    def loss(w0: torch.Tensor, b0: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w0 + b0) @ w1 + b1 - y).square().mean()

    scale = width**-0.5
    return loss, (normal(NUM_FEATURES, width) / NUM_FEATURES**0.5, normal(width), normal(width, 1) * scale, normal(1))


def measure(width: int) -> dict[str, Any]:
    """One row of the table."""
    loss, parameters = make_loss(width)
    argnums = tuple(range(len(parameters)))
    vectors = tuple(torch.ones_like(parameter) for parameter in parameters)
    calls: dict[str, Callable[[], Any]] = {
        "value": lambda: loss(*parameters),
        "gradient": lambda: ut.grad(loss, argnums)(*parameters),
        "hvp": lambda: ut.hvp(loss, parameters, vectors),
        "hessian": lambda: ut.hessian(loss, argnums)(*parameters),
        "torch_func_hessian": lambda: torch.func.hessian(loss, argnums)(*parameters),
    }
    num_parameters = sum(parameter.numel() for parameter in parameters)
    row: dict[str, Any] = {"num_parameters": num_parameters, "result_bytes": 8 * num_parameters**2}
    row["relative_difference"] = difference(calls["hessian"](), calls["torch_func_hessian"]())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(NUM_REPEATS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    row |= {f"{name}_s": statistics.median(found) for name, found in times.items()}
    for name in ("gradient", "hvp", "hessian", "torch_func_hessian"):
        row[f"{name}_peak_bytes"] = measure_call(calls[name], parameters).peak_bytes
    return row


def difference(found: Any, expected: Any) -> float:
    """The largest difference between two Hessians, relative to the largest entry."""
    pairs = [
        (a, b) for found_row, row in zip(found, expected, strict=True) for a, b in zip(found_row, row, strict=True)
    ]
    largest = max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


def describe_machine() -> dict[str, Any]:
    """What the figures were measured on; a load above 1 means that other jobs were running."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Measure and write."""
    # Products this small gain nothing from a second thread, and wait whenever its core is busy.
    torch.set_num_threads(1)
    machine = describe_machine()
    rows = []
    for width in WIDTHS:
        rows.append(measure(width))
        print(json.dumps(rows[-1]))
    machine["load_after"] = os.getloadavg()[0]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
