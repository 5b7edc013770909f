"""A controller: one of three small processes that decide who has a part, by majority, and grant leases.

The membership of a part is a register that is read and replaced in two rounds, as in Paxos (Lamport 1998) with changes
instead of values (Rystsov, CASPaxos, 2018). A proposer asks a majority to promise, takes the membership with the
highest ballot among their answers, and asks them to accept what it makes of it. So memberships follow one another in
one order, whoever proposes, and any one controller may die.

A controller promises nothing to others while the primary's lease runs, unless that process has ended for certain. Its
own clock counts from when it granted the lease, and the primary's from before it asked, so the primary stops first.
Clocks may differ, but must run at the same speed: by far less than a part in ten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from undertow.server.messages import (
    Accept,
    Accepted,
    Ballot,
    Grant,
    Membership,
    Obituary,
    Prepare,
    Promise,
    Rejected,
    Renew,
)
from undertow.server.rules import Rules

Send = tuple[str, Any]  # to whom, what


@dataclass(slots=True)
class Controller:
    """One controller's view of one part. Each field holds a value that never changes, so that a copy is a snapshot."""

    name: str
    rules: Rules
    membership: Membership  # that it accepted last
    accepted: Ballot = (0, "")
    promised: Ballot = (0, "")
    leased_until: float = -math.inf
    dead: frozenset[str] = frozenset()

    def receive(self, message: Any, now: float) -> list[Send]:
        """What it answers."""
        if isinstance(message, Prepare):
            return [(message.sender, self._prepare(message, now))]
        if isinstance(message, Accept):
            return [(message.sender, self._accept(message, now))]
        if isinstance(message, Renew):
            answer = self._renew(message, now)
            return [] if answer is None else [(message.sender, answer)]
        assert isinstance(message, Obituary)
        self.dead |= {message.server}
        return []

    def _prepare(self, message: Prepare, now: float) -> Promise | Rejected:
        if message.ballot <= self.promised or self._is_leased_to_other(message.sender, now):
            return Rejected(message.ballot, self.promised)
        self.promised = message.ballot
        return Promise(message.ballot, self.name, self.accepted, self.membership)

    def _is_leased_to_other(self, server: str, now: float) -> bool:
        holder = self.membership.primary
        return holder not in (server, *self.dead) and now < self.leased_until

    def _accept(self, message: Accept, now: float) -> Accepted | Rejected:
        if message.ballot < self.promised:
            return Rejected(message.ballot, self.promised)
        self.promised = self.accepted = message.ballot
        self.membership = message.membership
        self.leased_until = now + self.rules.lease_s
        return Accepted(message.ballot, self.name)

    def _renew(self, message: Renew, now: float) -> Grant | None:
        # A later membership is not told: that one controller has accepted it does not make it so.
        is_current = (message.epoch, message.sender) == (self.membership.epoch, self.membership.primary)
        # Who was promised something may take over at any moment: then the lease must not grow.
        if not is_current or self.promised != self.accepted:
            return None
        self.leased_until = max(self.leased_until, now + self.rules.lease_s)
        return Grant(message.epoch, self.name, message.asked_at)
