"""Steps and evaluations beside PyTorch in every way a user could run it, interleaved in one run.

Every contestant is a process of its own, because allocators and their settings belong to a process; they take turns,
step by step, and wait without computing in between. A ratio is taken round by round; median and quartiles are
reported. Usage: scripts/bench speed [--workloads vgg16 ...] [--rounds N] [--out F]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")

# Name: how the model runs, and the environment of its process.
CONTESTANTS: dict[str, tuple[str, dict[str, str]]] = {
    "eager": ("eager", {}),
    "eager, malloc": ("eager", MALLOC),
    "eager, malloc, channels_last": ("eager channels_last", MALLOC),
    "eager, huge pages": ("eager", MALLOC | {"THP_MEM_ALLOC_ENABLE": "1"}),
    "eager, jemalloc": ("eager", {"LD_PRELOAD": str(LIBRARIES / "libjemalloc.so.2")}),
    "eager, tcmalloc": ("eager", {"LD_PRELOAD": str(LIBRARIES / "libtcmalloc_minimal.so.4")}),
    "compile, malloc": ("compile", MALLOC),
    "compile, malloc, channels_last": ("compile channels_last", MALLOC),
    "exact": ("undertow exact", {}),
    "fast": ("undertow fast", {}),
}
OWN = ("exact", "fast")
BATCH = {"vgg16": 8, "resnet50": 8, "unet": 4, "gpt": 4, "mlp": 256}


def prepare(workload: str, way: str, mode: str) -> Callable[[], Any]:
    """One step, or one evaluation, of a workload run in one way."""
    import torch
    from torch import nn

    import undertow as ut
    from undertow.models import ZOO

    torch.manual_seed(0)
    entry = ZOO[workload]
    batch = BATCH[workload] if mode == "step" else int(mode.removeprefix("evaluation "))
    if workload == "mlp":
        model: Any = nn.Sequential(
            nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
        )
    else:
        model = entry.build()
    args, targets = entry.example_inputs(batch), entry.example_targets(batch)
    if "channels_last" in way:
        model = model.to(memory_format=torch.channels_last)
        args = tuple(item.contiguous(memory_format=torch.channels_last) if item.dim() == 4 else item for item in args)
    is_own = way.startswith("undertow")
    numerics = way.removeprefix("undertow ")
    if mode != "step":
        model.eval()
        run = ut.plan(model, args, numerics=numerics) if is_own else model
        run = torch.compile(run) if way.startswith("compile") else run

        def evaluate() -> None:
            with torch.no_grad():
                run(*args)

        return evaluate
    optimizer = torch.optim.Adam(model.parameters()) if workload == "mlp" else None
    if is_own:
        step = ut.train_step(model, args, targets=targets, loss=entry.loss, optimizer=optimizer, numerics=numerics)

        def own_step() -> None:
            if optimizer is None:
                model.zero_grad(set_to_none=True)
            step(*args, *targets)

        return own_step
    if workload == "mlp" and "channels_last" in way:  # no images: the other tuning that a user has
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
    run = torch.compile(model) if way.startswith("compile") else model

    def peer_step() -> None:
        model.zero_grad(set_to_none=True)
        entry.loss(run(*args), *targets).backward()
        if optimizer is not None:
            optimizer.step()

    return peer_step


def serve(workload: str, name: str, mode: str) -> None:
    """Run once whenever a line arrives, and answer with the seconds and the page faults it took."""
    run = prepare(workload, CONTESTANTS[name][0], mode)
    for _ in range(2):
        run()
    print("ready", flush=True)
    for _ in sys.stdin:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults]), flush=True)


class Contestant:
    """A process that runs when told to."""

    def __init__(self, workload: str, name: str, mode: str) -> None:
        environment = os.environ | CONTESTANTS[name][1] | {"KINETO_LOG_LEVEL": "99"}
        command = [sys.executable, __file__, "--serve", workload, name, mode]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self) -> tuple[float, int]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        seconds, faults = json.loads(self.answer())
        return seconds, faults

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(workload: str, mode: str, names: list[str], num_rounds: int) -> dict[str, Any]:
    """Seconds of every contestant in every round, and the ratios to ours."""
    contestants: dict[str, Contestant] = {}
    for name in names:
        preload = CONTESTANTS[name][1].get("LD_PRELOAD")
        if preload is not None and not Path(preload).exists():
            continue
        contestant = Contestant(workload, name, mode)
        if contestant.answer() == "ready":
            contestants[name] = contestant
        else:
            print(f"{workload}, {mode}: {name} did not start", flush=True)
            contestant.end()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    faults: dict[str, int] = {}
    for number in range(num_rounds):
        order = list(contestants) if number % 2 else list(contestants)[::-1]
        for name in order:
            elapsed, faults[name] = contestants[name].run()
            seconds[name].append(elapsed)
    for contestant in contestants.values():
        contestant.end()
    peers = [name for name in seconds if name not in OWN]
    best = min(peers, key=lambda name: statistics.median(seconds[name]))
    result: dict[str, Any] = {
        "median_s": {name: round(statistics.median(times), 4) for name, times in seconds.items()},
        "page_faults": faults,
        "best_peer": best,
    }
    for own in OWN:
        for peer in dict.fromkeys(("eager", "eager, malloc", best)):
            if own in seconds and peer in seconds:
                ratios = [theirs / ours for theirs, ours in zip(seconds[peer], seconds[own], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                result[f"{peer} / {own}"] = [round(item, 3) for item in (middle, low, high)]
    return result


def main() -> None:
    """Compare all workloads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", nargs=3)
    parser.add_argument("--workloads", nargs="+", default=list(BATCH))
    parser.add_argument("--modes", nargs="+", default=["step", "evaluation 1", "evaluation 8"])
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="benchmarks/results/speed.json")
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    from machine import describe_machine

    out = Path(options.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    for workload in options.workloads:
        for mode in options.modes:
            found = compare(workload, mode, options.contestants, options.rounds)
            results[f"{workload}, {mode}"] = found | {"machine": describe_machine()}
            print(f"{workload}, {mode}", json.dumps(found), flush=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
