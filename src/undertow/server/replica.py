"""One server's copy of one part: primary, backup, or a copy that is being filled.

In: messages and the time. Out: messages, and what to do with the tensors, which are elsewhere.

**Order.** The primary turns requests into entries, one at a time. It sends an entry to every member of the epoch,
applies it when all have confirmed it, and then answers. So what was answered is at every member, and what the primary
shows is never taken back. Backups apply an entry when they get it.

**Fencing.** A member that knows a later epoch refuses entries of an earlier one, so a primary that was replaced cannot
have anything confirmed. It also stops taking requests when its lease ends, by its own clock.

**Takeover.** A member asks the controllers to make it the primary of the next epoch. Only a member of the latest epoch
may, since every member has all that was answered. A new epoch begins by asking all its members how far they are. They
differ by one entry at most: who is behind gets it, and who is ahead gives it.

**A new backup** gets the whole state, then every later entry. When it has all that was answered, the primary proposes
it as a member. From then on nothing is answered without it, although it is not decided yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from undertow.server.messages import (
    Accept,
    Accepted,
    Ballot,
    Confirm,
    Done,
    Entry,
    Grant,
    Join,
    Joined,
    Leave,
    Left,
    Membership,
    NotPrimary,
    Prepare,
    Promise,
    Push,
    Refused,
    Rejected,
    Renew,
    Replicate,
    Request,
    Stale,
)
from undertow.server.rules import Rules, choose_update
from undertow.server.state import Fill, State


@dataclass(frozen=True, slots=True)
class Apply:
    """To the tensors: do this entry."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Load:
    """To the tensors: take the whole state that came with a Fill."""

    state: State


TENSORS = "tensors"  # the addressee of Apply and Load

