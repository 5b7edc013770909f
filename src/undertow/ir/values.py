"""Values: what nodes make and read, and how they are found among nested arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from undertow.ir.types import TensorType, ValueType


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One result, assigned once. Values are compared by identity; `name` is unique within a Program."""

    name: str
    type: ValueType

    @property
    def tensor_type(self) -> TensorType:
        """The type of a value that is known to be a tensor."""
        assert isinstance(self.type, TensorType)
        return self.type

    def __str__(self) -> str:
        return f"%{self.name}"

    __repr__ = __str__


def values_in(arguments: Any) -> tuple[Value, ...]:
    """The Values in nested tuples."""
    found: list[Value] = []
    _collect(arguments, found)
    return tuple(found)


def _collect(item: Any, found: list[Value]) -> None:
    if isinstance(item, Value):
        found.append(item)
    elif isinstance(item, tuple | list):
        for part in item:
            _collect(part, found)


def map_values(arguments: Any, replace: Any) -> Any:
    """`arguments` with every Value v replaced by `replace(v)`, tuples kept."""
    if isinstance(arguments, Value):
        return replace(arguments)
    if isinstance(arguments, tuple | list):
        return tuple([map_values(argument, replace) for argument in arguments])
    return arguments
