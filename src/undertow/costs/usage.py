"""How much memory some code takes at once, as the allocator sees it.

On the CPU PyTorch tells its profilers of every allocation, also of those inside kernels. The one used here is the
oldest, `torch.autograd.profiler_legacy`: it starts in microseconds and prints nothing, while `torch.profiler`
writes two lines to stderr whenever it runs. On CUDA the allocator keeps its maximum itself.

Watches nest: the outer one counts the memory that the inner one leaves allocated, and not its peak.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from undertow.errors import CallError, UndertowError
from undertow.torch_internals import c_autograd, c_profiler, current_graph_task_id


@dataclass
class Usage:
    """Bytes beyond those at the start: what is held, and the most that was held at once."""

    held_bytes: int = 0
    peak_bytes: int = 0

    def add(self, sizes: Iterable[int]) -> None:
        """Count bytes in the order in which they were taken; what was given back is negative."""
        for size in sizes:
            self.held_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class _Watch(ABC):
    def __init__(self) -> None:
        self.usage = Usage()

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...


@final
class _CpuWatch(_Watch):
    def start(self) -> None:
        if c_autograd._profiler_enabled():
            raise CallError(
                "memory is measured with PyTorch's profiler, which is already running and cannot run twice: plan and "
                'measure before profiling, or plan with costs="model"'
            )
        self._backward_pass = current_graph_task_id()
        kind, others = c_profiler.ProfilerState.CPU, c_profiler._ExperimentalConfig()
        c_autograd._enable_profiler_legacy(c_profiler.ProfilerConfig(kind, False, True, False, False, False, others))

    def stop(self) -> None:
        if current_graph_task_id() != self._backward_pass:  # which puts the profiler back when it ends
            raise UndertowError(
                "the peak could not be measured: a planned module was planned again inside the backward pass, since "
                "gradients came from other outputs than expected; measure that module alone"
            )
        # A list per thread: autograd may run a part of a backward pass in another one.
        events: list[Any] = [event for events in c_autograd._disable_profiler_legacy() for event in events]
        events.sort(key=lambda event: event.start_us())
        self.usage.add(event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc")


@final
class _CudaWatch(_Watch):
    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before_bytes = torch.cuda.memory_allocated()

    def stop(self) -> None:
        torch.cuda.synchronize()
        held_bytes, peak_bytes = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        self.usage.add([peak_bytes - self._before_bytes, held_bytes - peak_bytes])


class _Running(threading.local):
    watch: _Watch | None = None


_RUNNING = _Running()


@contextmanager
def watch_memory(is_cuda: bool = False) -> Iterator[Usage]:
    """Count what this thread takes inside; the numbers are complete when the block ends."""
    outer = _RUNNING.watch
    if outer is not None:
        outer.stop()
    watch: _Watch = _CudaWatch() if is_cuda else _CpuWatch()
    watch.start()
    _RUNNING.watch = watch
    try:
        yield watch.usage
    finally:
        watch.stop()
        _RUNNING.watch = outer
        if outer is not None:
            outer.usage.add([watch.usage.held_bytes])
            outer.start()


@contextmanager
def unwatched() -> Iterator[None]:
    """Exclude the peak of what runs inside from a watch that is running: planning is not part of a step."""
    if _RUNNING.watch is None:
        yield
        return
    with watch_memory(isinstance(_RUNNING.watch, _CudaWatch)):
        yield
