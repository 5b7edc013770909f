"""What is alive while a step runs and is no tensor: an optimizer, a generator of the user's, a custom Function.

A Program is data and names such things; they are bound when a step is made of it (`runtime/code.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Live:
    """Among a node's arguments: the thing that is bound under this name."""

    name: str

    def __str__(self) -> str:
        return f"<{self.name}>"