# Kinds of change of a membership.
TAKE, ADD, DROP, KEEP = "take", "add", "drop", "keep"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change of the membership that this server has asked the controllers for."""

    ballot: Ballot
    kind: str
    server: str  # whom it is about
    asked_at: float
    promises: tuple[Promise, ...] = ()
    wanted: Membership | None = None  # once a majority has promised
    accepted: frozenset[str] = frozenset()


@dataclass(slots=True)
class Replica:
    """One copy of one part. Each field holds a value that never changes, so that a copy is a snapshot."""

    name: str
    part: int
    rules: Rules
    membership: Membership | None = None  # the latest known
    state: State = State()
    last: Entry = Entry(0)  # the latest that was applied
    is_filled: bool = False  # whether `state` may be relied upon
    early: tuple[Entry, ...] = ()  # for a copy that is not filled up to them
    proposal: Proposal | None = None
    round: int = 0  # the highest seen
    # Of a primary:
    entry: Entry | None = None  # on its way to the members
    confirmed: frozenset[str] = frozenset()
    hoped: frozenset[str] = frozenset()  # proposed as members in this epoch, and perhaps accepted by some controller
    waiting: tuple[Push, ...] = ()
    requests: tuple[Join | Leave, ...] = ()
    learner: str = ""  # who is being filled
    lease_until: float = -math.inf
    asked_at: float = -math.inf
    granted: frozenset[str] = frozenset()

    # -- what others read

    @property
    def is_member(self) -> bool:
        """Whether this copy counts."""
        return self.is_filled and self.membership is not None and self.name in self.membership.members

    @property
    def is_primary(self) -> bool:
        """Whether it orders the pushes, as far as it knows."""
        return self.is_member and self.membership is not None and self.membership.primary == self.name

    def is_serving(self, now: float) -> bool:
        """Whether it takes requests."""
        return self.is_primary and now < self.lease_until

    def held_pushes(self) -> tuple[Push, ...]:
        """The pushes whose gradients are still needed."""
        entries = [self.last, *self.early, *(() if self.entry is None else (self.entry,))]
        return (*self.waiting, *(push for entry in entries for push in entry.pushes))

    # -- events

    def receive(self, message: Any, now: float) -> list[tuple[str, Any]]:
        """What is to be sent and done because of a message."""
        out: list[tuple[str, Any]] = []
        if isinstance(message, Push | Join | Leave):
            self._request(message, now, out)
        elif isinstance(message, Replicate):
            self._replicate(message, out)
        elif isinstance(message, Confirm):
            self._confirm(message, now, out)
        elif isinstance(message, Fill):
            self._fill(message, out)
        elif isinstance(message, Promise):
            self._promise(message, now, out)
        elif isinstance(message, Accepted):
            self._accepted(message, now, out)
        elif isinstance(message, Rejected):
            if self.proposal is not None and self.proposal.ballot == message.ballot:
                self.proposal = None
                self.round = max(self.round, message.promised[0])
        elif isinstance(message, Grant):
            self._grant(message)
        else:
            assert isinstance(message, Stale)
            self._adopt(message.membership)
        return out

    def renew(self, now: float) -> list[tuple[str, Any]]:
        """Ask for a longer lease."""
        assert self.membership is not None
        self.asked_at, self.granted = now, frozenset()
        return [(name, Renew(self.membership.epoch, self.name, now)) for name in self.rules.controllers]

    def propose(self, kind: str, server: str, now: float) -> list[tuple[str, Any]]:
        """Ask the controllers for a change of the membership."""
        self.round += 1
        self.proposal = Proposal((self.round, self.name), kind, server, now)
        return [(name, Prepare(self.proposal.ballot, self.name)) for name in self.rules.controllers]

    def resend(self) -> list[tuple[str, Any]]:
        """Send the entry on its way again to who has not confirmed it."""
        out: list[tuple[str, Any]] = []
        if self.entry is not None and self.is_primary:
            for name in self._receivers() - self.confirmed:
                out.append((name, Replicate(self._epoch(), self.entry)))
        return out

    def fill(self, server: str) -> list[tuple[str, Any]]:
        """Begin to fill a new backup, or begin again."""
        assert self.is_primary
        self.learner = server
        membership = self._epoch()
        out: list[tuple[str, Any]] = [
            (server, Fill(membership.epoch, membership.members, self.state, self.last)),
        ]
        if self.entry is not None:
            out.append((server, Replicate(membership, self.entry)))
        return out

    # -- requests of workers

    def _request(self, message: Request, now: float, out: list[tuple[str, Any]]) -> None:
        worker = message.worker
        if not self.is_serving(now):
            out.append((worker, NotPrimary(worker, self.membership)))
        elif isinstance(message, Push):
            self._push(message, now, out)
        elif isinstance(message, Leave) and worker in self.state.gone:
            out.append((worker, Left(worker)))
        elif worker in self.state.gone:
            out.append((worker, Refused(worker, -1)))
        elif isinstance(message, Join) and self.state.knows(worker):
            # What it holds stays as it is: an answer to an old question must not look like a later pull.
            out.append((worker, Joined(worker, self.state.version)))
        else:
            self.requests += (message,)
            self._next(now, out)

    def _push(self, push: Push, now: float, out: list[tuple[str, Any]]) -> None:
        held = dict(self.state.holding).get(push.worker)
        if held is None:
            out.append((push.worker, Refused(push.worker, push.number)))
        elif self._is_repeated(push):
            out.append((push.worker, Done(push.worker, push.number, self.state.version)))
        elif not held <= push.versions[self.part] <= self.state.version or self._is_of_another_version(push):
            out.append((push.worker, Refused(push.worker, push.number)))
        elif not self._is_under_way(push):
            self.waiting += (push,)
            self._next(now, out)

    def _is_repeated(self, push: Push) -> bool:
        return self.state.is_done(push.number)

    def _is_of_another_version(self, push: Push) -> bool:
        """With a delay of 0: whether its gradient is not one by the parameters that its update changes."""
        return self.rules.max_delay == 0 and push.versions[self.part] != self.rules.update_of(push.number)

    def _is_under_way(self, push: Push) -> bool:
        ordered = () if self.entry is None else self.entry.pushes
        return any(item.number == push.number for item in (*self.waiting, *ordered))

    def _next(self, now: float, out: list[tuple[str, Any]]) -> None:
        """Order the next entry, if there is one and none is on its way."""
        if self.entry is not None or not self.is_serving(now):
            return
        index = self.state.index + 1
        # A question that was repeated on its way may be answered already.
        asked = [item for item in self.requests if not self._is_moot(item)]
        self.requests = tuple(asked[1:])
        if asked:
            worker = asked[0].worker
            entry = Entry(index, joined=worker) if isinstance(asked[0], Join) else Entry(index, left=worker)
        else:
            pushes = self._choose()
            if not pushes:
                return
            entry = Entry(index, pushes)
        self._order(entry, now, out)

    def _is_moot(self, request: Join | Leave) -> bool:
        is_gone = request.worker in self.state.gone
        return is_gone or (isinstance(request, Join) and self.state.knows(request.worker))

    def _choose(self) -> tuple[Push, ...]:
        return choose_update(self.rules, self.part, self.state.version, dict(self.state.holding), self.waiting)

    # -- entries, at the primary

    def _order(self, entry: Entry, now: float, out: list[tuple[str, Any]]) -> None:
        self.entry, self.confirmed = entry, frozenset()
        out += self.resend()
        self._commit(now, out)

    def _receivers(self) -> frozenset[str]:
        """Who gets entries."""
        others = {*self._epoch().members, *((self.learner,) if self.learner else ())}
        return frozenset(others - {self.name})

    def _needed(self) -> frozenset[str]:
        """Who has to confirm an entry before it is answered."""
        return frozenset({*self._epoch().members, *self.hoped} - {self.name})

    def _commit(self, now: float, out: list[tuple[str, Any]]) -> None:
        """Apply and answer the entry, if all have it."""
        entry = self.entry
        if entry is None or not self._needed() <= self.confirmed:
            return
        self.entry = None
        if entry.index == self.state.index + 1:
            self._apply(entry, out)
            out += [(push.worker, Done(push.worker, push.number, self.state.version)) for push in entry.pushes]
            if entry.joined:
                out.append((entry.joined, Joined(entry.joined, self.state.version)))
            if entry.left:
                out.append((entry.left, Left(entry.left)))
        self._next(now, out)

    def _apply(self, entry: Entry, out: list[tuple[str, Any]]) -> None:
        self.state, self.last = self.state.after(entry), entry
        self.waiting = tuple(
            push for push in self.waiting if not self.state.is_done(push.number) and push.worker != entry.left
        )
        out.append((TENSORS, Apply(entry)))

    def _confirm(self, message: Confirm, now: float, out: list[tuple[str, Any]]) -> None:
        if not self.is_primary or message.epoch != self._epoch().epoch:
            return
        is_asking = self.entry is not None and self.entry.index == self.state.index
        ahead = message.ahead
        if is_asking and ahead is not None and ahead.index == self.state.index + 1 and message.sender != self.learner:
            # It was ordered in the epoch before, and its worker was not answered: all members get it now.
            self._order(ahead, now, out)
        if self.entry is not None and message.index >= self.entry.index:
            self.confirmed |= {message.sender}
        self._commit(now, out)
        is_filled = message.sender == self.learner and message.index >= self.state.index
        if is_filled and self.proposal is None and self.learner not in self._epoch().members:
            self.hoped |= {self.learner}
            out += self.propose(ADD, self.learner, now)

    # -- entries, at the others

    def _replicate(self, message: Replicate, out: list[tuple[str, Any]]) -> None:
        if not self._is_current(message.membership, out):
            return
        entry = message.entry
        if not self.is_filled:
            self.early = tuple(sorted({*self.early, entry}, key=lambda item: item.index))
            return
        if entry.index > self.state.index + 1:
            if not self.is_member:
                self.early = tuple(sorted({*self.early, entry}, key=lambda item: item.index))
            return
        ahead = self.last if self.state.index == entry.index + 1 else None
        if entry.index == self.state.index + 1:
            self._apply(entry, out)
            self._catch_up(out)
        self._send_confirm(out, ahead)

    def _is_current(self, membership: Membership, out: list[tuple[str, Any]]) -> bool:
        """Whether a message is of an epoch that still goes on; a later one is taken over."""
        if self.membership is not None and membership.epoch < self.membership.epoch:
            out.append((membership.primary, Stale(self.membership)))
            return False
        self._adopt(membership)
        return membership.primary != self.name

    def _catch_up(self, out: list[tuple[str, Any]]) -> None:
        """Apply what came too early."""
        for entry in self.early:
            if entry.index == self.state.index + 1:
                self._apply(entry, out)
        self.early = tuple(entry for entry in self.early if entry.index > self.state.index)

    def _send_confirm(self, out: list[tuple[str, Any]], ahead: Entry | None) -> None:
        membership = self._epoch()
        out.append((membership.primary, Confirm(membership.epoch, self.name, self.state.index, ahead)))

    def _fill(self, message: Fill, out: list[tuple[str, Any]]) -> None:
        if not self._is_current(Membership(message.epoch, message.members), out) or self.is_member:
            return
        if not self.is_filled or message.state.index > self.state.index:
            self.state, self.last, self.is_filled = message.state, message.last, True
            out.append((TENSORS, Load(message.state)))
            self._catch_up(out)
        self._send_confirm(out, None)

    # -- epochs

    def _epoch(self) -> Membership:
        assert self.membership is not None
        return self.membership

    def _adopt(self, membership: Membership) -> None:
        """Live in this epoch from now on, if it is later than the one that is known."""
        if self.membership is not None and membership.epoch <= self.membership.epoch:
            return
        self.membership = membership
        self.proposal, self.hoped = None, frozenset()
        if self.name not in membership.members:
            # It may have entries that nobody else has, so it has to be filled from the beginning.
            self.is_filled, self.early = False, ()
        if membership.primary != self.name:
            self.entry, self.waiting, self.requests, self.learner = None, (), (), ""
            self.lease_until = -math.inf

    def _grant(self, message: Grant) -> None:
        if not self.is_primary or message.epoch != self._epoch().epoch or message.asked_at != self.asked_at:
            return
        self.granted |= {message.controller}
        if self.rules.is_majority(len(self.granted)):
            self.lease_until = max(self.lease_until, self.asked_at + self.rules.lease_s)

    def _promise(self, message: Promise, now: float, out: list[tuple[str, Any]]) -> None:
        proposal = self.proposal
        if proposal is None or proposal.ballot != message.ballot or proposal.wanted is not None:
            return
        promises = tuple({item.controller: item for item in (*proposal.promises, message)}.values())
        self.proposal = replace(proposal, promises=promises)
        if not self.rules.is_majority(len(promises)):
            return
        current = max(promises, key=lambda item: item.accepted).membership
        wanted = self._change(current, proposal)
        if wanted is None:
            # One controller may have accepted what is never decided, so nothing else follows from it.
            self.proposal = None
            return
        self.proposal = replace(proposal, promises=promises, wanted=wanted, asked_at=now)
        out += [(name, Accept(proposal.ballot, self.name, wanted)) for name in self.rules.controllers]

    def _change(self, current: Membership, proposal: Proposal) -> Membership | None:
        """The membership that replaces the current one; None if this server has nothing to say in it."""
        if not self.is_filled or self.name not in current.members:
            return None
        epoch = current.epoch + 1
        if proposal.kind == TAKE and current.primary != self.name:
            others = (name for name in current.members if name not in (self.name, current.primary))
            return Membership(epoch, (self.name, *others))
        if current.primary != self.name:
            return None
        if current != self.membership:
            return current  # this server's own proposal from before, which a minority may have accepted
        if proposal.kind == ADD:
            return Membership(epoch, (*current.members, proposal.server))
        if proposal.kind == DROP:
            return Membership(epoch, tuple(name for name in current.members if name != proposal.server))
        return Membership(epoch, current.members)

    def _accepted(self, message: Accepted, now: float, out: list[tuple[str, Any]]) -> None:
        proposal = self.proposal
        if proposal is None or proposal.ballot != message.ballot or proposal.wanted is None:
            return
        proposal = replace(proposal, accepted=proposal.accepted | {message.controller})
        self.proposal = proposal
        if not self.rules.is_majority(len(proposal.accepted)):
            return
        assert proposal.wanted is not None
        self._adopt(proposal.wanted)
        self.proposal = None
        self.lease_until = max(self.lease_until, proposal.asked_at + self.rules.lease_s)
        self._begin_epoch(now, out)

    def _begin_epoch(self, now: float, out: list[tuple[str, Any]]) -> None:
        """Ask all members how far they are, by the entry on its way or the last one."""
        members = self._epoch().members
        self._order(self.last if self.entry is None else self.entry, now, out)
        if self.learner in members:
            self.learner = ""
        elif self.learner:
            out += self.fill(self.learner)
