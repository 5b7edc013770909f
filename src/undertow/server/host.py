"""What a server process does with its copies of parts: it carries messages and tensors, and knows when it is time.

In: messages, requests of workers, the clock. Out: messages with the tensors that belong to them, and answers. All
decisions about the protocol are the machines' (`replica.py`). What is decided here is only when they are asked to act:
renewing a lease, taking over, giving up on somebody. To ask at a wrong time costs time and breaks nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from undertow.server.crashes import AFTER, BEFORE, SENT, pass_point
from undertow.server.messages import (
    Confirm,
    Done,
    Entry,
    Item,
    Join,
    Joined,
    Left,
    Membership,
    NotPrimary,
    Obituary,
    Push,
    Refused,
    Replicate,
    Request,
)
from undertow.server.replica import DROP, KEEP, TAKE, TENSORS, Apply, Replica
from undertow.server.rules import Rules
from undertow.server.state import Fill, State
from undertow.server.tensors import PartTensors

Answer = tuple[Any, Any]  # what a worker is told, and the parameters

RENEWALS = 8  # in the length of a lease
RESEND_S = 0.5
TRY_AGAIN_S = 0.25  # a proposal without an outcome


@dataclass
class Held:
    """One copy of a part, with what belongs to it outside of the machine."""

    replica: Replica
    tensors: PartTensors
    gradients: dict[Push, torch.Tensor] = field(default_factory=dict)
    waiting: dict[Any, list[asyncio.Future[Answer]]] = field(default_factory=dict)
    entry: Entry | None = None  # on its way
    entry_since: float = 0.0
    sent_at: float = 0.0
    proposed_at: float = 0.0
    learner_since: float = 0.0
    learner_index: int = -1
    epochs: list[tuple[float, Membership]] = field(default_factory=list)  # when which was known


class Host:
    """The copies of one server. `send` takes messages for another process and returns at once."""

    def __init__(
        self, name: str, rules: Rules, clock: Callable[[], float], send: Callable[[str, list[Item]], None]
    ) -> None:
        self.name, self.rules, self.clock, self._send = name, rules, clock, send
        self.held: dict[int, Held] = {}
        self.dead: set[str] = set()
        self._draw = random.Random(name)

    def add(self, part: int, tensors: PartTensors, membership: Membership | None, state: State) -> None:
        """Begin with a copy; without a membership, one that is to be filled."""
        replica = Replica(self.name, part, self.rules, membership, state, is_filled=membership is not None)
        self.held[part] = Held(replica, tensors)

    # -- messages

    def receive(self, part: int, message: Any, beside: Any = None) -> None:
        """Handle a message from another server or a controller."""
        held = self.held.get(part)
        if held is None:
            return
        pass_point(BEFORE, message)
        entry = message.entry if isinstance(message, Replicate) else None
        if isinstance(message, Confirm):
            entry = message.ahead
        if isinstance(message, Fill):
            entry = message.last
        if entry is not None and beside is not None:
            for push, gradient in zip(entry.pushes, beside["gradients"], strict=True):
                held.gradients.setdefault(push, as_tensor(gradient))
        self._perform(part, held.replica.receive(message, self.clock()), beside, message)

    def ask(self, part: int, request: Request, gradient: torch.Tensor | None) -> asyncio.Future[Answer]:
        """A worker's request; the answer comes when every member has it."""
        held = self.held[part]
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        held.waiting.setdefault(_key(request), []).append(future)
        pass_point(BEFORE, request)
        if isinstance(request, Push) and gradient is not None:
            held.gradients.setdefault(request, gradient)
        self._perform(part, held.replica.receive(request, self.clock()), None, request)
        return future

    def _perform(self, part: int, out: Sequence[tuple[str, Any]], beside: Any, cause: Any) -> None:
        """Do what a machine wants done, in its order."""
        held = self.held[part]
        if out:
            pass_point(AFTER, cause)
        batches: dict[str, list[Item]] = {}
        parameters = None
        for to, message in out:
            if to == TENSORS:
                if isinstance(message, Apply):
                    gradients = [held.gradients[push] for push in message.entry.pushes]
                    held.tensors.apply(message.entry, gradients)
                else:
                    held.tensors.load(beside["state"], message.state.version, beside["log"])
                parameters = None
            elif isinstance(message, Done | Joined):
                parameters = held.tensors.parameters() if parameters is None else parameters
                self._answer(held, message, parameters)
            elif isinstance(message, Left | Refused | NotPrimary):
                self._answer(held, message, None)
            else:
                batches.setdefault(to, []).append((part, message, self._beside(held, message)))
        for to, items in batches.items():
            self._send(to, items)
        if any(isinstance(message, Replicate) for _, message in out):
            held.sent_at = self.clock()
        self._tidy(held)
        if out:
            pass_point(SENT, cause)

    def _beside(self, held: Held, message: Any) -> Any:
        """The tensors that belong to a message."""
        entry: Entry | None = None
        found: dict[str, Any] = {}
        if isinstance(message, Replicate):
            entry = message.entry
        elif isinstance(message, Confirm):
            entry = message.ahead
        elif isinstance(message, Fill):
            entry = message.last
            found = {"state": held.tensors.state(), "log": list(held.tensors.log)}
        if entry is not None:
            found["gradients"] = [held.gradients[push].numpy() for push in entry.pushes]
        return found or None

    def _answer(self, held: Held, message: Any, parameters: Any) -> None:
        keys = [key for key in held.waiting if _is_answer(message, key)]
        for key in keys:
            for future in held.waiting.pop(key):
                if not future.done():
                    future.set_result((message, parameters))

    def _tidy(self, held: Held) -> None:
        replica = held.replica
        needed = set(replica.held_pushes())
        for push in [push for push in held.gradients if push not in needed]:
            del held.gradients[push]
        if not replica.is_primary:
            for key in list(held.waiting):
                self._answer(held, NotPrimary(key[1], replica.membership), None)
        if replica.entry is not held.entry:
            held.entry, held.entry_since = replica.entry, self.clock()
        known = replica.membership
        if known is not None and (not held.epochs or held.epochs[-1][1] != known):
            held.epochs.append((self.clock(), known))

    # -- time

    def hear_of_death(self, name: str) -> None:
        """A process has ended, for certain. The controllers are told, and parts that it had are taken over."""
        if name in self.dead:
            return
        self.dead.add(name)
        for part, held in self.held.items():
            membership = held.replica.membership
            if membership is not None and name in membership.members:
                for controller in self.rules.controllers:
                    self._send(controller, [(part, Obituary(name), None)])
        self.tick()

    def tick(self) -> None:
        """Do what is due; called often."""
        now = self.clock()
        for part, held in self.held.items():
            if held.replica.is_primary:
                self._tick_primary(part, held, now)
            elif held.replica.is_member:
                self._tick_backup(part, held, now)

    def _tick_primary(self, part: int, held: Held, now: float) -> None:
        replica = held.replica
        membership = replica.membership
        assert membership is not None
        out: list[tuple[str, Any]] = []
        if now - replica.asked_at >= self.rules.lease_s / RENEWALS:
            out += replica.renew(now)
        is_late = replica.entry is not None and now - held.entry_since > self.rules.lease_s
        others = [*membership.members[1:], *replica.hoped]
        silent = [name for name in others if is_late and name not in replica.confirmed]
        lost = [name for name in others if name in self.dead] or silent
        if lost:
            out += self._propose(held, DROP, lost[0], now)
        elif now >= max(replica.lease_until, held.epochs[-1][0] if held.epochs else now) + self.rules.lease_s / 4:
            # Somebody was promised to take over and did not, so the controllers grant nothing.
            out += self._propose(held, KEEP, self.name, now)
        if replica.entry is not None and now - held.sent_at > RESEND_S:
            out += replica.resend()
        if replica.learner in self.dead:
            replica.learner = ""
        elif replica.learner and now - held.learner_since > self.rules.lease_s:
            held.learner_since = now
            if replica.proposal is None:
                out += replica.fill(replica.learner)
        if out:
            self._perform(part, out, None, None)

    def _tick_backup(self, part: int, held: Held, now: float) -> None:
        membership = held.replica.membership
        assert membership is not None
        # While the primary has its lease the controllers refuse this, so it need not be known whether it lives.
        pause = TRY_AGAIN_S if membership.primary in self.dead else self.rules.lease_s / 4
        if now - held.proposed_at >= pause * (1 + self._draw.random()) or (
            membership.primary in self.dead and held.replica.proposal is None and now - held.proposed_at > 0.01
        ):
            out = self._propose(held, TAKE, self.name, now)
            if out:
                self._perform(part, out, None, None)

    def _propose(self, held: Held, kind: str, about: str, now: float) -> list[tuple[str, Any]]:
        if held.replica.proposal is not None and now - held.proposed_at < TRY_AGAIN_S * (1 + self._draw.random()):
            return []
        held.proposed_at = now
        return held.replica.propose(kind, about, now)

    def fill(self, part: int, server: str) -> bool:
        """Begin to fill a new backup, if this is the primary and no other is being filled."""
        held = self.held[part]
        replica = held.replica
        if not replica.is_serving(self.clock()) or replica.learner not in ("", server):
            return False
        assert replica.membership is not None
        if server not in replica.membership.members and server != replica.learner:
            held.learner_since = self.clock()
            self._perform(part, replica.fill(server), None, None)
        return True

    def status(self) -> dict[int, dict[str, Any]]:
        """Each copy, as plain data."""
        now = self.clock()
        return {
            part: {
                "membership": held.replica.membership,
                "is_serving": held.replica.is_serving(now),
                "is_member": held.replica.is_member,
                "version": held.replica.state.version,
                "index": held.replica.state.index,
                "holding": dict(held.replica.state.holding),
                "waiting": [push.number for push in held.replica.waiting],
                "learner": held.replica.learner,
            }
            for part, held in self.held.items()
        }


def as_tensor(array: Any) -> torch.Tensor:
    """A gradient in memory of its own: what came may be memory that others share."""
    return torch.from_numpy(array.copy())


def _key(request: Request) -> tuple[str, str, int]:
    if isinstance(request, Push):
        return "push", request.worker, request.number
    return ("join" if isinstance(request, Join) else "leave"), request.worker, -1


def _is_answer(message: Any, key: tuple[str, str, int]) -> bool:
    kind, worker, number = key
    if message.worker != worker:
        return False
    if isinstance(message, Done):
        return (kind, number) == ("push", message.number)
    if isinstance(message, Joined):
        return kind == "join"
    if isinstance(message, Left):
        return kind == "leave"
    return not isinstance(message, Refused) or message.number in (-1, number)
