"""Contenders that are timed in turns, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def take_turns(contenders: dict[str, Callable[[], Any]], num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each in each round, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(num_rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(1e3 * (time.perf_counter() - start))
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
