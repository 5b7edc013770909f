"""What all members of a part agree on, beside its tensors. In: entries, one after the other. Out: the next state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from undertow.server.messages import Entry


@dataclass(frozen=True, slots=True)
class State:
    """After `index` entries, of which `version` were updates.

    The numbers of all pushes that are applied are those below `below`, and `beyond`.
    """

    index: int = 0
    version: int = 0
    holding: tuple[tuple[str, int], ...] = ()  # each worker with the version that it has pulled, in order
    gone: frozenset[str] = frozenset()
    below: int = 0
    beyond: frozenset[int] = frozenset()

    def is_done(self, number: int) -> bool:
        """Whether the push of this number is applied."""
        return number < self.below or number in self.beyond

    def knows(self, worker: str) -> bool:
        """Whether the worker has joined and not left."""
        return any(name == worker for name, _ in self.holding)

    def after(self, entry: Entry) -> State:
        """The state after one more entry."""
        holding, gone = dict(self.holding), self.gone
        version = self.version + bool(entry.pushes)
        # A push is a pull as well: its answer brings the parameters after the update.
        holding |= {push.worker: version for push in entry.pushes if push.worker in holding}
        if entry.joined:
            holding[entry.joined] = version
        if entry.left:
            holding.pop(entry.left, None)
            gone |= {entry.left}
        below, beyond = self.below, {*self.beyond, *(push.number for push in entry.pushes)}
        while below in beyond:
            beyond.discard(below)
            below += 1
        return replace(
            self,
            index=entry.index,
            version=version,
            holding=tuple(sorted(holding.items())),
            gone=gone,
            below=below,
            beyond=frozenset(beyond),
        )


@dataclass(frozen=True, slots=True)
class Fill:
    """From a primary to a new backup: the whole state, which comes with all tensors of the part."""

    epoch: int
    members: tuple[str, ...]
    state: State
    last: Entry
