"""A server, as an actor of Ray.

Ray starts them, and carries calls and arrays. What it carries it pickles: whoever can call an actor can run code in it,
so all of a cluster is one circle of trust, which Ray's token guards. What arrives is still checked before it is used,
because processes may be of another version, or train another model.

A message to a server gets no answer. Its sender learns of a process that has ended as soon as Ray knows.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy
import torch

from undertow.server.crashes import Fault, arm
from undertow.server.host import Host
from undertow.server.job import BF16, JobDescription
from undertow.server.messages import Item, Membership, NotPrimary
from undertow.server.parts import name_element
from undertow.server.state import State
from undertow.server.tensors import PARAMETER, PartTensors, warm_up

TICK_S = 0.025


class NotFiniteGradient(Exception):
    """A push was refused: its gradient is not finite. The message names worker and parameter."""


def is_certain(error: Exception) -> bool:
    """Whether a process has ended for certain: its own machine saw it end. A lost machine may still run."""
    text = str(error)
    return "node has died" not in text and "node died" not in text


class ServerActor:
    """One server: copies of some parts."""

    def __init__(self, name: str, job: JobDescription) -> None:
        torch.set_num_threads(1)
        self._job = job
        warm_up(job.optimizer)
        self._host = Host(name, job.rules, time.monotonic, self._send)
        self._handles: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_bytes = 0

    async def begin(self, given: list[tuple[int, Membership | None, State, dict[str, Any]]]) -> int:
        """Take copies: those of members with their values, others empty. Returns the process's number."""
        for part, membership, state, values in given:
            self._host.add(part, self._make(part, values, state.version), membership, state)
        self._start(self._tick())
        return os.getpid()

    def _make(self, part: int, values: dict[str, Any], version: int) -> PartTensors:
        # With a delay of 0 the workers have weighted their losses by their shares already.
        is_mean = self._job.rules.max_delay > 0
        return PartTensors(self._job.parts[part], self._job.optimizer, values, is_mean, version)

    async def ask(
        self, part: int, request: Any, gradient: Any, dead: tuple[str, ...] = ()
    ) -> tuple[Any, numpy.ndarray[Any, Any] | None]:
        """A worker's request. The answer comes when all members have it, or at once if this is not the primary."""
        for name in dead:
            self._host.hear_of_death(name)
        part, request = self._job.check_request(part, request, gradient)
        if part not in self._host.held:
            return NotPrimary(request.worker, None), None
        decoded = None
        if gradient is not None:
            self.num_bytes += gradient.nbytes
            decoded = self._decode(part, request, gradient)
        return await self._host.ask(part, request, decoded)

    def _decode(self, part: int, push: Any, gradient: Any) -> torch.Tensor:
        found = torch.from_numpy(gradient.copy())
        if self._job.push_dtype == BF16:
            found = found.view(torch.bfloat16).float()
        is_finite = torch.isfinite(found)
        if not bool(is_finite.all()):
            name = name_element(self._job.parts, part, int(is_finite.logical_not().nonzero()[0]))
            raise NotFiniteGradient(
                f"worker {push.worker} has pushed a gradient of {name} that is not finite, of batch {push.number}; "
                f"it was refused"
            )
        return found

    async def tell(self, items: list[Item]) -> None:
        """Messages of another server."""
        for item in items:
            self._host.receive(*item)

    async def fill(self, part: int, server: str) -> bool:
        """Begin to fill a new backup, if this is the primary."""
        return part in self._host.held and self._host.fill(part, server)

    async def take_empty(self, part: int) -> None:
        """Be ready to be filled with a part."""
        if part not in self._host.held:
            empty = {PARAMETER: numpy.zeros(self._job.parts[part].size, numpy.float32)}
            self._host.add(part, self._make(part, empty, 0), None, State())

    async def who(self, part: int, dead: tuple[str, ...] = ()) -> Membership | None:
        """Who has a part, as far as is known here. `dead` are processes that have ended for certain."""
        for name in dead:
            self._host.hear_of_death(name)
        held = self._host.held.get(part)
        return None if held is None else held.replica.membership

    async def live(self) -> None:
        """Returns when the process ends: a call of it shows when that is."""
        await asyncio.Event().wait()

    async def status(self) -> dict[int, dict[str, Any]]:
        """Each copy, as plain data."""
        return self._host.status()

    async def snapshot(self, part: int) -> dict[str, Any] | None:
        """The whole state of a part, from its primary alone."""
        held = self._host.held.get(part)
        if held is None or not held.replica.is_serving(time.monotonic()) or held.replica.entry is not None:
            return None
        return {"state": held.replica.state, "values": held.tensors.state()}

    async def parameters_at(self, part: int, version: int) -> tuple[int, numpy.ndarray[Any, Any]] | None:
        """With a delay of 0: a version with its parameters, from the primary alone; None while it is yet to come."""
        held = self._host.held.get(part)
        if held is None or not held.replica.is_serving(time.monotonic()):
            return None
        return held.tensors.parameters_at(version)

    async def log(self, part: int, since: int) -> list[Any] | None:
        """The updates of a part after a version, from its primary alone."""
        held = self._host.held.get(part)
        if held is None or not held.replica.is_serving(time.monotonic()):
            return None
        return [item for item in held.tensors.log if item[0] > since]

    async def hashes(self) -> dict[int, tuple[int, str]]:
        """The index and the hash of the tensors of each copy that counts."""
        return {
            part: (held.replica.state.index, held.tensors.sha256())
            for part, held in self._host.held.items()
            if held.replica.is_member
        }

    async def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    async def arm(self, fault: Fault) -> None:
        """For tests: end or stop at a named point."""
        arm(fault)

    async def counts(self) -> tuple[int, list[tuple[int, float, Membership]]]:
        """The bytes that were pushed here, and when which membership was known, by the clock of the machine."""
        epochs = [(part, *item) for part, held in self._host.held.items() for item in held.epochs]
        return self.num_bytes, epochs

    async def _tick(self) -> None:
        while True:
            self._host.tick()
            await asyncio.sleep(TICK_S)

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop itself would forget it
        task.add_done_callback(self._tasks.discard)

    def _send(self, to: str, items: list[Item]) -> None:
        self._start(self._deliver(to, items))

    async def _deliver(self, to: str, items: list[Item]) -> None:
        import ray

        try:
            if to not in self._handles:
                self._handles[to] = ray.get_actor(to, self._job.namespace)
            answers = await self._handles[to].tell.remote(items)
        except ray.exceptions.ActorDiedError as error:
            if to not in self._job.rules.controllers and is_certain(error):
                self._host.hear_of_death(to)
            return
        except (ray.exceptions.RayActorError, ValueError):
            return  # it is not there; whoever needs an answer asks again
        for item in answers or ():
            self._host.receive(*item)
