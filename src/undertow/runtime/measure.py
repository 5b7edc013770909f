"""Peak memory and time of a call, as the allocator and the clock see them.

The peak is the bytes alive before the call plus the most that the call took in addition, workspace included. On CUDA
the memory of graphs is added, since the allocator does not see them use it. If a step is planned again during the call,
the memory for planning is not counted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from undertow.costs.usage import watch_memory
from undertow.ir import TensorType
from undertow.runtime.cuda_graphs import idle_graph_bytes


@dataclass(frozen=True)
class Measurement:
    """What a call took."""

    peak_bytes: int
    step_s: float


def measure_call(
    call: Callable[[], Any], persistent: Iterable[torch.Tensor], arguments: Iterable[torch.Tensor] = ()
) -> Measurement:
    """Run `call` once; `persistent` are the tensors alive before it (each storage counts once).

    `arguments` are alive as well, read or not. As in a plan, only their own part of a storage is counted: the rest of
    a data set does not belong to the step.
    """
    persistent, arguments = list(persistent), list(arguments)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in persistent}
    given = {
        id(tensor): TensorType.of(tensor).num_bytes
        for tensor in arguments
        if tensor.untyped_storage().data_ptr() not in storages
    }
    is_cuda = any(tensor.is_cuda for tensor in (*persistent, *arguments))
    alive = torch.cuda.memory_allocated() if is_cuda else sum(storages.values()) + sum(given.values())
    gc.collect()  # garbage of before, collected during the call, would count as memory that the call gave back
    with watch_memory(is_cuda) as usage:
        start = time.perf_counter()
        call()
        if is_cuda:
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
    return Measurement(alive + usage.peak_bytes + (idle_graph_bytes() if is_cuda else 0), elapsed)
