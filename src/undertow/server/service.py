"""A parameter server's job as the process that started it sees it: who is alive, who computes what, who is replaced.

In: batches by number, and how many workers, servers and replicas there shall be. Out: the loss of each batch, and in
the end the whole state. Nothing here decides about parts: that is the protocol's. A process that ends is started again
under another name, empty: a worker joins, a server is filled while training goes on.

Batches are handed out to whoever is free, so a fast worker gets more of them. The batch of a worker that is lost is
handed out again, and servers apply each number once, so every batch counts exactly once.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from undertow.errors import CallError, NotFinite, UndertowError
from undertow.server.actors import NotFiniteGradient, ServerActor, is_certain
from undertow.server.controlling import ControllerActor
from undertow.server.courier import Courier
from undertow.server.job import JobDescription
from undertow.server.messages import Leave, Membership
from undertow.server.state import State
from undertow.server.worker import GivenUp, WorkerActor

NUM_CONTROLLERS = 3
LOOK_S = 0.2
MEND_S = 0.25
BEAT_S = 1.0
MAX_FAILURES = 3  # in a row, of workers that end before their first batch

# What a worker does: it plans; it becomes known to the servers; it waits for a batch; it computes one; it waits until
# all is applied and then becomes unknown; it waits, unknown.
BEGIN, JOIN, IDLE, COMPUTE, REST, RESTED = "begin", "join", "idle", "compute", "rest", "rested"
BEATS = "beats"  # the group of calls that a worker answers while it computes


class PartLost(UndertowError):
    """All copies of a part are gone."""


@dataclass
class Worker:
    """A worker, as far as is known."""

    name: str
    actor: Any
    pid: int = 0
    number: int | None = None  # that it computes
    reference: Any = None  # of the call that goes on
    doing: str = BEGIN
    unsettled: set[int] = field(default_factory=set)  # computed, and perhaps not at all servers yet
    beat: Any = None
    beat_s: float = 0.0  # when it was last heard of
    peak_bytes: int = 0
    num_bytes: int = 0
    num_joins: int = 0  # each time it joins it has another name at the servers

    def do(self, what: str, reference: Any) -> None:
        """From now on it does this."""
        self.doing, self.reference = what, reference


@dataclass(frozen=True)
class Size:
    """How many there shall be."""

    workers: int
    servers: int
    replicas: int


class Service:
    """The processes of one job. `say` prints what the user should know."""

    def __init__(
        self,
        ray: Any,
        job: JobDescription,
        size: Size,
        make: Callable[[], Any],
        say: Callable[[str], None],
        lost_after_s: float,
    ) -> None:
        self._ray, self.job, self.size, self._make, self._say = ray, job, size, make, say
        self._lost_after_s = lost_after_s
        self.servers: dict[str, Any] = {}
        self.workers: dict[str, Worker] = {}
        self.controllers: dict[str, Any] = {}
        self.pids: dict[str, int] = {}
        self.events: list[dict[str, Any]] = []  # who was lost and who came, and when
        self._live: dict[Any, str] = {}  # a call that ends with its server, and whose it is
        self._num_started = 0
        self._num_failures = 0
        self._mended_s = 0.0
        self._shown: dict[int, Membership] = {}
        self._start_s = time.monotonic()

    # -- beginning and end

    def start(self, values: Sequence[dict[str, Any]], states: Sequence[State]) -> None:
        """Start all processes, with these parts."""
        options = {"namespace": self.job.namespace, "num_cpus": 0, "max_restarts": 0}
        names = [f"server-{index}" for index in range(self.size.servers)]
        memberships = []
        for part in range(len(self.job.parts)):
            places = [(part + copy) % self.size.servers for copy in range(self.size.replicas)]
            memberships.append(Membership(1, tuple(names[place] for place in places)))
        controller, server = self._ray.remote(ControllerActor), self._ray.remote(ServerActor)
        for name in names:
            actor = server.options(name=name, scheduling_strategy="SPREAD", **options)
            self.servers[name] = actor.remote(name, self.job)
        begun = []
        for name in names:
            given = [
                (part, membership, states[part], values[part])
                for part, membership in enumerate(memberships)
                if name in membership.members
            ]
            begun.append(self.servers[name].begin.remote(given))
        self.pids |= dict(zip(names, self._ray.get(begun), strict=True))
        # After the servers, so that no lease runs while they start.
        for name in self.job.rules.controllers:
            actor = controller.options(name=name, scheduling_strategy="SPREAD", **options)
            self.controllers[name] = actor.remote(name, self.job.rules, memberships)
        asked = [actor.pid.remote() for actor in self.controllers.values()]
        self.pids |= dict(zip(self.controllers, self._ray.get(asked), strict=True))
        self._live = {self.servers[name].live.remote(): name for name in names}
        self._shown = dict(enumerate(memberships))
        self.courier = Courier(self.job, memberships, names)
        for _ in range(self.size.workers):
            self._start_worker()

    def wait_for_workers(self) -> list[dict[str, Any]]:
        """Wait until all have planned; raises what is wrong with the first that has not."""
        found = []
        for worker in self.workers.values():
            try:
                found.append(self._ray.get(worker.reference))
            except self._ray.exceptions.RayTaskError as error:
                raise self._explain(error) from None
            self._has_begun(worker, found[-1])
        return found

    def stop(self) -> None:
        """End all processes."""
        if hasattr(self, "courier"):
            self.courier.close()
        workers = [worker.actor for worker in self.workers.values()]
        for actor in (*workers, *self.servers.values(), *self.controllers.values()):
            self._ray.kill(actor)
        self.workers, self.servers, self.controllers, self._live = {}, {}, {}, {}

    # -- training

    def train(
        self,
        numbers: Sequence[int],
        rates_of: Callable[[int], tuple[float, ...]],
        note: Callable[[dict[str, Any]], bool],
    ) -> list[dict[str, Any]]:
        """Have all batches computed and applied; `note` gets what each came to, and says whether to go on.

        Returns the buffers of each worker's model.
        """
        self._pending = deque(numbers)
        self._rates_of = rates_of
        self._done: set[int] = set()
        self._round: int | None = None
        self._buffers: list[dict[str, Any]] = []
        is_going_on = True
        while True:
            self._hand_out(is_going_on)
            is_over = not self._has_numbers(is_going_on)
            if is_over and all(worker.doing in (BEGIN, RESTED) for worker in self.workers.values()):
                return self._buffers
            for result in self._look():
                self._num_failures = 0
                is_going_on = note(result) and is_going_on

    def _has_numbers(self, is_going_on: bool) -> bool:
        if is_going_on:
            return bool(self._pending)
        # An update that was begun is ended: its other batches are.
        update_of = self.job.rules.update_of
        return self.job.rules.max_delay == 0 and any(update_of(number) == self._round for number in self._pending)

    def _hand_out(self, is_going_on: bool) -> None:
        """Give every worker that is free something to do."""
        for worker in self.workers.values():
            if worker.doing == RESTED and self._has_numbers(is_going_on):
                worker.num_joins += 1
                worker.do(JOIN, worker.actor.join.remote(f"{worker.name}.{worker.num_joins}"))
            elif worker.doing == IDLE and not self._has_numbers(is_going_on):
                # Who is known to the servers and does nothing would hold the others up.
                worker.do(REST, worker.actor.rest.remote())
            elif worker.doing == IDLE and (number := self._next_number(is_going_on)) is not None:
                worker.do(COMPUTE, worker.actor.compute.remote(number, self._rates_of(number)))
                worker.number = number

    def _next_number(self, is_going_on: bool) -> int | None:
        if not self._has_numbers(is_going_on):
            return None
        if self.job.rules.max_delay > 0:
            return self._pending.popleft()
        # One update after the other: its batches have to be computed before those of the next one begin.
        number = min(self._pending)
        of_number = self.job.rules.update_of(number)
        if self._round is not None and of_number > self._round:
            computing = [item.number for item in self.workers.values() if item.number is not None]
            if any(self.job.rules.update_of(other) < of_number for other in computing):
                return None
        self._round = of_number
        self._pending.remove(number)
        return number

    def _look(self) -> list[dict[str, Any]]:
        """Wait a moment for whoever has news; the results of batches."""
        references = {item.reference: item for item in self.workers.values() if item.reference is not None}
        ready, _ = self._ray.wait([*references, *self._live], num_returns=1, timeout=LOOK_S)
        results = []
        for reference in ready:
            if reference in self._live:
                self._lose_server(reference)
                continue
            worker = references[reference]
            try:
                found = self._ray.get(reference)
            except self._ray.exceptions.RayActorError:
                self._lose_worker(worker, "has ended")
                continue
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, GivenUp):
                    self._lose_worker(worker, "was given up")
                    continue
                raise self._explain(error) from None
            worker.beat_s = time.monotonic()
            results += self._take(worker, found)
        self._mend()
        return results

    def _take(self, worker: Worker, found: Any) -> list[dict[str, Any]]:
        """What a call of a worker has come to."""
        doing, number = worker.doing, worker.number
        worker.do(IDLE, None)
        worker.number = None
        if doing == BEGIN:
            self._has_begun(worker, found)
        elif doing == REST and found is not None:
            worker.doing, worker.unsettled = RESTED, set()
            self._buffers.append({"worker": worker.name, **found})
        elif doing == COMPUTE and number is not None and found is None:
            self._pending.appendleft(number)
        elif doing == COMPUTE and number is not None:
            self._note_computed(worker, number)
            worker.num_bytes = found["num_bytes"]
            if number not in self._done:
                self._done.add(number)
                return [found]
        return []

    def _note_computed(self, worker: Worker, number: int) -> None:
        """It has waited for all answers before it began, unless the batches are of one update."""
        if self.job.rules.max_delay > 0:
            worker.unsettled = {number}
            return
        worker.unsettled.add(number)
        # Whoever computes for an update has the parameters that all earlier ones have made.
        first = number - number % self.job.rules.round_size
        for other in self.workers.values():
            other.unsettled = {item for item in other.unsettled if item >= first}
        self._pending = deque(item for item in self._pending if item >= first)

    def snapshot(self) -> list[dict[str, Any]]:
        """The whole state of each part, when nothing is under way."""
        futures = [self.courier.call_primary(part, "snapshot") for part in range(len(self.job.parts))]
        return [self._wait_for(future) for future in futures]

    def read_log(self, part: int, since: int) -> list[Any]:
        """The updates of a part after a version."""
        return self._wait_for(self.courier.call_primary(part, "log", since))

    def _wait_for(self, future: Any) -> Any:
        while not future.done():
            for reference in self._ray.wait([*self._live], timeout=0)[0] if self._live else ():
                self._lose_server(reference)
            self._mend()
            time.sleep(0.01)
        return future.result()

    # -- who is alive

    def _start_worker(self) -> None:
        name = f"worker-{self._num_started}"
        self._num_started += 1
        options = {"name": name, "namespace": self.job.namespace, "num_cpus": 0, "max_restarts": 0}
        kind = self._ray.remote(concurrency_groups={BEATS: 1})(WorkerActor)
        actor = kind.options(scheduling_strategy="SPREAD", **options)
        memberships = [self._shown[part] for part in range(len(self.job.parts))]
        handle = actor.remote(name, self.job, self._make, memberships, list(self.servers))
        worker = Worker(name, handle, reference=handle.begin.remote(), beat_s=math.inf)
        self.workers[name] = worker

    def _has_begun(self, worker: Worker, facts: dict[str, Any]) -> None:
        worker.pid, worker.peak_bytes = facts["pid"], facts["peak_bytes"]
        self.pids[worker.name] = worker.pid
        worker.beat_s = time.monotonic()
        worker.do(RESTED, None)
        self._note(worker.name, "came")

    def _lose_worker(self, worker: Worker, how: str) -> None:
        """A worker is gone: nobody waits for it, its batches are computed again, another takes its place."""
        self._note(worker.name, how)
        self._say(f"{worker.name} {how}; another one starts")
        del self.workers[worker.name]
        self._ray.kill(worker.actor)
        if worker.doing == BEGIN:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                raise CallError(f"{MAX_FAILURES} workers in a row ended before their first batch; see Ray's logs")
        for part in range(len(self.job.parts)):
            self.courier.start(part, Leave(f"{worker.name}.{worker.num_joins}"))
        if self.job.rules.max_delay == 0:
            # They may wait for an update that lacks its batch.
            for other in self.workers.values():
                other.actor.give_back.options(concurrency_group=BEATS).remote()
        lost = {*worker.unsettled, *(() if worker.number is None else (worker.number,))}
        for number in sorted(lost, reverse=True):
            self._pending.appendleft(number)
        self._start_worker()

    def _explain(self, error: Any) -> Exception:
        cause = error.cause
        if isinstance(cause, NotFiniteGradient):
            return NotFinite(str(cause))
        return cause if isinstance(cause, UndertowError) else error

    def _lose_server(self, reference: Any) -> None:
        """A server is gone. Its parts go on at their backups, and another server takes its place, empty."""
        name = self._live.pop(reference)
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            if is_certain(error):
                self.courier.dead.add(name)
        self._note(name, "has ended")
        self._say(f"{name} has ended; its backups go on, and another server is filled")
        self.servers.pop(name, None)
        for other in self.servers.values():
            other.who.remote(0, tuple(self.courier.dead))
        new = f"server-{self._num_started}-again"
        self._num_started += 1
        options = {"name": new, "namespace": self.job.namespace, "num_cpus": 0, "max_restarts": 0}
        actor = self._ray.remote(ServerActor).options(scheduling_strategy="SPREAD", **options)
        self.servers[new] = actor.remote(new, self.job)
        self._live[self.servers[new].live.remote()] = new
        self.servers[new].begin.remote([])
        self._tell_servers()

    def _tell_servers(self) -> None:
        names = list(self.servers)
        self.courier.servers = names
        for worker in self.workers.values():
            worker.actor.learn.options(concurrency_group=BEATS).remote(names)

    def _mend(self) -> None:
        """Every now and then: fill new backups, look for workers that stand still."""
        now = time.monotonic()
        if now - self._mended_s < MEND_S:
            return
        self._mended_s = now
        for part in range(len(self.job.parts)):
            self._mend_part(part)
        for worker in list(self.workers.values()):
            if worker.beat is None:
                worker.beat = worker.actor.beat.options(concurrency_group=BEATS).remote()
            elif self._ray.wait([worker.beat], timeout=0)[0]:
                worker.beat = None
                if worker.doing != BEGIN:
                    worker.beat_s = now
            elif worker.beat_s + self._lost_after_s < now:
                self._lose_worker(worker, f"has stood still for {self._lost_after_s:g} s")

    def _mend_part(self, part: int) -> None:
        membership = self.courier.look(part).result()
        if membership != self._shown[part]:
            self._note(f"part {part}", f"is on {', '.join(membership.members)}")
            if len(membership.members) == 1 < self.size.replicas:
                self._say(f"part {part} is down to one copy, on {membership.primary}")
            elif len(membership.members) == self.size.replicas > len(self._shown[part].members):
                self._say(f"part {part} has {len(membership.members)} copies again")
            self._shown[part] = membership
        alive = [name for name in membership.members if name in self.servers]
        if not alive:
            raise PartLost(f"all copies of part {part} are gone, which {', '.join(membership.members)} had")
        others = [name for name in self.servers if name not in membership.members]
        if len(membership.members) < self.size.replicas and others and membership.primary in self.servers:
            # The one that has fewest parts.
            counts = {name: sum(name in item.members for item in self._shown.values()) for name in others}
            name = min(others, key=lambda item: (counts[item], item))
            self.servers[name].take_empty.remote(part)
            self.servers[membership.primary].fill.remote(part, name)

    def _note(self, who: str, what: str) -> None:
        self.events.append({"seconds": round(time.monotonic() - self._start_s, 3), "who": who, "what": what})


def new_namespace() -> str:
    """One that no other job has."""
    return f"undertow-{uuid.uuid4().hex[:12]}"
