"""Curves of a run over its steps as SVG, and as a table for readers without pictures.

In: numbers at steps. Out: SVG text whose colours are classes of the page's style. A curve of very many steps shows the
means of a few hundred stretches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undertow.report.page_pictures import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    number_ticks,
    svg_text,
)
from undertow.report.page_tables import table

HEIGHT = 320
MAX_POINTS = 400
MAX_RATIO = 1.5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Evaluated:
    """An evaluation: after which step, and what it found."""

    step: int
    epoch: int
    train_loss: float
    loss: float
    accuracy: float | None


def draw_run_curve(title: str, quiet: Points, marked: Points, is_share: bool = False) -> str:
    """A thin line through `quiet`, a strong one with dots through `marked`; shares are written in percent."""
    quiet = thin_out(quiet)
    shown = [*quiet, *marked]
    right = max(x for x, _ in shown)
    low, high = min(y for _, y in shown), max(y for _, y in shown)
    if quiet:
        # A first evaluation far off would flatten all else. Such points are drawn at the upper edge, with their number.
        high = min(high, MAX_RATIO * max(y for _, y in quiet))
    margin = (high - low) * 0.06 or 0.05 * max(abs(high), 1.0)
    low, high = low - margin, high + margin
    floor = HEIGHT - BOTTOM

    def to_pixels(point: tuple[float, float]) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / max(right, 1)
        return f"{x:.1f} {floor - (floor - TOP) * (min(point[1], high) - low) / (high - low):.1f}"

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{title} over steps</title>']
    for tick in number_ticks(high, 5, low):
        y = to_pixels((0, tick)).split()[1]
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        label = f"{tick:.4g}" if not is_share else f"{100 * tick:.4g} %"
        parts.append(svg_text(LEFT - 10, float(y) + 4, label, "tick", "end"))
    for tick in number_ticks(right, 8):
        if tick == int(tick):
            parts.append(
                svg_text(float(to_pixels((tick, low)).split()[0]), floor + 20, f"{tick:.0f}", "tick", "middle")
            )
    parts.append(svg_text(LEFT - 10, floor + 20, "step", "tick", "end"))
    for points, kind in ((quiet, "quiet-line"), (marked, "test-line")):
        if len(points) > 1:
            parts.append(f'<path class="{kind}" d="M{"L".join(map(to_pixels, points))}"/>')
    for point in marked:
        x, y = to_pixels(point).split()
        label = f"step {point[0]:.0f}: " + (f"{point[1]:.2%}" if is_share else f"{point[1]:.4f}")
        parts.append(f'<circle class="test-point" cx="{x}" cy="{y}" r="4"><title>{label}</title></circle>')
    return "".join(parts) + "</svg>"


def thin_out(points: Points) -> list[tuple[float, float]]:
    """The means of at most `MAX_POINTS` stretches of equal length."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = -(-len(points) // MAX_POINTS)
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        found.append((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    return found


def evaluation_table(tests: Sequence[Evaluated]) -> str:
    """Every evaluation."""
    rows = [
        (
            str(item.epoch + 1),
            str(item.step),
            f"{item.train_loss:.4f}",
            f"{item.loss:.4f}",
            "-" if item.accuracy is None else f"{item.accuracy:.2%}",
        )
        for item in tests
    ]
    heads = ("epoch", "step", "training loss", "test loss", "test accuracy")
    return table(heads, rows, ("number",) * 5, is_narrow=True)
