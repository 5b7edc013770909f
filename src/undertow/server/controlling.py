"""A controller, as an actor of Ray. It needs no tensors, so it starts without PyTorch."""

from __future__ import annotations

import os
import time

from undertow.server.controller import Controller
from undertow.server.messages import Item, Membership
from undertow.server.rules import Rules


class ControllerActor:
    """One controller, for all parts."""

    def __init__(self, name: str, rules: Rules, memberships: list[Membership]) -> None:
        until = time.monotonic() + rules.lease_s
        self._controllers = [Controller(name, rules, item, leased_until=until) for item in memberships]

    def tell(self, items: list[Item]) -> list[Item]:
        """Handle messages; what is answered to their sender."""
        answers: list[Item] = []
        for part, message, _ in items:
            for _, answer in self._controllers[part].receive(message, time.monotonic()):
                answers.append((part, answer, None))
        return answers

    def memberships(self) -> list[Membership]:
        """What this controller accepted last; a majority may know better."""
        return [item.membership for item in self._controllers]

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()
