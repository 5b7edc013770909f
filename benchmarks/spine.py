"""A planned step beside eager's: time, peak memory, and the time to capture and build it.

Steps of both are interleaved in one run, in alternating order, so that the machine's other load falls on both. The
ratio is taken round by round; its median and quartiles are reported. Usage: scripts/bench spine [--rounds N] [--out F]
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
import transformers
from machine import describe_machine

import undertow as ut
from undertow.models import ZOO
from undertow.runtime.measure import measure_call


def vgg16() -> tuple[Any, tuple[Any, ...], dict[str, Any], Callable[[Any], Any]]:
    """VGG-16, batch 8, 224 x 224."""
    zoo = ZOO["vgg16"]
    (targets,) = zoo.example_targets(8)
    return zoo.build(), zoo.example_inputs(8), {}, lambda out: zoo.loss(out, targets)


def gpt2() -> tuple[Any, tuple[Any, ...], dict[str, Any], Callable[[Any], Any]]:
    """GPT-2 small of `transformers`, 4 sequences of 256 tokens, dropout on."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).train()
    tokens = torch.randint(50257, (4, 256))
    return model, (), {"input_ids": tokens, "labels": tokens}, lambda out: out.loss


WORKLOADS = {"vgg16 batch 8": vgg16, "gpt2 4 x 256": gpt2}


def measure(name: str, num_rounds: int) -> dict[str, Any]:
    """Measure one workload."""
    torch.manual_seed(0)
    model, args, kwargs, loss_of = WORKLOADS[name]()
    start = time.perf_counter()
    planned = ut.plan(model, args, kwargs)
    plan_s = time.perf_counter() - start

    def step(module: Any) -> None:
        loss_of(module(*args, **kwargs)).backward()
        model.zero_grad(set_to_none=True)

    persistent = [*model.parameters(), *model.buffers(), *args, *kwargs.values()]
    peaks = {}
    for label, module in (("eager", model), ("planned", planned)):
        step(module)
        gc.collect()
        peaks[label] = measure_call(lambda module=module: step(module), persistent).peak_bytes
    times: dict[str, list[float]] = {"eager": [], "planned": []}
    for index in range(num_rounds):
        pair = [("eager", model), ("planned", planned)]
        for label, module in pair if index % 2 else reversed(pair):
            start = time.perf_counter()
            step(module)
            times[label].append(time.perf_counter() - start)
    ratios = sorted(p / e for p, e in zip(times["planned"], times["eager"], strict=True))
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "workload": name,
        "capture_and_build_s": round(plan_s, 2),
        "num_operations": len(planned.plan.nodes),
        "eager_median_s": round(statistics.median(times["eager"]), 4),
        "planned_median_s": round(statistics.median(times["planned"]), 4),
        "planned_over_eager": round(quartiles[1], 4),
        "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "eager_peak_mib": round(peaks["eager"] / 2**20, 1),
        "planned_peak_mib": round(peaks["planned"] / 2**20, 1),
        "predicted_peak_mib": round(planned.plan.peak_bytes / 2**20, 1),
        "rounds": num_rounds,
    }


def main() -> None:
    """Run the workloads and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=WORKLOADS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "spine.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine(), "results": []}
    for name in [options.only] if options.only else WORKLOADS:
        result["results"].append(measure(name, options.rounds))
        print(json.dumps(result["results"][-1], indent=2), flush=True)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
