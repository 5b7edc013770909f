"""Peak memory and time of a call as the allocator and the clock saw them.

On the CPU the peak is the bytes alive before the call plus the largest running sum of the profiler's memory events over
it, which includes what kernels allocate inside themselves. On CUDA it is the allocator's own maximum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Measurement:
    """What a call took."""

    peak_bytes: int
    step_s: float


def measure_call(call: Callable[[], Any], persistent: Iterable[torch.Tensor]) -> Measurement:
    """Run `call` once under the profiler; `persistent` are the tensors alive before it (each storage counts once)."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in persistent}
    alive = sum(storages.values())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return Measurement(torch.cuda.max_memory_allocated(), time.perf_counter() - start)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    peak = current = alive
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return Measurement(peak, elapsed)
