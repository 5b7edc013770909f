"""Curves of a run over its steps as SVG, and as a table for readers without pictures.

In: numbers at steps. Out: SVG text whose colours are classes of the page's style. A curve of very many steps shows the
means of a few hundred stretches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from undertow.report.page_frames import Frame, open_svg, svg_text
from undertow.report.page_pictures import number_ticks
from undertow.report.page_tables import table

HEIGHT, LOW_HEIGHT = 320, 220
MAX_POINTS = 400
LOG_RATIO = 10.0  # the largest over the median: on a linear axis half of the points would be in the lowest tenth

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Evaluated:
    """The evaluation after an epoch: after which step, and what it found."""

    step: int
    epoch: int
    train_loss: float
    loss: float
    accuracy: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """The vertical axis: linear, or logarithmic where single points are far above the others."""

    low: float
    high: float
    is_log: bool

    def share(self, value: float) -> float:
        """How far up a value is, from 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """About five round numbers; on a logarithmic axis 1, 2 and 5 of each power of ten, or the powers alone."""
        if not self.is_log:
            return number_ticks(self.high, 5, self.low)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        factors = (1, 2, 5) if len(powers) <= 3 else (1, 3) if len(powers) <= 4 else (1,)
        found = [factor * 10.0**power for power in powers for factor in factors]
        return [tick for tick in found if self.low <= tick <= self.high]


def find_axis(values: Sequence[float], is_from_zero: bool = False) -> Axis:
    """An axis on which every value is drawn where it is; from zero, heights are in proportion unless it is logarithmic.

    Values on an axis from zero are not negative.
    """
    low, high = min(values), max(values)
    if low > 0 and high > LOG_RATIO * statistics.median(values):
        margin = (high / low) ** 0.06
        return Axis(low / margin, high * margin, is_log=True)
    if is_from_zero:
        return Axis(0.0, high * 1.06 or 1.0, is_log=False)
    margin = (high - low) * 0.06 or 0.05 * max(abs(high), 1.0)
    return Axis(low - margin, high + margin, is_log=False)


def draw_run_curve(
    title: str,
    quiet: Points,
    marked: Points,
    frame: Frame,
    best_step: int | None = None,
    *,
    is_share: bool = False,
    is_from_zero: bool = False,
) -> str:
    """A thin line through `quiet`, a strong one with dots through `marked`; shares are written in percent.

    A dotted line is at `best_step`.
    """
    quiet = thin_out(quiet)
    shown = [*quiet, *marked]
    right = max(x for x, _ in shown)
    axis = find_axis([y for _, y in shown], is_from_zero)

    def to_pixels(point: tuple[float, float]) -> str:
        x = frame.left + (frame.end - frame.left) * point[0] / max(right, 1)
        return f"{x:.1f} {frame.floor - (frame.floor - frame.top) * axis.share(point[1]):.1f}"

    parts = [open_svg(frame, title.lower().replace(" ", "-"), f"{title} over steps")]
    if axis.is_log:
        parts.append(svg_text(8, frame.top - 16, f"{title.lower()}, logarithmic axis", "tick", "start"))
    for tick in axis.ticks():
        y = to_pixels((0, tick)).split()[1]
        parts.append(f'<path class="grid" d="M{frame.left} {y}H{frame.end}"/>')
        label = f"{tick:.4g}" if not is_share else f"{100 * tick:.4g} %"
        parts.append(svg_text(frame.left - 10, float(y) + 4, label, "tick", "end"))
    for tick in number_ticks(right, frame.num_ticks):
        if tick == int(tick):
            x = to_pixels((tick, axis.high)).split()[0]
            parts.append(svg_text(float(x), frame.floor + 20, f"{tick:.0f}", "tick", "middle"))
    parts.append(svg_text(frame.left - 14, frame.floor + 20, "step", "tick", "end"))
    if best_step is not None and best_step <= right:
        x = to_pixels((best_step, axis.low)).split()[0]
        parts.append(f'<path class="best" d="M{x} {frame.top}V{frame.floor}"/>')
        parts.append(svg_text(float(x), frame.top - 6, "best", "tick", "middle"))
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


def evaluation_rows(tests: Sequence[Evaluated], judging: str) -> list[tuple[str, ...]]:
    """The heads, and a row for each evaluation; `judging` is the data that epochs were judged by."""
    names = list(dict.fromkeys(name for item in tests for name in item.metrics))
    has_accuracy = any(item.accuracy is not None for item in tests)
    heads = ("epoch", "step", "training loss", f"{judging} loss", *(["accuracy"] if has_accuracy else []), *names)
    rows: list[tuple[str, ...]] = [heads]
    for item in tests:
        accuracy = "-" if item.accuracy is None else f"{item.accuracy:.2%}"
        metrics = (f"{item.metrics[name]:.4g}" if name in item.metrics else "-" for name in names)
        losses = (f"{item.train_loss:.4f}", f"{item.loss:.4f}", *([accuracy] if has_accuracy else []))
        rows.append((str(item.epoch + 1), str(item.step), *losses, *metrics))
    return rows


def evaluation_table(tests: Sequence[Evaluated], judging: str) -> str:
    """Every evaluation."""
    heads, *rows = evaluation_rows(tests, judging)
    return table(heads, rows, ("number",) * len(heads), is_narrow=True)
