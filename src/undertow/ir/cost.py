"""What running an operation once costs on a device, and the key under which equal calls share that cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from undertow.ir.program import Node
from undertow.ir.types import TensorType
from undertow.ir.values import Value


@dataclass(frozen=True, slots=True)
class Cost:
    """`workspace_bytes` are held only while the operation runs, beyond its arguments and outputs."""

    duration_ns: int
    workspace_bytes: int


# An hour in nanoseconds, and 4 TiB: nothing measured was ever more. The planner adds such numbers in 64 bits.
MAX_AMOUNT = 1 << 42


def read_cost(pair: Any) -> Cost:
    """A cost as a file holds it; raises ValueError where it is not a cost."""
    if len(pair) != 2 or not all(type(amount) is int and 0 <= amount <= MAX_AMOUNT for amount in pair):
        raise ValueError(f"{pair!r} is not a cost")
    return Cost(*pair)


def signature(node: Node) -> str:
    """The operation, the types of its tensors, and its other arguments: calls with equal signatures cost the same.

    Where a mask selects elements, the types of the outputs say how many.
    """
    parts = [_describe(argument) for argument in node.args]
    parts += [f"{name}={_describe(argument)}" for name, argument in sorted(node.kwargs.items())]
    # An output nobody reads is freed at once, which the operation's workspace includes.
    missing = "".join("-" if value is None else "+" for value in node.outputs)
    text = f"{node.name}{node.operation.settings}({', '.join(parts)}){missing if '-' in missing else ''}"
    has_mask = any(isinstance(value.type, TensorType) and value.type.dtype is torch.bool for value in node.inputs)
    return f"{text} -> {', '.join(str(value.type) for value in node.named_outputs)}" if has_mask else text


def _describe(argument: Any) -> str:
    if isinstance(argument, Value):
        return str(argument.type)
    if isinstance(argument, tuple | list):
        return f"[{', '.join(map(_describe, argument))}]"
    if isinstance(argument, bool | int | float | str | None):
        return repr(argument)
    return type(argument).__name__ if "at 0x" in str(argument) else str(argument)
