"""A worker: computes gradients of batches and pushes them, part by part, while its backward pass runs.

In: numbers of batches, one after the other. Out: losses. The answer to a push has the part's newest parameters, so a
push is the next pull as well. They are written into the model when the next batch begins, which waits for all of them.

With a delay of 0, a worker may get another batch of the same update before the first is answered, and so another worker
none of it: who has not pushed for the update before pulls what that has made. If a worker waits for an update that
lacks a batch of a lost worker, `give_back` ends the waiting, so that it can compute that batch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Protocol

import torch

from undertow.errors import CallError
from undertow.server.courier import Courier
from undertow.server.job import BF16, JobDescription
from undertow.server.messages import Join, Leave, Membership, Push, Refused
from undertow.server.parts import paste

NICENESS = 10  # servers and heartbeats go first
LOOK_S = 0.05


class GivenUp(Exception):
    """The servers do not know this worker any longer: it was taken for lost."""


class Computing(Protocol):
    """What a worker computes with: a model and its data."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters, by name."""

    def prepare(self, take: Callable[[str, torch.Tensor], None]) -> dict[str, Any]:
        """Plan the step, whose gradients go to `take`; facts that all workers must share, and the peak."""

    def compute(self, number: int) -> tuple[float, int]:
        """Run the step on a batch; its loss, and its examples."""

    def buffers(self) -> dict[str, Any]:
        """The model's buffers, as arrays."""


class Pushing:
    """The gradients of one batch on their way: which parts lack pieces, and what was answered."""

    def __init__(self, job: JobDescription, courier: Courier, name: str) -> None:
        self._job, self._courier, self.name = job, courier, name
        self._places: dict[str, list[tuple[int, int, int, int]]] = {}
        for index, part in enumerate(job.parts):
            place = 0
            for piece in part.pieces:
                self._places.setdefault(piece.name, []).append((index, place, piece.first, piece.end))
                place += piece.size
        self.versions = [0] * len(job.parts)
        self.answers: list[tuple[int, Future[Any]]] = []
        self._errors: list[torch.Tensor | None] = [None] * len(job.parts)  # of rounding, for the next push
        self._buffers: list[torch.Tensor | None] = []
        self._lacking: list[int] = []
        self._about: tuple[int, tuple[float, ...]] = (0, ())

    def begin(self, number: int, rates: tuple[float, ...]) -> None:
        """From now on gradients are of this batch."""
        self._about = number, rates
        self._buffers = [None] * len(self._job.parts)
        self._lacking = [len(part.pieces) for part in self._job.parts]

    def take(self, name: str, gradient: torch.Tensor) -> None:
        """Copy a gradient into the parts that have pieces of it; parts that are complete leave."""
        flat = gradient.detach().reshape(-1)
        for part, place, first, end in self._places[name]:
            buffer = self._buffers[part]
            if buffer is None:
                buffer = self._buffers[part] = torch.empty(self._job.parts[part].size)
            buffer[place : place + end - first] = flat[first:end]
            self._lacking[part] -= 1
            if not self._lacking[part]:
                self._buffers[part] = None
                self._send(part, buffer)

    def _send(self, part: int, gradient: torch.Tensor) -> None:
        number, rates = self._about
        push = Push(self.name, number, tuple(self.versions), rates)
        array = gradient.numpy()
        if self._job.push_dtype == BF16:
            error = self._errors[part]
            wanted = gradient if error is None else gradient + error
            rounded = wanted.to(torch.bfloat16)
            self._errors[part] = wanted - rounded.float()
            array = rounded.view(torch.int16).numpy()
        self.answers.append((part, self._courier.start(part, push, array)))


