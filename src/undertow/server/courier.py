"""Requests of a worker, or of the one who supervises, to whoever is the primary of a part; asked again until answered.

In: a request and its gradient. Out: the answer with the parameters. A request is the same however often it is sent, so
it is sent again whenever a server has ended, or somebody else has become the primary. The calls run in a thread of
their own, beside the computing.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

from undertow.server.actors import is_certain
from undertow.server.job import JobDescription
from undertow.server.messages import Membership, NotPrimary, Push, Request

LOOK_S = 0.3  # after which it is asked whether the primary has changed
PAUSE_S = 0.01


class Courier:
    """Knows the servers of a job, and which of them is the primary of which part."""

    def __init__(self, job: JobDescription, memberships: list[Membership], servers: list[str]) -> None:
        import ray

        self._ray, self._job = ray, job
        self.memberships, self.servers = list(memberships), list(servers)
        self.dead: set[str] = set()
        self._handles: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="courier")
        self._thread.start()
        self.num_bytes = 0

    def start(self, part: int, request: Request, gradient: Any = None) -> Future[tuple[Any, Any]]:
        """Send a request; the future has the answer."""
        return asyncio.run_coroutine_threadsafe(self._ask(part, request, gradient), self._loop)

    def call_primary(self, part: int, method: str, *args: Any) -> Future[Any]:
        """Call a method of a part's primary until it does not return None."""
        return asyncio.run_coroutine_threadsafe(self._call_primary(part, method, *args), self._loop)

    def look(self, part: int) -> Future[Membership]:
        """Ask who has a part; the latest that anybody knows."""
        return asyncio.run_coroutine_threadsafe(self._find(part), self._loop)

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    async def _ask(self, part: int, request: Request, gradient: Any) -> tuple[Any, Any]:
        while True:
            name = self.memberships[part].primary
            answer = await self._try(part, name, "ask", request, gradient, tuple(self.dead))
            if answer is not None and not isinstance(answer[0], NotPrimary):
                if isinstance(request, Push):
                    self.num_bytes += gradient.nbytes
                return answer
            await asyncio.sleep(PAUSE_S)
            await self._find(part)

    async def _call_primary(self, part: int, method: str, *args: Any) -> Any:
        while True:
            answer = await self._try(part, self.memberships[part].primary, method, *args)
            if answer is not None:
                return answer
            await asyncio.sleep(PAUSE_S)
            await self._find(part)

    async def _try(self, part: int, name: str, method: str, *args: Any) -> Any:
        """The answer of one server; None if it has ended, or is not the primary any longer."""
        try:
            future = asyncio.ensure_future(self._as_future(self._handle(name), method, part, *args))
            while not (await asyncio.wait({future}, timeout=LOOK_S))[0]:
                if (await self._find(part)).primary != name:
                    future.cancel()
                    return None
            return future.result()
        except (self._ray.exceptions.RayActorError, ValueError) as error:
            self._note_death(name, error)
            return None

    async def _as_future(self, handle: Any, method: str, *args: Any) -> Any:
        return await getattr(handle, method).remote(*args)

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            self._handles[name] = self._ray.get_actor(name, self._job.namespace)
        return self._handles[name]

    def _note_death(self, name: str, error: Exception) -> None:
        if isinstance(error, self._ray.exceptions.ActorDiedError) and is_certain(error):
            self.dead.add(name)

    async def _find(self, part: int) -> Membership:
        """Ask for the part's membership; the latest is kept. Who has ended is told to the others.

        A member of the next epoch is one of this epoch, so its members know. A server that still starts would be waited
        for; all are asked only if no member answers.
        """
        members = [name for name in self.memberships[part].members if name not in self.dead]
        known = await self._look_at_all(members, part)
        if not known:
            known = await self._look_at_all([name for name in self.servers if name not in self.dead], part)
        self.memberships[part] = max((*known, self.memberships[part]), key=lambda item: item.epoch)
        return self.memberships[part]

    async def _look_at_all(self, names: list[str], part: int) -> list[Membership]:
        answers = await asyncio.gather(*(self._look_at(name, part) for name in names))
        return [item for item in answers if item is not None]

    async def _look_at(self, name: str, part: int) -> Membership | None:
        try:
            question = self._as_future(self._handle(name), "who", part, tuple(self.dead))
            return await asyncio.wait_for(question, LOOK_S)
        except TimeoutError:
            return None
        except (self._ray.exceptions.RayActorError, ValueError) as error:
            self._note_death(name, error)
            return None
