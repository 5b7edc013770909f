"""Where a run computes, and how its batches come there.

On a GPU the next batch is read and copied while the GPU computes with this one: from pinned memory, on a stream of its
own. On the CPU a batch is used as the loader gives it.

A GPU is given the next step before the loss of this one has been read, so that it never waits for Python: the loop
waits for the step before, and reads and copies the next batch then. At most two steps and two batches are there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from undertow.errors import CallError
from undertow.train.batches import Batch

AUTO = "auto"
NUM_AHEAD = {"cpu": 0, "cuda": 1}  # steps that are started before an earlier loss is read


def choose_device(name: str) -> torch.device:
    """The device called `name`: cpu, cuda, cuda:1, or auto, a GPU where there is one. Raises CallError otherwise."""
    if name == AUTO:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise CallError(f"--device {name}: a device is cpu, cuda, cuda:0, cuda:1 and so on, or auto")
    if kind == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= num_gpus:
        there = f"{num_gpus} GPUs" if num_gpus else "no GPU that this PyTorch can use"
        raise CallError(f"--device {name}: this machine has {there}; leave --device out, or give --device cpu")
    return torch.device("cuda", int(index) if index else torch.cuda.current_device())


def see_one_gpu(local_rank: int) -> None:
    """For one of several ranks on a machine: from now on this process sees one of the GPUs alone, as cuda:0.

    They are given out in turn, so ranks share GPUs where there are more ranks. It has to come before anything else asks
    for a GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[local_rank % len(visible)]


def move_model(model: torch.nn.Module, device: torch.device) -> None:
    """Move all of the model; raises CallError if its factory has put it on several devices."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(found) > 1:
        raise CallError(
            f"the model lies on {' and '.join(sorted(map(str, found)))}: its factory must leave it on one device, "
            f"and --device says on which it is trained"
        )
    try:
        model.to(device)
    except torch.OutOfMemoryError:
        raise out_of_memory(device, "the model's parameters do not fit") from None


def out_of_memory(device: torch.device, what: str) -> CallError:
    """The error for a GPU without enough free memory."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return CallError(
        f"{what} into the memory of {torch.cuda.get_device_name(device)} ({device}): {free_bytes:,} of "
        f"{total_bytes:,} bytes are free, and other programs may hold the rest; give --budget, a smaller --batch, or "
        f"another --device"
    )


class Batches:
    """Batches on a device, in the order of `source`. `fetch` reads and moves the next one before it is asked for."""

    def __init__(self, source: Iterator[Any], read: Callable[[Any], Batch], device: torch.device) -> None:
        self._source, self._read, self._device = source, read, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: tuple[Batch, torch.cuda.Event] | None = None

    def fetch(self) -> None:
        """Start the copy of the next batch; nothing on the CPU, where it would only come earlier."""
        if self._stream is not None and self._next is None:
            raw = next(self._source, None)
            if raw is not None:
                self._next = self._copy(self._read(raw))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._stream is None:
            return self._read(next(self._source))
        self.fetch()
        if self._next is None:
            raise StopIteration
        (batch, copied), self._next = self._next, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for tensor in batch.tensors():
            tensor.record_stream(current)  # its memory was taken on the other stream
        return batch

    def _copy(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            moved = batch.map_tensors(self._copy_tensor)
            return moved, self._stream.record_event()

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor if tensor.is_cuda else tensor.pin_memory()
        return source.to(self._device, non_blocking=True)


class Stopwatch:
    """Times what runs inside `with`, without waiting for it: on a GPU by events."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"

    def __enter__(self) -> Stopwatch:
        self._start = self._now()
        return self

    def __exit__(self, *unused: object) -> None:
        self._end = self._now()

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def seconds(self) -> float:
        """What it took; on a GPU only after that has ended."""
        return float(self._start.elapsed_time(self._end)) / 1e3 if self._is_cuda else float(self._end - self._start)


class Arriving:
    """Numbers on their way from the device: copied as soon as the device has them, and waited for when they are read.

    What runs on the device later may write over the tensors that they come from.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [
            torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False) for tensor in tensors
        ]
        for copy, tensor in zip(self._tensors, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if on_gpu := [tensor.device for tensor in tensors if tensor.is_cuda]:
            self._copied = torch.cuda.current_stream(on_gpu[0]).record_event()

    def read(self) -> list[float]:
        """The numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        return [float(tensor) for tensor in self._tensors]


def device_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the generators that a model on this device may draw from."""
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def set_device_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Set the generators to states that `device_states` gave; raises KeyError where one is missing."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