class WorkerActor:
    """One worker, as an actor of Ray."""

    def __init__(
        self,
        name: str,
        job: JobDescription,
        make: Callable[[], Computing],
        memberships: list[Membership],
        servers: list[str],
    ) -> None:
        os.nice(NICENESS)
        self._name, self._job = name, job
        self._is_asked_back = threading.Event()
        self._make = make
        self._courier = Courier(job, memberships, servers)
        self._pushing = Pushing(job, self._courier, name)
        self._update = -1  # the last one that a batch was computed for

    def begin(self) -> dict[str, Any]:
        """Load model and data, check that the model is the servers', plan the step; facts about it."""
        self._computing = self._make()
        self._parameters = self._computing.parameters()
        shapes = {name: parameter.numel() for name, parameter in self._parameters.items()}
        wanted: dict[str, int] = {}
        for part in self._job.parts:
            for piece in part.pieces:
                wanted[piece.name] = max(wanted.get(piece.name, 0), piece.end)
        if shapes != wanted:
            different = sorted(shapes.items() ^ wanted.items())[0][0]
            raise CallError(f"{self._name} has another model than the servers: {different} is different there")
        return {**self._computing.prepare(self._pushing.take), "pid": os.getpid()}

    def join(self, name: str) -> None:
        """Become known to the servers under a new name, and take their parameters."""
        self._name = self._pushing.name = name
        self._update = -1
        requests = [(part, self._courier.start(part, Join(name))) for part in range(len(self._job.parts))]
        self._pushing.answers += requests
        self._settle(is_patient=True)

    def compute(self, number: int, rates: tuple[float, ...]) -> dict[str, Any] | None:
        """Compute one batch and push its gradients; None if it was asked to give the number back."""
        start = time.monotonic()
        if self._job.rules.max_delay == 0:
            if not self._get_ready(self._job.rules.update_of(number)):
                return None
        else:
            self._settle(is_patient=True)
        waited_s = time.monotonic() - start
        self._pushing.begin(number, rates)
        loss, num_examples = self._computing.compute(number)
        return {
            "number": number,
            "loss": loss,
            "examples": num_examples,
            "waited_s": waited_s,
            "seconds": time.monotonic() - start - waited_s,
            "num_bytes": self._courier.num_bytes,
        }

    def rest(self) -> dict[str, Any] | None:
        """Wait until all that was pushed is answered, and become unknown, so that nobody waits for this worker.

        Returns the model's buffers, or None if it was asked to stop waiting.
        """
        if not self._settle(is_patient=False):
            return None
        for future in [self._courier.start(part, Leave(self._name)) for part in range(len(self._job.parts))]:
            future.result()
        return {"buffers": self._computing.buffers()}

    def _settle(self, is_patient: bool) -> bool:
        """Write the parameters of all answers into the model; whether all are there."""
        pending = self._pushing.answers
        answers = self._wait_for([future for _, future in pending], is_patient)
        # Not before: a batch that is given back to this worker needs the parameters that the others had.
        if answers is None:
            return False
        for (part, _), (message, elements) in zip(pending, answers, strict=True):
            if isinstance(message, Refused):
                raise GivenUp(f"{self._name} is not known to part {part} any longer")
            # A repeated push is answered at once, with what there is at that time.
            if message.version >= self._pushing.versions[part]:
                self._write(part, message.version, elements)
        pending.clear()
        self._is_asked_back.clear()
        return True

    def _get_ready(self, update: int) -> bool:
        """With a delay of 0: have the parameters that a batch of this update is computed with; whether they are there.

        A batch of an update that was begun needs those that are there. One of an earlier update, which was lost with
        its worker, is applied already, since what it made has come here.
        """
        if update <= self._update:
            return True
        if not self._settle(is_patient=False):
            return False
        versions = self._pushing.versions
        # Others may have pushed all of the update before. Or a part is further: its update has this batch already.
        parts = [part for part, version in enumerate(versions) if version != update and min(versions) <= update]
        pulls = [self._courier.call_primary(part, "parameters_at", update) for part in parts]
        found = self._wait_for(pulls, is_patient=False)
        if found is None:
            for pull in pulls:
                pull.cancel()
            return False
        for part, (version, elements) in zip(parts, found, strict=True):
            self._write(part, version, elements)
        self._update = update
        return True

    def _wait_for(self, futures: Sequence[Future[Any]], is_patient: bool) -> list[Any] | None:
        """Their results; None if this worker is asked to stop waiting before all are there."""
        found: list[Any] = []
        while len(found) < len(futures):
            try:
                found.append(futures[len(found)].result(LOOK_S))
            except NotYet:
                if not is_patient and self._is_asked_back.is_set():
                    self._is_asked_back.clear()
                    return None
        return found

    def _write(self, part: int, version: int, elements: Any) -> None:
        self._pushing.versions[part] = version
        paste(self._parameters, self._job.parts[part], torch.from_numpy(elements.copy()))

    def beat(self) -> None:
        """Answers while the process runs."""

    def give_back(self) -> None:
        """Stop waiting for other workers."""
        self._is_asked_back.set()

    def learn(self, servers: list[str]) -> None:
        """The servers that there are now."""
        self._courier.servers = list(servers)
