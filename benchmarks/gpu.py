"""A fast step on a GPU beside eager, checkpointing and `torch.compile`, in bfloat16: milliseconds and peak MiB.

A step is forward pass, loss and backward pass under autocast. Undertow runs without a budget, and within the peak of
every peer. Rounds are interleaved. The peak is what PyTorch's allocator saw, plus all memory of a CUDA graph. Dropout
is off: PyTorch's compiled steps draw other numbers than eager.

Usage: scripts/bench gpu gpt2_small|gpt2_large|resnet50 [--rounds N] [--skip PEER,PEER] [--mib N ...] [--out F]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from budgets import own_backend
from machine import describe_machine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import undertow as ut
from undertow.models import ZOO, token_loss
from undertow.models.gpt import gpt
from undertow.runtime.cuda_graphs import idle_graph_bytes


def _gpt(num_layers: int, width: int, batch: int) -> Any:
    model = gpt(num_layers=num_layers, width=width, dropout=0.0)
    tokens = torch.randint(50257, (2, batch, 1024), device="cuda")
    return model.cuda(), (tokens[0],), (tokens[1],), token_loss, "Block"


def _resnet50() -> Any:
    model = ZOO["resnet50"].build().cuda().to(memory_format=torch.channels_last)
    images = torch.randn(256, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    return model, (images,), (torch.randint(1000, (256,), device="cuda"),), cross_entropy, "Bottleneck"


NUM_WARM = 4  # the third call of a planned step captures it

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2_small": partial(_gpt, 12, 768, 16),
    "gpt2_large": partial(_gpt, 36, 1280, 8),
    "resnet50": _resnet50,
}


@dataclass
class Contender:
    """One way to run the step, and what was measured of it."""

    name: str
    run: Callable[[], Any]
    peak_mib: float = 0.0
    note: str = ""
    steps: Sequence[Any] = ()  # Undertow's
    times_ms: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        times = sorted(self.times_ms)
        return {
            "name": self.name,
            "median_ms": round(statistics.median(times), 2),
            "quartiles_ms": [round(times[len(times) // 4], 2), round(times[3 * len(times) // 4], 2)],
            "peak_mib": round(self.peak_mib),
            "note": self.note,
        }


def _autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


def _peak_mib(run: Callable[[], Any], model: nn.Module) -> float:
    for _ in range(NUM_WARM):
        model.zero_grad(set_to_none=True)
        run()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() + idle_graph_bytes()) / 2**20


def compare(name: str, num_rounds: int, skipped: set[str], further_mib: Sequence[int]) -> list[dict[str, Any]]:
    """All contenders of one model; they share its parameters."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, args, targets, loss, block = MODELS[name]()

    def share() -> nn.Module:
        return copy.deepcopy(model, {id(item): item for item in model.parameters()})

    def plain(module: nn.Module) -> Callable[[], Any]:
        def run() -> None:
            with _autocast():
                value = loss(module(*args), *targets)
            value.backward()

        return run

    def checkpointed() -> Callable[[], Any]:
        module = share()
        for item in module.modules():
            if type(item).__name__ == block:
                item.forward = partial(checkpoint, item.forward, use_reentrant=False)
        return plain(module)

    def compiled(ratio: float) -> Callable[[], Any]:
        with torch._functorch.config.patch(activation_memory_budget=ratio):
            run = plain(torch.compile(share(), backend=own_backend("inductor"), dynamic=False))
            run()
        return run

    found: list[Contender] = []

    def add(label: str, make: Callable[[], Callable[[], Any]], steps: Sequence[Any] = ()) -> None:
        if label in skipped:
            return
        torch._C._cuda_clearCublasWorkspaces()  # left by the last contender's threads and streams
        contender = Contender(label, make(), steps=steps)
        contender.peak_mib = _peak_mib(contender.run, model)
        for step in steps:
            contender.note = f"predicted {step.plan.peak_bytes / 2**20:.0f} MiB; {step.plan.notes[-1]}"
        measure(contender)
        release(contender)
        found.append(contender)
        print(json.dumps(contender.to_dict()), flush=True)

    def release(contender: Contender) -> None:
        for step in contender.steps:
            step.release()  # the next contender needs the memory

    def measure(contender: Contender) -> None:
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            start = time.perf_counter()
            contender.run()
            torch.cuda.synchronize()
            contender.times_ms.append(1e3 * (time.perf_counter() - start))
        model.zero_grad(set_to_none=True)

    add("eager", lambda: plain(model))
    add("checkpoint every block", checkpointed)
    add("compile", partial(compiled, 1.0))
    add("compile budget 0.5", partial(compiled, 0.5))
    budgets: list[int | None] = [None, *(int(item.peak_mib * 2**20) for item in found)]
    budgets += [mib * 2**20 for mib in further_mib]
    for budget in budgets:
        steps: list[Any] = []

        def planned(budget: int | None = budget, steps: list[Any] = steps) -> Callable[[], Any]:
            with _autocast():
                step = ut.train_step(model, args, targets=targets, loss=loss, budget=budget, numerics="fast")
            steps.append(step)

            def run() -> None:
                with _autocast():
                    step(*args, *targets)

            return run

        label = "undertow" if budget is None else f"undertow {budget / 2**20:.0f} MiB"
        try:
            add(label, planned, steps)
        except ut.InfeasibleBudget as refusal:
            print(f"{label}: refused, least {refusal.minimum_bytes / 2**20:.0f} MiB", flush=True)
    for contender in found:
        for _ in range(NUM_WARM):
            measure(contender)
        contender.times_ms.clear()
    for _ in range(num_rounds):
        for contender in found:
            measure(contender)
    return [item.to_dict() for item in found]


def main() -> None:
    """Compare one model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--skip", default="")
    parser.add_argument("--mib", type=int, nargs="*", default=[], help="further budgets, in MiB")
    parser.add_argument("--out", default="benchmarks/results/gpu.json")
    options = parser.parse_args()
    out = Path(options.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    rows = compare(options.model, options.rounds, set(options.skip.split(",")), options.mib)
    results[options.model] = {"machine": describe_machine() | {"gpu": torch.cuda.get_device_name()}, "rows": rows}
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
