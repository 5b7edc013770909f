"""Exact steps beside eager's over the whole zoo and nine `transformers` families: eager's time over Undertow's.

Both run in one process, so the memory that Undertow keeps mapped is mapped for eager too. The ratio is therefore to an
eager whose allocator is tuned; to eager by default it would be higher. Rounds are interleaved, in alternating order.
The ratio is taken round by round. With `--only`, the other cases stay as they are in the file.

Usage: scripts/bench never_slower [--module] [--rounds N] [--only NAME,NAME] [--out F]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

import undertow as ut
from undertow.models import SMALL, ZOO

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from families import FAMILIES

# Steps of 0.02 to 2 s.
BATCH = {
    "mlp": 256, "lenet300": 256, "lenet5": 256, "alexnet": 16, "vgg_small": 64, "vgg16": 2, "resnet50": 2, "unet": 1,
    "gpt": 1, "char_gpt": 32, "lstm": 8,
}  # fmt: skip

# BART drops layers at random: both sides must drop the same ones, and Undertow must have captured each combination
# before the time is taken.
NUM_SEEDS = 5
TURN_S = 0.1


def zoo_steps(name: str, size: str, is_module: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Eager's step and ours, of the same model: a `train_step`, or a planned module and `backward()`."""
    zoo = (ZOO if size == "full" else SMALL)[name]
    batch = BATCH[name] if size == "full" else 4
    model, args, targets = zoo.build(), zoo.example_inputs(batch), zoo.example_targets(batch)

    def eager() -> None:
        zoo.loss(model(*args), *targets).backward()

    if is_module:
        planned = ut.plan(model, args)
        return _without_gradients(model, eager, lambda: zoo.loss(planned(*args), *targets).backward())
    step = ut.train_step(model, args, targets=targets, loss=zoo.loss)
    return _without_gradients(model, eager, lambda: step(*args, *targets))


def family_steps(name: str, is_module: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same for a `transformers` family."""
    build, kwargs = FAMILIES[name]
    model = build().train()
    if is_module:
        planned = ut.plan(model, (), kwargs)
        calls = (lambda: model(**kwargs).loss.backward(), lambda: planned(**kwargs).loss.backward())
        return _without_gradients(model, *calls)
    step = ut.train_step(model, (), kwargs)
    return _without_gradients(model, lambda: model(**kwargs).loss.backward(), lambda: step(**kwargs))


def _without_gradients(model: Any, *calls: Callable[[], Any]) -> Any:
    def wrap(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            call()

        return run

    return tuple(map(wrap, calls))


def take_turn(call: Callable[[], Any]) -> float:
    """The median time of a call; short ones are repeated."""
    times: list[float] = []
    while sum(times) < TURN_S:
        torch.manual_seed(len(times) % NUM_SEEDS)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def compare(eager: Callable[[], Any], ours: Callable[[], Any], num_rounds: int) -> dict[str, float]:
    """Medians and the quartiles of the ratio."""
    for seed in (*range(NUM_SEEDS), 0):
        torch.manual_seed(seed)
        ours()
    take_turn(eager)
    rounds = []
    for number in range(num_rounds):
        seconds = {call: take_turn(call) for call in ((eager, ours) if number % 2 else (ours, eager))}
        rounds.append((seconds[eager], seconds[ours]))
    low, middle, high = statistics.quantiles([theirs / own for theirs, own in rounds], n=4)
    eager_s = statistics.median(theirs for theirs, _ in rounds)
    return {"ratio": middle, "low": low, "high": high, "eager_s": eager_s, "rounds": num_rounds}


def main() -> None:
    """Compare all cases, then print the least ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--module", action="store_true", help="a planned module and backward(), instead of train_step")
    parser.add_argument("--out", default="benchmarks/results/never_slower.json")
    options = parser.parse_args()
    cases: dict[str, Callable[[], Any]] = {name: partial(zoo_steps, name, "full", options.module) for name in BATCH}
    cases |= {f"small {name}": partial(zoo_steps, name, "small", options.module) for name in SMALL}
    cases |= {f"transformers {name}": partial(family_steps, name, options.module) for name in FAMILIES}
    out = Path(options.out)
    rows = json.loads(out.read_text())["cases"] if options.only and out.exists() else {}
    for name in options.only.split(",") if options.only else cases:
        torch.manual_seed(0)
        rows[name] = compare(*cases[name](), options.rounds)
        gc.collect()
        print(f"{name:24} {rows[name]['ratio']:.3f} ({rows[name]['low']:.3f} to {rows[name]['high']:.3f})", flush=True)
    print("least:", min(row["ratio"] for row in rows.values()))
    out.write_text(json.dumps({"machine": describe_machine(), "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
