"""Contenders that are timed in turns, so that whatever else the machine does meets all of them.

On one thread the processor's time is taken: time in which other processes had the core does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def take_turns(contenders: dict[str, Callable[[], Any]], num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each in each round, after one round that does not count."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(num_rounds + 1):
        for name, run in contenders.items():
            start = clock()
            run()
            if number:
                times[name].append(1e3 * (clock() - start))
    return times


def compare(times: dict[str, list[float]], base: str) -> dict[str, dict[str, Any]]:
    """Median milliseconds of each, and how many times as fast as `base` in the same round: median and quartiles."""
    found = {}
    for name, values in times.items():
        ratios = [first / second for first, second in zip(times[base], values, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] = {
            "ms": round(statistics.median(values), 4),
            "ratio": round(middle, 2),
            "quartiles": [round(low, 2), round(high, 2)],
        }
    return found


def show(title: str, found: dict[str, dict[str, Any]]) -> None:
    """A line per contender."""
    print(title)
    for name, one in found.items():
        low, high = one["quartiles"]
        print(f"  {name:28} {one['ms']:10.3f} ms  {one['ratio']:7.2f} times  ({low:.2f} to {high:.2f})", flush=True)
