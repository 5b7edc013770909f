"""A fragment: a list of nodes that run as one operation, what they read from outside, and what others read of them.

Fragments that do the same with the same types are equal, whatever the names of their values.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from undertow.ir.program import Node
from undertow.ir.values import Value, map_values


@dataclass(frozen=True, eq=False)
class Fragment:
    """The parameter of an operation that is made of others."""

    nodes: tuple[Node, ...]
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fragment) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> str:
        """The same for fragments that do the same with the same types."""
        numbers = {value: number for number, value in enumerate(self.reads)}
        lines = [str(value.type) for value in self.reads]
        for node in self.nodes:
            arguments = map_values((node.args, tuple(node.kwargs.values())), lambda value: f"v{numbers[value]}")
            for value in node.named_outputs:
                numbers[value] = len(numbers)
            places = [None if value is None else numbers[value] for value in node.outputs]
            lines.append(f"{places} = {node.name} {arguments} {list(node.kwargs)}")
        lines.append(f"return {[(numbers[value], str(value.type)) for value in self.makes]}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
