#!/usr/bin/env python3
"""Gradients per example: time and peak memory beside torch.func and a loop over the examples.

In: nothing. Out: benchmarks/results/per_example.json, which docs/how-the-backward-pass-is-derived.md shows.

Calls are interleaved, and each round gives one ratio of times; medians and quartiles of the ratios are reported. Peak
memory is the profiler's, of one further call each. Undertow records the function at the first call, which is not timed:
`recording_s` says how long that takes, measured on a batch of one. GPUs are not measured.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch.func import functional_call

import undertow as ut
from undertow.models import ZOO
from undertow.runtime.measure import measure_call

RESULTS = Path(__file__).resolve().parent / "results" / "per_example.json"
CASES = (("lenet300", 256), ("lenet5", 256), ("vgg_small", 8), ("char_gpt", 16))
NUM_ROUNDS = 7


def make_calls(name: str, batch: int) -> tuple[dict[str, Callable[[], Any]], dict[str, torch.Tensor]]:
    """The calls to compare, and the parameters."""
    torch.manual_seed(0)
    entry = ZOO[name]
    model = entry.build().eval()
    parameters = {path: item.detach() for path, item in model.named_parameters()}
    (x,), (target,) = entry.example_inputs(batch), entry.example_targets(batch)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return entry.loss(functional_call(model, parameters, (x[None],)), target[None])

    def loop() -> dict[str, torch.Tensor]:
        found = []
        for index in range(batch):
            leaves = {path: item.clone().requires_grad_() for path, item in parameters.items()}
            found.append(torch.autograd.grad(loss(leaves, x[index], target[index]), tuple(leaves.values())))
        return dict(zip(parameters, map(torch.stack, zip(*found, strict=True)), strict=True))

    ours = ut.grad(loss, per_example=True)
    theirs = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
    return {
        "undertow": lambda: ours(parameters, x, target),
        "torch_func": lambda: theirs(parameters, x, target),
        "loop": loop,
        "recording": lambda: ut.grad(loss, per_example=True)(parameters, x[:1], target[:1]),
    }, parameters


def measure(name: str, batch: int) -> dict[str, Any]:
    """One row."""
    calls, parameters = make_calls(name, batch)
    ours, theirs = calls["undertow"](), calls["torch_func"]()
    times: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(NUM_ROUNDS):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - start)
    row: dict[str, Any] = {
        "model": name,
        "batch": batch,
        "gradient_bytes": batch * sum(item.nbytes for item in parameters.values()),
        "same_bits": all(torch.equal(ours[path], theirs[path]) for path in parameters),
        "recording_s": statistics.median(times["recording"]),
    }
    del ours, theirs
    for key in ("undertow", "torch_func", "loop"):
        row[f"{key}_s"] = statistics.median(times[key])
        row[f"{key}_peak_bytes"] = measure_call(calls[key], list(parameters.values())).peak_bytes
    for key in ("torch_func", "loop"):
        ratios = [other / own for other, own in zip(times[key], times["undertow"], strict=True)]
        row[f"{key}_over_undertow"] = statistics.quantiles(ratios, n=4)
    return row


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    rows = []
    for name, batch in CASES:
        rows.append(measure(name, batch))
        print(json.dumps(rows[-1]))
    RESULTS.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
