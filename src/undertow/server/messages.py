"""What the machines of a parameter server say to each other.

A message holds decisions only. Tensors travel beside it: the gradients of the pushes that it names, the parameters of
an answer, the whole state of a part that is filled. Who sends a message adds them; the machines never see them.

Every message is about one part. A name is that of one process: who is started again has another name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Item = tuple[int, Any, Any]  # the part, the message, the tensors beside it
Ballot = tuple[int, str]  # a round, and who began it: no two proposals have the same


@dataclass(frozen=True, slots=True)
class Membership:
    """Who has a part. The first of `members` is the primary. Epochs are counted from 1."""

    epoch: int
    members: tuple[str, ...]

    @property
    def primary(self) -> str:
        """Who orders the pushes."""
        return self.members[0]


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient for a part. `number` is that of its batch, `versions` those of all parts it was computed with."""

    worker: str
    number: int
    versions: tuple[int, ...]
    rates: tuple[float, ...] = ()  # the learning rate of each group of parameters


@dataclass(frozen=True, slots=True)
class Join:
    """A worker begins: it wants the parameters, and others take care of its delay from now on."""

    worker: str


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker has ended, or is given up; it never comes back under this name."""

    worker: str


Request = Push | Join | Leave


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of a part's state, the same at all of its members: an update by pushes, or a worker that comes or goes.

    `index` counts entries from 1. An entry without content only asks how far a member is.
    """

    index: int
    pushes: tuple[Push, ...] = ()
    joined: str = ""
    left: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """To a worker: its push is applied, at every member. The parameters of this version come with it."""

    worker: str
    number: int
    version: int


@dataclass(frozen=True, slots=True)
class Joined:
    """To a worker: it is known. The parameters of this version come with it."""

    worker: str
    version: int


@dataclass(frozen=True, slots=True)
class Left:
    """A worker is no longer known."""

    worker: str


@dataclass(frozen=True, slots=True)
class NotPrimary:
    """To a worker: ask somebody else, or again later."""

    worker: str
    membership: Membership | None


@dataclass(frozen=True, slots=True)
class Refused:
    """To a worker: it was given up, or never joined. Its push is not applied."""

    worker: str
    number: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """From a primary: apply this entry, which comes with the gradients that it names, and confirm it."""

    membership: Membership
    entry: Entry


@dataclass(frozen=True, slots=True)
class Confirm:
    """To a primary: `sender` has all entries up to `index`. `ahead` is the last one, if the primary may lack it."""

    epoch: int
    sender: str
    index: int
    ahead: Entry | None = None


@dataclass(frozen=True, slots=True)
class Stale:
    """To a member that lives in an earlier epoch."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class Prepare:
    """To a controller: promise to accept nothing older than this ballot, and say what you accepted last."""

    ballot: Ballot
    sender: str


@dataclass(frozen=True, slots=True)
class Promise:
    """From a controller: what it accepted last, and under which ballot."""

    ballot: Ballot
    controller: str
    accepted: Ballot
    membership: Membership


@dataclass(frozen=True, slots=True)
class Accept:
    """To a controller: this is the membership from now on, if nobody came with a later ballot."""

    ballot: Ballot
    sender: str
    membership: Membership


@dataclass(frozen=True, slots=True)
class Accepted:
    """From a controller: accepted, and the primary has its lease."""

    ballot: Ballot
    controller: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """From a controller: somebody else has a lease, or came with the later ballot `promised`."""

    ballot: Ballot
    promised: Ballot


@dataclass(frozen=True, slots=True)
class Renew:
    """To a controller, from a primary: let me go on. `asked_at` is the primary's own clock."""

    epoch: int
    sender: str
    asked_at: float


@dataclass(frozen=True, slots=True)
class Grant:
    """From a controller: go on, for the length of a lease from `asked_at`."""

    epoch: int
    controller: str
    asked_at: float


@dataclass(frozen=True, slots=True)
class Obituary:
    """To a controller: this server's process has ended, for certain. Its lease needs no waiting for."""

    server: str
