"""The one printer of Programs: columns a person can read, and text a test can compare.

Nothing in it depends on memory addresses, set order or the machine, so equal Programs print equal text.
"""

from __future__ import annotations

from typing import Any

import torch

from undertow.ir.program import Input, Node, Program
from undertow.ir.types import DTYPE_NAMES
from undertow.ir.values import Value


def print_program(program: Program) -> str:
    """The whole Program, a line for each input and node."""
    lines = [_input_row(item) for item in program.inputs]
    lines += [_input_row(item, ", not read") for item in program.unread]
    if program.cotangents:
        lines += _node_rows(program.first_pass)
    else:
        lines += _node_rows(program.nodes[: program.backward_start])
        lines += [("backward", "", "", "")] if program.backward_start < len(program.nodes) else []
        lines += _node_rows(program.nodes[program.backward_start :])
    lines += [(f"update {update.input} <- {update.value}", "", "", "") for update in program.updates]
    lines.append((f"return {', '.join(map(str, program.outputs))}", "", "", ""))
    if program.cotangents:
        lines.append(("backward", "", "", ""))
        lines += [_input_row(item) for item in program.cotangents]
        lines += _node_rows(program.second_pass)
    for gradient in program.gradients:
        lines.append((f"gradient of {gradient.input} = {gradient.value or 'none'}", "", "", ""))
    return _align(lines)


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units with one decimal: `98.0 MiB`."""
    if num_bytes < 1024:
        return f"{int(num_bytes)} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024 or unit == "GiB":
            break
    return f"{num_bytes:.1f} {unit}"


def format_argument(argument: Any) -> str:
    """One argument as it appears between a node's parentheses."""
    if isinstance(argument, tuple | list):
        return f"[{', '.join(map(format_argument, argument))}]"
    if isinstance(argument, torch.dtype):
        return DTYPE_NAMES.get(argument, str(argument))
    if isinstance(argument, Value | bool | int | str | type(None)) or not isinstance(argument, float):
        return str(argument)
    return repr(argument)


def format_call(node: Node) -> str:
    """`convolution(%x, %w, none, [1, 1])`."""
    arguments = [format_argument(argument) for argument in node.args]
    arguments += [f"{name}={format_argument(argument)}" for name, argument in node.kwargs.items()]
    return f"{node.name}({', '.join(arguments)})"


def _input_row(item: Input, remark: str = "") -> tuple[str, str, str, str]:
    kind = item.value.type
    return (f"{item.value} : {item.kind.value}{remark}", str(kind), format_bytes(kind.num_bytes), "")


def _node_rows(nodes: tuple[Node, ...]) -> list[tuple[str, str, str, str]]:
    rows = []
    for node in nodes:
        names = ", ".join("_" if value is None else str(value) for value in node.outputs)
        types = ", ".join(str(value.type) for value in node.named_outputs)
        size = format_bytes(sum(value.type.num_bytes for value in node.named_outputs))
        rows.append((f"{names} = {format_call(node)}" if names else format_call(node), types, size, str(node.origin)))
    return rows


def _align(rows: list[tuple[str, str, str, str]]) -> str:
    # A few very long calls must not push every other line's columns off the screen.
    widths = [
        min(max((len(row[column]) for row in rows), default=0), limit) for column, limit in enumerate((64, 28, 10))
    ]
    lines = []
    for call, types, size, origin in rows:
        line = f"{call:<{widths[0]}}  {types:<{widths[1]}}  {size:>{widths[2]}}  {origin}" if types else call
        lines.append(line.rstrip())
    return "\n".join(lines)
