"""The Plan: what runs, in which order, which bytes each moment holds, and why. It runs as it is printed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from undertow.ir.printer import format_bytes, print_program
from undertow.ir.program import Node, Phase, Program, Task
from undertow.ir.step_times import StepTimes, find_step_times
from undertow.ir.values import Value

ARENA_GAPS = "gaps in the arena"  # among what is held: by how much the arena raises the peak


@dataclass(frozen=True, eq=False)
class KeptValue:
    """A value of the forward pass that the backward pass reads, and the operations whose derivatives read it."""

    value: Value
    num_bytes: int
    made_by: Node
    asked_for_by: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Tables:
    """Bytes and times of a plan, views folded into the storage they lie in. Planner and checker share nothing else."""

    storage: dict[Value, int]  # of every value, inputs included
    storage_bytes: tuple[int, ...]
    offsets: tuple[int | None, ...]  # where a storage begins in the step's arena; None for those outside of it
    frees: tuple[tuple[int, ...], ...]  # storages freed after each node
    workspace_bytes: tuple[int, ...]  # of each node
    duration_ns: tuple[int, ...]  # of each node

    @property
    def arena_bytes(self) -> int:
        """The size of the arena, which is there from the first operation to the last."""
        places = zip(self.offsets, self.storage_bytes, strict=True)
        return max((first + size for first, size in places if first is not None), default=0)


class Outcome(Enum):
    """How a search for a plan ended; a budget that cannot be met is an error instead."""

    UNCONSTRAINED = "no budget given"
    OPTIMAL = "proved optimal"
    FEASIBLE = "within the gap of the best"
    TIMED_OUT = "the best found in the time given"


@dataclass(frozen=True, eq=False)
class Plan:
    """A training step.

    `base` is the Program before planning. The node of `program` at position i does the work of the nodes of `base` at
    the positions `bases[i]`, the last one first: usually one node, none for a recorded state. `repeats` maps a value
    that is made a second time to the value that it repeats.
    """

    program: Program
    base: Program
    bases: tuple[tuple[int, ...], ...]
    repeats: dict[Value, Value]
    tables: Tables
    kept: tuple[KeptValue, ...]
    without_rule: tuple[Node, ...]  # their derivatives go through PyTorch's autograd
    held: dict[str, int] = field(default_factory=dict)  # bytes held throughout, by what they are
    live_bytes: tuple[int, ...] = ()  # while each node runs: all that is held, and its workspace
    budget_bytes: int | None = None
    lower_bound_ns: int = 0
    outcome: Outcome = Outcome.UNCONSTRAINED
    has_measured_costs: bool = False
    notes: tuple[str, ...] = ()  # what the reader should know in addition

    def explain(self, module_path: str = "") -> str:
        """What was decided for one layer and those inside it, and why; the empty path is the whole model."""
        from undertow.report.plan_summary import explain  # here, because reports import plans

        return explain(self, module_path)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every operation, in the order it runs; `node.origin` gives module path, file and line."""
        return self.program.nodes

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, all that the step holds counted."""
        return max(self.live_bytes, default=sum(self.held.values()))

    @property
    def peak_node(self) -> Node | None:
        """The operation during which the peak is reached."""
        return self.nodes[self.live_bytes.index(self.peak_bytes)] if self.live_bytes else None

    @cached_property
    def times(self) -> StepTimes:
        """When each operation runs, on the lane that it occupies."""
        return find_step_times(self.nodes, self.tables.duration_ns)

    @property
    def step_us(self) -> float:
        """The predicted time of a step: without links the sum of its operations' times, else when the last one ends."""
        return self.times.step_ns / 1e3

    @property
    def sent_bytes(self) -> int:
        """What a step sends over links, by the rank that sends most."""
        return sum(node.operation.sent_bytes(node) for node in self.nodes)

    @property
    def lower_bound_us(self) -> float:
        """No plan within the budget takes less than this, under the same costs."""
        return self.lower_bound_ns / 1e3

    @property
    def gap(self) -> float:
        """How much slower than the bound the plan can be at most: (step - bound) / bound."""
        return self.step_us / self.lower_bound_us - 1 if self.lower_bound_ns else 0.0

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Positions of operations that run a second time; views and decoding are not counted."""
        return tuple(
            position
            for position, node in enumerate(self.nodes)
            if node.task is Task.AGAIN and not node.operation.is_view and self.tables.duration_ns[position] > 0
        )

    def __str__(self) -> str:
        kept_bytes = sum(item.num_bytes for item in self.kept)
        lines = [print_program(self.program), ""]
        lines.append(
            f"{self._count_operations()}; "
            f"kept for the backward pass: {len(self.kept)} value{'' if len(self.kept) == 1 else 's'}, "
            f"{format_bytes(kept_bytes)}"
        )
        if self.peak_node is not None:
            where = " ".join(part for part in (self.peak_node.name, str(self.peak_node.origin)) if part)
            note = "" if self.has_measured_costs else " (kernels' workspace not counted)"
            lines.append(f"peak: {format_bytes(self.peak_bytes)} at {where}{note}")
        if self.tables.arena_bytes:
            lines.append(self._describe_arena())
        if self.budget_bytes is not None:
            lines.append(
                f"budget: {format_bytes(self.budget_bytes)}; {len(self.recomputed)} operations run again; "
                f"{self.step_us / 1e3:.1f} ms predicted, gap {self.gap:.1%} ({self.outcome.value})"
            )
        if self.sent_bytes:
            lines.append(self._describe_lanes())
        if self.without_rule:
            names = sorted({f"{node.name} ({node.origin})" for node in self.without_rule})
            lines.append(f"derivative taken through autograd at run time: {', '.join(names)}")
        lines += self.notes
        return "\n".join(lines)

    def _count_operations(self) -> str:
        forward, backward, update = map(self.program.count, Phase)
        return f"{forward} forward and {backward} backward operations{f', {update} updates' if update else ''}"

    def _describe_lanes(self) -> str:
        """How long computing and each link are occupied, and what is sent."""
        parts = [f"{format_bytes(self.sent_bytes)} sent"]
        if self.step_us:
            parts += [
                f"{lane} {busy / 1e6:.1f} ms, idle {self.times.idle_share(lane):.0%}"
                for lane, busy in self.times.busy_ns.items()
            ]
            parts.append(f"a step {self.step_us / 1e3:.1f} ms")
        return f"lanes: {'; '.join(parts)}"

    def _describe_arena(self) -> str:
        """What share of the bytes that operations make is in the arena, and which operations make the others."""
        tables, placed_bytes, outside = self.tables, 0, Counter[str]()
        seen = {tables.storage[item.value] for item in self.program.inputs}
        for node in self.nodes:
            for storage in {tables.storage[value]: None for value in node.named_outputs}:
                if storage not in seen and tables.offsets[storage] is None:
                    outside[node.name] += tables.storage_bytes[storage]
                elif storage not in seen:
                    placed_bytes += tables.storage_bytes[storage]
                seen.add(storage)
        share = placed_bytes / (placed_bytes + outside.total())
        most = [f"{name} {format_bytes(size)}" for name, size in outside.most_common(5) if size]
        names = ", ".join(most) if len(outside) <= 5 else f"{', '.join(most)}, and {len(outside) - 5} more"
        return (
            f"arena: {format_bytes(tables.arena_bytes)}, made once, for {share:.0%} of the bytes that operations make"
            f"{f'; allocated each time: {names}' if most else ''}"
        )
