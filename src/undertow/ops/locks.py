"""Updates under a lock that several processes share, where workers train the same parameters.

In: the operation of an update, and whose lock it takes. Out: an operation that does the same while it holds the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from undertow.ir.live import Live
from undertow.ir.operation import Operation, operation_maker

TEAM = Live("team")


class HasLocks(Protocol):
    """Who has a lock for each parameter, or works without."""

    @property
    def has_locks(self) -> bool:
        """Whether updates inside the backward pass take one."""

    def lock_of(self, parameter: int) -> AbstractContextManager[None]:
        """The lock of a parameter's update, by its number."""


@operation_maker
def under_lock(inner: Operation) -> Operation:
    """(team, number of the parameter, *arguments of the update): the update, while its lock is held."""
    before = 2  # arguments of its own
    return replace(
        inner,
        name=f"locked_{inner.name}",
        run=partial(_run_locked, inner.run),
        writes=lambda node: (node.args[before + 2],),
        chains=lambda node: inner.chains(replace(node, args=node.args[before:])),
        rehearse=None if inner.rehearse is None else partial(_rehearse, inner.rehearse),
    )


def _run_locked(run: Callable[..., None], team: HasLocks, parameter: int, *args: Any) -> None:
    with team.lock_of(parameter):
        run(*args)


def _rehearse(rehearse: Callable[..., Callable[[], Any]], team: HasLocks, parameter: int, *args: Any) -> Any:
    return rehearse(*args)
