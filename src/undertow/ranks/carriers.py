"""How tensors come from one rank to others: from a CPU's memory as they are, from a GPU's by one of two ways.

In: a transfer as `reduction.py` writes it, for flat tensors of one device, and which of them it reads and writes. Out:
the steps of the transfer as the lane runs them. What is sent, in which order it is added up, and so every bit, is the
transfer's alone.

- `HostCarrier`: tensors of a CPU, by gloo.
- `StagedCarrier`: tensors of a GPU, by gloo. They are copied to pinned memory, the transfer runs there, and what it
  wrote is copied back, on streams of their own, so that computing goes on. A sum of two numbers has the same bits on
  both, and nothing of the transfer takes memory of the GPU.
- `NcclCarrier` (`nccl.py`): from GPU to GPU, where every rank has one of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from undertow.ranks.lane import Steps
from undertow.ranks.messages import Messages

# Makes a transfer by messages; the function gives the tensor that stands for one of those that were named.
MakeSteps = Callable[[Messages, Callable[[torch.Tensor], torch.Tensor]], Steps]


class Carrier(ABC):
    """Carries the tensors of one device."""

    @abstractmethod
    def carry(self, make: MakeSteps, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Steps:
        """The transfer that `make` makes. `reads` and `writes` are all tensors that it is given."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is on its way."""


class HostCarrier(Carrier):
    """Tensors of a CPU are sent and received where they lie."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def carry(self, make: MakeSteps, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Steps:
        return make(self._messages, lambda tensor: tensor)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Queued:
    """Work of a GPU that was queued; `event` comes after it."""

    event: Any  # a torch.cuda.Event

    def wait(self) -> None:
        """Wait until the GPU has done it."""
        self.event.synchronize()


def record_end(stream: torch.cuda.Stream) -> Queued:
    """What is queued on a stream so far. Who waits for it sleeps."""
    return Queued(stream.record_event(torch.cuda.Event(blocking=True)))


class StagedCarrier(Carrier):
    """Tensors of a GPU travel through pinned memory of the CPU."""

    def __init__(self, messages: Messages, device: torch.device) -> None:
        self._messages, self._device = messages, device
        # Two, because what goes out waits for computing, and what comes in must not wait for that.
        self._out, self._into = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def carry(self, make: MakeSteps, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Steps:
        hosts = {id(tensor): torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in (*reads, *writes)}
        yield [self._copy_out(reads, hosts)]
        yield from make(self._messages, lambda tensor: hosts[id(tensor)])
        yield [self._copy_in(writes, hosts)]

    def close(self) -> None:
        pass

    def _copy_out(self, tensors: Sequence[torch.Tensor], hosts: dict[int, torch.Tensor]) -> Queued:
        """Copy what the GPU will have written by then. All that it reads of the tensors until now is over then, too."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for tensor in tensors:
                hosts[id(tensor)].copy_(tensor, non_blocking=True)
        return record_end(self._out)

    def _copy_in(self, tensors: Sequence[torch.Tensor], hosts: dict[int, torch.Tensor]) -> Queued:
        with torch.cuda.stream(self._into):
            for tensor in tensors:
                tensor.copy_(hosts[id(tensor)], non_blocking=True)
        return record_end(self._into)
