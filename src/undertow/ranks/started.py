"""How a process knows that it is one of several ranks: torchrun or `undertow train` have set its environment."""

from __future__ import annotations

import os

LAUNCHER = "UNDERTOW_LAUNCHER"  # the process that started the ranks, and has their store
NAMESPACE = "undertow"  # of keys in the store


def is_rank() -> bool:
    """Whether this process was started as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched() -> bool:
    """Whether `undertow train` started it, and not torchrun."""
    return LAUNCHER in os.environ
