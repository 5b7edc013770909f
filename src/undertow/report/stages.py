"""The report of a model that is divided by stages: the cut, the schedule, the links, and each rank's memory.

In: what was planned, as numbers and lists. Out: text for the terminal, plain data, and one page with a picture of the
schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from undertow.ir import format_bytes
from undertow.report.columns import align, format_us, wrap
from undertow.report.page import document, section
from undertow.report.page_tables import table
from undertow.stages.schedules import Pass, Schedule
from undertow.stages.timing import StageTimes, Timing, idle_by_formula

ROW_HEIGHT, WIDTH = 26, 960
STYLE = """
.pieces rect{stroke:var(--paper,#fff);stroke-width:.5}.pieces .F{fill:#4a7fb5}.pieces .B{fill:#c47a3d}
.pieces .W{fill:#7d9b58}.pieces text{font:12px sans-serif;fill:currentColor}.pieces{width:100%;height:auto}
"""


@dataclass(frozen=True)
class StageRow:
    """One stage: where it begins, what it takes for a shard, and what it holds of the model."""

    begins_at: str
    num_operations: int
    times: StageTimes
    parameter_bytes: int

    @property
    def total_ns(self) -> int:
        """Forward and backward pass of a shard."""
        return self.times.forward_ns + self.times.backward_ns + self.times.weight_ns


@dataclass(frozen=True)
class LinkRow:
    """What one stage sends another for each shard."""

    source: int
    target: int
    num_values: int
    num_bytes: int


@dataclass(frozen=True)
class StagesReport:
    """`held` has for each rank what its peak consists of, in bytes."""

    title: str
    schedule: Schedule
    timing: Timing
    bound: str
    stages: Sequence[StageRow]
    links: Sequence[LinkRow]
    held: Sequence[Mapping[str, int]]
    peak_bytes: Sequence[int]
    budget_bytes: int | None
    is_recomputed: Sequence[bool]
    num_rows: int

    @property
    def idle_by_formula(self) -> float:
        """The share of time that ranks wait where all stages take equal times."""
        schedule = self.schedule
        stages_a_rank = schedule.num_stages // schedule.num_ranks
        return idle_by_formula(schedule.name, schedule.num_ranks, schedule.num_shards, stages_a_rank=stages_a_rank)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "schedule": self.schedule.name,
            "shards": self.schedule.num_shards,
            "rows": self.num_rows,
            "step_us": self.timing.step_ns / 1e3,
            "idle_share": self.timing.idle_share,
            "idle_share_by_formula": self.idle_by_formula,
            "bound_by": self.bound,
            "stages": [
                {
                    "rank": self.schedule.rank_of(stage),
                    "begins_at": row.begins_at,
                    "operations": row.num_operations,
                    "forward_us": row.times.forward_ns / 1e3,
                    "backward_us": (row.times.backward_ns + row.times.weight_ns) / 1e3,
                    "parameter_bytes": row.parameter_bytes,
                }
                for stage, row in enumerate(self.stages)
            ],
            "links": [vars(row) for row in self.links],
            "ranks": [
                {"peak_bytes": peak, "held": dict(held), "recomputes": again}
                for peak, held, again in zip(self.peak_bytes, self.held, self.is_recomputed, strict=True)
            ],
            "budget_bytes": self.budget_bytes,
            "pieces": [[str(piece) for piece in pieces] for pieces in self.schedule.ranks],
        }

    def __str__(self) -> str:
        total = sum(row.total_ns for row in self.stages)
        rows = [("stage", "rank", "begins at", "forward", "backward", "share")]
        for stage, row in enumerate(self.stages):
            backward_us = (row.times.backward_ns + row.times.weight_ns) / 1e3
            times = format_us(row.times.forward_ns / 1e3), format_us(backward_us)
            share = f"{row.total_ns / max(1, total):.0%}"
            rows.append((str(stage), str(self.schedule.rank_of(stage)), row.begins_at, *times, share))
        links = [("from", "to", "values", "for each shard")]
        links += [
            (str(item.source), str(item.target), str(item.num_values), format_bytes(item.num_bytes))
            for item in self.links
        ]
        ranks: list[tuple[str, ...]] = [("rank", "peak", "parameters", "in flight", "recomputes")]
        for rank, held in enumerate(self.held):
            parts = (held.get(name, 0) for name in ("parameters", "other shards in flight"))
            again = "yes" if self.is_recomputed[rank] else "no"
            ranks.append((str(rank), format_bytes(self.peak_bytes[rank]), *map(format_bytes, parts), again))
        budget = "" if self.budget_bytes is None else f", each rank within {format_bytes(self.budget_bytes)}"
        return "\n\n".join(
            [
                wrap(self.title),
                align(rows, ">><>>>"),
                align(links, ">>>>"),
                align(ranks, ">>>><"),
                wrap(
                    f"{self.schedule.name}: {self.schedule.num_shards} shards a row in "
                    f"{format_us(self.timing.step_ns / 1e3)}; ranks wait {self.timing.idle_share:.0%} of the time, and "
                    f"{self.idle_by_formula:.0%} if all stages took as long"
                ),
                wrap(f"{self.bound}{budget}"),
            ]
        )

    def to_html(self) -> str:
        """One page that needs nothing else."""
        total = sum(row.total_ns for row in self.stages)
        stages = [
            (
                str(stage),
                str(self.schedule.rank_of(stage)),
                row.begins_at,
                format_us(row.times.forward_ns / 1e3),
                format_us((row.times.backward_ns + row.times.weight_ns) / 1e3),
                f"{row.total_ns / max(1, total):.0%}",
            )
            for stage, row in enumerate(self.stages)
        ]
        kinds = ("number", "number", "", "number", "number", "number")
        links = [
            (str(item.source), str(item.target), str(item.num_values), format_bytes(item.num_bytes))
            for item in self.links
        ]
        names = list(dict.fromkeys(name for held in self.held for name in held))
        memory = [(name, *(format_bytes(held[name]) if name in held else "-" for held in self.held)) for name in names]
        peaks = ("peak", *map(format_bytes, self.peak_bytes))
        heads = ("held", *(f"rank {rank}" for rank in range(len(self.held))))
        body = [
            f"<h1>{escape(self.title)}</h1><p>{escape(self.bound)}</p>",
            section("The cut", table(("stage", "rank", "begins at", "forward", "backward", "share"), stages, kinds)),
            section("The schedule", self._summary(), self._picture()),
            section("The links", table(("from", "to", "values", "for each shard"), links, ("number",) * 4)),
            section("The memory of each rank", table(heads, memory, ("", *("number",) * len(self.held)), peaks)),
        ]
        return document(self.title, "".join(body), style=STYLE)

    def _summary(self) -> str:
        return (
            f"<p>{escape(self.schedule.name)}: {self.schedule.num_shards} shards a row in "
            f"{format_us(self.timing.step_ns / 1e3)}; ranks wait {self.timing.idle_share:.1%} of the time, and "
            f"{self.idle_by_formula:.1%} if all stages took as long. Forward pieces are blue, backward pieces orange, "
            f"weights' halves green.</p>"
        )

    def _picture(self) -> str:
        """Who runs what when."""
        scale = WIDTH / max(1, self.timing.step_ns)
        height = ROW_HEIGHT * self.schedule.num_ranks
        parts = [
            f'<svg class="pieces" viewBox="-60 0 {WIDTH + 60} {height}" role="img" '
            f'aria-label="the schedule: a row for each rank, time from left to right">'
        ]
        for rank, pieces in enumerate(self.schedule.ranks):
            top = rank * ROW_HEIGHT
            parts.append(f'<text x="-56" y="{top + 17}">rank {rank}</text>')
            for piece in pieces:
                start, end = self.timing.stretches[piece]
                what = {Pass.FORWARD: "forward", Pass.BACKWARD: "backward", Pass.WEIGHT: "weights"}[piece.which]
                parts.append(
                    f'<rect class="{piece.which.value}" x="{start * scale:.2f}" y="{top + 2}" '
                    f'width="{max((end - start) * scale, 0.5):.2f}" height="{ROW_HEIGHT - 4}">'
                    f"<title>stage {piece.stage}, shard {piece.shard}, {what}</title></rect>"
                )
        return "".join([*parts, "</svg>"])
