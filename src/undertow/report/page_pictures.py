"""The two pictures of the page as SVG: memory over the step, and the time/memory curve.

In: numbers. Out: SVG text, drawn without any script; every text in it is escaped. Colours are classes of the page's
style, so that light and dark share one picture.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from html import escape

from undertow.ir import Plan, format_bytes
from undertow.report.columns import format_us
from undertow.report.page_bands import Band, Picture
from undertow.report.page_frames import Frame, open_svg, svg_text
from undertow.report.peak import LiveStorage

MEMORY_HEIGHT, CURVE_HEIGHT = 500, 340
HEADROOM = 1.06
LABEL_WIDTH, LABEL_HEIGHT = 100, 30  # room for a label such as "peak 41.4 MiB"
MAX_BUDGET_RATIO = 1.5  # a budget further above the peak is named but not drawn: it would flatten everything else

KNOWN_LABELS = (
    "parameters",
    "optimizer state",
    "buffers",
    "batch",
    "constants",
    "kept activations",
    "codes and states",
    "recomputed values",
    "gradients",
    "outputs",
    "temporaries",
    "workspace",
)


def color_class(label: str) -> str:
    """The class of the page's style that colours a role."""
    return f"role-{label.partition(' ')[0]}" if label in KNOWN_LABELS else "role-other"


def draw_memory(plan: Plan, picture: Picture, frame: Frame) -> str:
    """Bytes over the operations, a band for each value or role; the scale is in the attributes `data-`."""
    budget = plan.budget_bytes
    is_budget_drawn = budget is not None and budget <= plan.peak_bytes * MAX_BUDGET_RATIO
    top_bytes = max(plan.peak_bytes, budget if budget is not None and is_budget_drawn else 0, 1) * HEADROOM
    step = (frame.end - frame.left) / max(len(picture.columns), 1)
    scale = (frame.floor - frame.top) / top_bytes
    data = (
        f' tabindex="0" data-left="{frame.left}" data-step="{step:.6f}" data-floor="{frame.floor}" '
        f'data-scale="{scale:.12g}"'
    )
    title = f"Bytes alive during each of {len(plan.nodes)} operations; peak {format_bytes(plan.peak_bytes)}"
    parts = [open_svg(frame, "memory", title, data)]
    parts += _byte_axis(top_bytes, frame, scale)
    parts += _draw_bands(picture, frame, step, scale)
    parts += _operation_axis(picture, frame, step)
    column = picture.columns.index(plan.live_bytes.index(plan.peak_bytes)) if plan.live_bytes else 0
    peak = frame.left + (column + 0.5) * step, frame.floor - plan.peak_bytes * scale
    budget_y = frame.floor - budget * scale if budget is not None and is_budget_drawn else -math.inf
    if budget is not None and is_budget_drawn:
        # On the side where the label of the peak is not.
        x, anchor = (frame.end - 8, "end") if peak[0] < (frame.left + frame.end) / 2 else (frame.left + 8, "start")
        parts.append(f'<path class="budget" d="M{frame.left} {budget_y:.1f}H{frame.end}"/>')
        parts.append(svg_text(x, budget_y - 6, f"budget {format_bytes(budget)}", "budget-label", anchor))
    if plan.live_bytes:
        is_below = abs(peak[1] - budget_y) < LABEL_HEIGHT
        parts += _mark_peak(peak, f"peak {format_bytes(plan.peak_bytes)}", frame, is_below)
    parts.append(f'<path class="cursor" d="M0 {frame.top}V{frame.floor}" visibility="hidden"/></svg>')
    return "".join(parts)


def _draw_bands(picture: Picture, frame: Frame, step: float, scale: float) -> Iterator[str]:
    below = [0] * max(len(picture.columns), 1)
    for number, band in enumerate(picture.bands):
        above = [low + size for low, size in zip(below, band.sizes, strict=False)]
        outline = "".join(
            _outline(start, above[start:end], below[start:end], step, scale, frame)
            for start, end in _stretches(band.sizes)
        )
        # Neighbours of one colour differ in shade.
        shade = " shaded" if number % 2 else ""
        # Titles show when a mouse rests on a band, and nobody moves a mouse on a telephone.
        title = f"<title>{escape(_band_title(band))}</title>" if frame.kind == "wide" else ""
        yield f'<path class="band {color_class(band.label)}{shade}" d="{outline}">{title}</path>'
        below = above or below


