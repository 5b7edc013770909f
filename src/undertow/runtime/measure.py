"""Peak memory and time of a call as the allocator and the clock saw them.

On the CPU the peak is the bytes alive before the call plus the largest running sum of the profiler's memory events over
it, which includes what kernels allocate inside themselves. On CUDA it is the allocator's own maximum, and what CUDA
graphs hold besides: the allocator does not see them use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from undertow.errors import UndertowError
from undertow.ir import TensorType
from undertow.runtime.cuda_graphs import idle_graph_bytes

# Two allocations of odd sizes stand at the call's begin and end among the profiler's memory events.
BEGIN_BYTES, END_BYTES = 12_343, 12_341


@dataclass(frozen=True)
class Measurement:
    """What a call took."""

    peak_bytes: int
    step_s: float


def measure_call(
    call: Callable[[], Any], persistent: Iterable[torch.Tensor], arguments: Iterable[torch.Tensor] = ()
) -> Measurement:
    """Run `call` once under the profiler; `persistent` are the tensors alive before it (each storage counts once).

    `arguments` are alive as well, and count as a plan counts them: the part of a storage that they are, since the rest
    of a data set is not the step's.
    """
    persistent, arguments = list(persistent), list(arguments)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in persistent}
    given = {
        tensor.data_ptr(): TensorType.of(tensor).num_bytes
        for tensor in arguments
        if tensor.untyped_storage().data_ptr() not in storages
    }
    alive = sum(storages.values()) + sum(given.values())
    if any(tensor.is_cuda for tensor in (*persistent, *arguments)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        return Measurement(torch.cuda.max_memory_allocated() + idle_graph_bytes(), elapsed)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        begin = torch.empty(BEGIN_BYTES, dtype=torch.uint8)
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        end = torch.empty(END_BYTES, dtype=torch.uint8)
    del begin, end
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes = _between_marks([event.nbytes() for event in events])
    return Measurement(alive + max(accumulate(sizes)), elapsed)


def _between_marks(sizes: list[int]) -> list[int]:
    """The events of the call; raises where the profiler lost them, since what is left would give a wrong peak."""
    if BEGIN_BYTES not in sizes or END_BYTES not in sizes[sizes.index(BEGIN_BYTES) :]:
        raise UndertowError(
            "the peak could not be measured: PyTorch's profiler lost its record of the step, as it does when another "
            "one starts meanwhile (a step that is planned anew starts one, to measure its costs); measure again"
        )
    first = sizes.index(BEGIN_BYTES)
    last = len(sizes) - 1 - sizes[::-1].index(END_BYTES)
    return [0, *sizes[first + 1 : last]]
