"""The Plan: a Program with what is known of its memory. Printable; what is printed is what runs."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.ir.printer import format_bytes, print_program
from undertow.ir.program import Node, Program, Value


@dataclass(frozen=True, eq=False)
class KeptValue:
    """A value of the forward pass that the backward pass reads, and the operations whose derivatives ask for it."""

    value: Value
    num_bytes: int
    made_by: Node
    asked_for_by: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """A training step. `peak_bytes` counts inputs, values and gradients, not the workspace inside kernels."""

    program: Program
    live_bytes: tuple[int, ...]  # while each node runs
    kept: tuple[KeptValue, ...]
    without_rule: tuple[Node, ...]  # their derivatives go through PyTorch's autograd

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every operation, in the order it runs; `node.origin` gives module path, file and line."""
        return self.program.nodes

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        inputs = sum(item.value.type.num_bytes for item in self.program.inputs)
        return max(self.live_bytes, default=inputs)

    @property
    def peak_node(self) -> Node | None:
        """The operation during which the peak is reached."""
        return self.nodes[self.live_bytes.index(self.peak_bytes)] if self.live_bytes else None

    def __str__(self) -> str:
        kept_bytes = sum(item.num_bytes for item in self.kept)
        lines = [print_program(self.program), ""]
        lines.append(
            f"{len(self.program.forward_nodes)} forward and {len(self.program.backward_nodes)} backward operations; "
            f"kept for the backward pass: {len(self.kept)} value{'' if len(self.kept) == 1 else 's'}, "
            f"{format_bytes(kept_bytes)}"
        )
        if self.peak_node is not None:
            where = " ".join(part for part in (self.peak_node.name, str(self.peak_node.origin)) if part)
            lines.append(f"peak: {format_bytes(self.peak_bytes)} at {where} (kernels' workspace not counted)")
        if self.without_rule:
            names = sorted({f"{node.name} ({node.origin})" for node in self.without_rule})
            lines.append(f"derivative taken through autograd at run time: {', '.join(names)}")
        return "\n".join(lines)