def _stretches(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches of columns at which there is something."""
    start = None
    for column, size in enumerate((*sizes, 0)):
        if size and start is None:
            start = column
        elif not size and start is not None:
            yield start, column
            start = None


def _outline(start: int, above: Sequence[int], below: Sequence[int], step: float, scale: float, frame: Frame) -> str:
    """The upper edge from left to right, then the lower one back; a corner only where a height changes."""

    def x(column: int) -> str:
        return f"{frame.left + (start + column) * step:.1f}".removesuffix(".0")

    def y(size: int) -> str:
        return f"{frame.floor - size * scale:.1f}".removesuffix(".0")

    count = len(above)
    path = [f"M{x(0)} {y(above[0])}"]
    path += [f"H{x(i)}V{y(above[i])}" for i in range(1, count) if above[i] != above[i - 1]]
    path.append(f"H{x(count)}V{y(below[-1])}")
    path += [f"H{x(i)}V{y(below[i - 1])}" for i in range(count - 1, 0, -1) if below[i] != below[i - 1]]
    return "".join(path) + f"H{x(0)}Z"


def _band_title(band: Band) -> str:
    if band.value is None:
        return f"{band.label}{band.where and f' of {band.where}'}, at most {format_bytes(max(band.sizes, default=0))}"
    return describe_storage(band.value)


def describe_storage(item: LiveStorage) -> str:
    """One value in a line."""
    where = "  ".join(part for part in (item.made_by.layer, item.made_by.location) if part)
    return f"%{item.value} {format_bytes(item.num_bytes)} {where}: {item.why}"


def _byte_axis(top_bytes: float, frame: Frame, scale: float) -> Iterator[str]:
    for tick, label in byte_ticks(top_bytes):
        y = frame.floor - tick * scale
        yield f'<path class="grid" d="M{frame.left} {y:.1f}H{frame.end}"/>'
        yield svg_text(frame.left - 10, y + 4, label, "tick", "end")


def _operation_axis(picture: Picture, frame: Frame, step: float) -> Iterator[str]:
    end = frame.left + len(picture.columns) * step
    middle = frame.left + picture.boundary * step
    has_backward = picture.boundary < len(picture.columns)
    for tick in number_ticks(picture.columns[-1], frame.num_ticks) if picture.columns else ():
        if tick == int(tick):
            x = frame.left + (bisect_left(picture.columns, tick) + 0.5) * step
            yield svg_text(x, frame.floor + 20, str(int(tick)), "tick", "middle")
    yield svg_text(frame.left - 10, frame.floor + 20, "operation", "tick", "end")
    if picture.boundary:
        yield svg_text((frame.left + middle) / 2, frame.top - 14, "forward", "pass", "middle")
    if has_backward:
        yield svg_text((middle + end) / 2, frame.top - 14, "backward", "pass", "middle")
        yield f'<path class="boundary" d="M{middle:.1f} {frame.top - 24}V{frame.floor}"/>'


def _mark_peak(at: tuple[float, float], label: str, frame: Frame, is_below: bool) -> Iterator[str]:
    x, y = at
    yield f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    anchor, dx = _beside(x, frame)
    yield svg_text(x + dx, y + (18 if is_below else -7), label, "peak-label", anchor)


def _beside(x: float, frame: Frame) -> tuple[str, int]:
    """Where a label beside a point has room: its anchor, and how far from the point it is."""
    return ("end", -11) if x + LABEL_WIDTH > frame.end else ("start", 11)


def draw_curve(
    curve: Sequence[tuple[float, float]], plan: Plan, measured: tuple[float, float] | None, frame: Frame
) -> str:
    """Time of a step over its peak memory; `curve` and `measured` are (peak bytes, step microseconds).

    The axis of time starts at zero: heights are in the proportion of the times.
    """
    here = (float(plan.peak_bytes), plan.step_us)
    points = sorted((float(size), float(duration)) for size, duration in curve)
    shown = [*points, here, *([measured] if measured is not None else [])]
    left_bytes, right_bytes = _widen(min(p[0] for p in shown), max(p[0] for p in shown))
    high_us = max(p[1] for p in shown) * HEADROOM or 1.0
    floor = frame.floor - 12

    def to_pixels(point: tuple[float, float]) -> tuple[float, float]:
        x = frame.left + (frame.end - frame.left) * (point[0] - left_bytes) / (right_bytes - left_bytes)
        return x, floor - (floor - frame.top) * point[1] / high_us

    parts = [open_svg(frame, "curve", f"Time of a step over its peak memory, {len(points)} plans")]
    for tick in number_ticks(high_us, 5):
        y = to_pixels((left_bytes, tick))[1]
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{frame.end}"/>')
        parts.append(svg_text(frame.left - 10, y + 4, format_us(tick) if tick else "0", "tick", "end"))
    for tick, label in byte_ticks(right_bytes, left_bytes, frame.num_ticks - 2):
        x = to_pixels((tick, 0))[0]
        parts.append(f'<path class="grid" d="M{x:.1f} {frame.top}V{floor}"/>')
        parts.append(svg_text(x, floor + 20, label, "tick", "middle"))
    if plan.budget_bytes is not None and left_bytes <= plan.budget_bytes <= right_bytes:
        x = to_pixels((plan.budget_bytes, 0))[0]
        parts.append(f'<path class="budget" d="M{x:.1f} {frame.top}V{floor}"/>')
        anchor, dx = _beside(x, frame)
        parts.append(svg_text(x + dx, floor - 8, "budget", "budget-label", anchor))
    parts.append(svg_text(8, frame.top - 14, "time of a step", "tick", "start"))
    parts.append(svg_text(frame.end, floor + 38, "peak memory", "tick", "end"))
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(to_pixels, points))
    parts.append(f'<path class="line" d="M{line}"/>' if len(points) > 1 else "")
    parts += [_dot(to_pixels(point), point, "point", "", frame, 0) for point in points]
    # The label of the upper point is above it, that of the lower one below: they would meet between the points.
    is_above = measured is not None and measured[1] > here[1]
    if measured is not None:
        parts.append(_dot(to_pixels(measured), measured, "measured", "measured", frame, -11 if is_above else 20))
    parts.append(_dot(to_pixels(here), here, "here", "this plan", frame, 20 if is_above else -11))
    return "".join(parts) + "</svg>"


def _dot(at: tuple[float, float], point: tuple[float, float], kind: str, label: str, frame: Frame, dy: int) -> str:
    title = escape(f"{label + ': ' if label else ''}{format_bytes(point[0])}, {format_us(point[1])}")
    radius = 3.5 if kind == "point" else 6
    dot = f'<circle class="{kind}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius}"><title>{title}</title></circle>'
    anchor, dx = _beside(at[0], frame)
    return dot + (svg_text(at[0] + dx, at[1] + dy, label, "peak-label", anchor) if label else "")


def _widen(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.08 or max(high, 1.0) * 0.1
    return max(low - margin, 0.0), high + margin


def byte_ticks(high: float, low: float = 0.0, count: int = 6) -> list[tuple[float, str]]:
    """Round numbers of the binary unit that suits `high`, and how they are written."""
    power = min(max(int(math.log(max(high, 1), 1024)), 0), 3)
    unit, name = 1024.0**power, ("B", "KiB", "MiB", "GiB")[power]
    return [(tick * unit, f"{round(tick, 6):g} {name}") for tick in number_ticks(high / unit, count, low / unit)]


def number_ticks(high: float, count: int, low: float = 0.0) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    rough = (high - low) / max(count, 1)
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
