"""The picture of a step over ranks: for each rank what computes and what its link sends, as planned and as measured.

In: a `StepOfRanks`. Out: SVG text and a table for readers without pictures. Both halves have one axis of time, so that
what took longer than planned is seen at once.
"""

from __future__ import annotations

from html import escape

from undertow.report.columns import format_us
from undertow.report.page_frames import Frame, make_figure, open_svg, svg_text
from undertow.report.page_pictures import number_ticks
from undertow.report.page_tables import table
from undertow.report.rank_times import KINDS, SENDING, RankTimes, StepOfRanks

MAX_SHOWN = 8  # ranks
ROW_HEIGHT, GAP, HEAD_HEIGHT = 17, 9, 26


def ranks_figure(step: StepOfRanks) -> str:
    """The picture with its legend, and the table."""
    shown = min(len(step.measured), MAX_SHOWN)
    height = 68 + 2 * (HEAD_HEIGHT + shown * (2 * ROW_HEIGHT + GAP))
    legend = "".join(f'<li><i class="lane-{kind}"></i>{kind}</li>' for kind in KINDS)
    heads, *rows = step.rows()
    kinds = ("", *("number",) * (len(heads) - 1))
    figure = make_figure(height, lambda frame: _draw(step, shown, frame), f'<ul class="legend">{legend}</ul>')
    return figure + table(heads, rows, kinds, is_narrow=True)


def _draw(step: StepOfRanks, shown: int, frame: Frame) -> str:
    right = max(item.end_us for rank in (*step.predicted, *step.measured) for item in rank.stretches)
    scale = (frame.end - frame.left) / max(right, 1e-9)
    parts = [open_svg(frame, "ranks", "What each rank does when, as predicted and as measured")]
    for tick in number_ticks(right / 1e3, frame.num_ticks):
        x = frame.left + tick * 1e3 * scale
        parts.append(f'<path class="grid" d="M{x:.1f} {frame.top}V{frame.floor}"/>')
        parts.append(svg_text(x, frame.floor + 20, f"{tick:g}", "tick", "middle"))
    parts.append(svg_text(frame.left - 14, frame.floor + 20, "ms", "tick", "end"))
    unit = (frame.floor - frame.top) / (2 * (HEAD_HEIGHT + shown * (2 * ROW_HEIGHT + GAP)))
    y = float(frame.top)
    for name, ranks in (("predicted", step.predicted), ("measured", step.measured)):
        parts.append(svg_text(frame.left, y + HEAD_HEIGHT * unit - 5, name, "pass", "start"))
        y += HEAD_HEIGHT * unit
        for number, rank in enumerate(ranks[:shown]):
            parts.append(svg_text(frame.left - 10, y + ROW_HEIGHT * unit + 4, f"rank {number}", "tick", "end"))
            parts.append(_draw_rank(rank, frame.left, scale, y, ROW_HEIGHT * unit))
            y += (2 * ROW_HEIGHT + GAP) * unit
    return "".join(parts) + "</svg>"


def _draw_rank(rank: RankTimes, left: int, scale: float, y: float, height: float) -> str:
    """What computes is the upper of two rows, what is sent the lower one."""
    parts = []
    for item in rank.stretches:
        row = y + height if item.kind == SENDING else y
        x, width = left + item.start_us * scale, max((item.end_us - item.start_us) * scale, 0.4)
        label = f"{item.kind} {format_us(item.end_us - item.start_us)}" + (f": {item.about}" if item.about else "")
        parts.append(
            f'<rect class="lane-{item.kind}" x="{x:.1f}" y="{row:.1f}" width="{width:.1f}" height="{height - 2:.1f}">'
            f"<title>{escape(label)}</title></rect>"
        )
    return "".join(parts)
