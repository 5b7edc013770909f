"""A recorded function as a table and as a picture: every node with its value and the loss's derivative at it.

In: the nodes. Out: a Trace. The picture is the classic computation graph, left to right: values above the line,
derivatives below it. Nodes are put in columns by their longest path from the inputs (Sugiyama et al., 1981) and ordered
within a column by the mean height of what they read. Not made for graphs of more than about a hundred nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import torch

BOX_WIDTH, BOX_HEIGHT, COLUMN_GAP, ROW_GAP, MARGIN = 132, 58, 56, 26, 16


@dataclass(frozen=True)
class GraphNode:
    """One value: how it is made, what it is, and the derivative of the result by it (None: it has none)."""

    name: str
    label: str
    reads: tuple[str, ...]
    value: torch.Tensor
    derivative: torch.Tensor | None
    location: str


@dataclass(frozen=True)
class Trace:
    """Every node's value and derivative; prints as a table, `svg()` is a picture."""

    nodes: tuple[GraphNode, ...]

    def __getitem__(self, name: str) -> GraphNode:
        return next(node for node in self.nodes if node.name == name)

    def __str__(self) -> str:
        rows = [("node", "operation", "value", "derivative", "")]
        rows += [
            (node.name, node.label, _number(node.value), _number(node.derivative), node.location) for node in self.nodes
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
        ]
        return "\n".join(lines)

    def svg(self) -> str:
        """A self-contained SVG picture."""
        corners = _lay_out(self.nodes)
        width = max(x for x, _ in corners.values()) + BOX_WIDTH + MARGIN
        height = max(y for _, y in corners.values()) + BOX_HEIGHT + MARGIN
        parts = [_edge(corners[source], corners[node.name]) for node in self.nodes for source in node.reads]
        parts += [_box(node, *corners[node.name]) for node in self.nodes]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
            f"<style>{_STYLE}</style>{''.join(parts)}</svg>"
        )

    def _repr_svg_(self) -> str:
        return self.svg()


_STYLE = (
    "rect{fill:#fff;stroke:#555}path{fill:none;stroke:#999}text{font:12px sans-serif;fill:#222;text-anchor:middle}"
    ".value{fill:#1a6b2f}.derivative{fill:#a3231c}"
    "@media(prefers-color-scheme:dark){rect{fill:#222;stroke:#aaa}text{fill:#eee}.value{fill:#7fd18f}"
    ".derivative{fill:#ff9b91}}"
)


def _lay_out(nodes: tuple[GraphNode, ...]) -> dict[str, tuple[int, int]]:
    column: dict[str, int] = {}
    for node in nodes:
        column[node.name] = 1 + max((column[source] for source in node.reads), default=-1)
    readers: dict[str, list[str]] = {}
    for node in nodes:
        for source in node.reads:
            readers.setdefault(source, []).append(node.name)
    for node in nodes:
        if not node.reads and node.name in readers:  # an input goes just before its first reader
            column[node.name] = min(column[reader] for reader in readers[node.name]) - 1
    rows: dict[str, float] = {}
    for index in range(max(column.values(), default=0) + 1):
        members = [node for node in nodes if column[node.name] == index]
        wanted = {
            node.name: sum(rows[source] for source in node.reads) / len(node.reads) if node.reads else float(order)
            for order, node in enumerate(members)
        }
        members.sort(key=lambda node: wanted[node.name])
        lowest = 0.0
        for node in members:
            rows[node.name] = lowest = max(lowest, wanted[node.name])
            lowest += 1
    return {
        name: (MARGIN + column[name] * (BOX_WIDTH + COLUMN_GAP), round(MARGIN + rows[name] * (BOX_HEIGHT + ROW_GAP)))
        for name in column
    }


def _edge(source: tuple[int, int], target: tuple[int, int]) -> str:
    x0, y0 = source[0] + BOX_WIDTH, source[1] + BOX_HEIGHT // 2
    x1, y1 = target[0], target[1] + BOX_HEIGHT // 2
    middle = (x0 + x1) // 2
    return f'<path d="M{x0} {y0}C{middle} {y0} {middle} {y1} {x1} {y1}"/>'


def _box(node: GraphNode, x: int, y: int) -> str:
    center = x + BOX_WIDTH // 2
    title = escape(f"{node.name} {node.location}")
    return (
        f'<g><title>{title}</title><rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text class="value" x="{center}" y="{y + 17}">{escape(_number(node.value))}</text>'
        f'<text x="{center}" y="{y + 34}">{escape(_shorten(node.label))}</text>'
        f'<text class="derivative" x="{center}" y="{y + 51}">{escape(_number(node.derivative))}</text></g>'
    )


def _shorten(text: str) -> str:
    return text if len(text) <= 20 else text[:19] + "…"


def _number(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "-"
    if tensor.numel() == 1:
        return f"{tensor.item():.4g}"
    return f"[{'x'.join(map(str, tensor.shape))}] norm {tensor.to(torch.float64).norm().item():.4g}"
