"""Live things: objects that a step uses and that are not data: an optimizer, the user's generator, a custom Function.

A Program is data and names such things; they are bound when a step is made from it (`runtime/code.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Live:
    """Among a node's arguments: the thing that is bound under this name."""

    name: str

    def __str__(self) -> str:
        return f"<{self.name}>"
