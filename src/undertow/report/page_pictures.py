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
from undertow.report.peak import LiveStorage

WIDTH, HEIGHT = 1120, 500
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 34, 34
CURVE_HEIGHT = 340
HEADROOM = 1.06
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


def draw_memory(plan: Plan, picture: Picture) -> str:
    """Bytes over the operations, a band for each value or role; the scale is in the attributes `data-`."""
    budget = plan.budget_bytes
    is_budget_drawn = budget is not None and budget <= plan.peak_bytes * MAX_BUDGET_RATIO
    top_bytes = max(plan.peak_bytes, budget if budget is not None and is_budget_drawn else 0, 1) * HEADROOM
    num_columns = max(len(picture.columns), 1)
    step = (WIDTH - LEFT - RIGHT) / num_columns
    scale = (HEIGHT - TOP - BOTTOM) / top_bytes
    floor = HEIGHT - BOTTOM
    parts = [
        f'<svg id="memory" viewBox="0 0 {WIDTH} {HEIGHT}" tabindex="0" role="img" aria-labelledby="memory-title" '
        f'data-left="{LEFT}" data-step="{step:.6f}" data-floor="{floor}" data-scale="{scale:.12g}">'
        f'<title id="memory-title">Bytes alive during each of {len(plan.nodes)} operations; peak '
        f"{format_bytes(plan.peak_bytes)}</title>"
    ]
    parts += _byte_axis(top_bytes, floor, scale)
    parts += _draw_bands(picture.bands, num_columns, step, scale, floor)
    parts += _operation_axis(picture, floor, step)
    if is_budget_drawn and budget is not None:
        y = floor - budget * scale
        parts.append(f'<path class="budget" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(svg_text(LEFT + 8, y - 6, f"budget {format_bytes(budget)}", "budget-label", "start"))
    if plan.live_bytes:
        column = picture.columns.index(plan.live_bytes.index(plan.peak_bytes))
        parts += _mark_peak(LEFT + (column + 0.5) * step, floor - plan.peak_bytes * scale, plan.peak_bytes)
    parts.append(f'<path id="cursor" class="cursor" d="M0 {TOP}V{floor}" visibility="hidden"/></svg>')
    return "".join(parts)


def _draw_bands(bands: Sequence[Band], num_columns: int, step: float, scale: float, floor: float) -> Iterator[str]:
    below = [0] * num_columns
    for number, band in enumerate(bands):
        above = [low + size for low, size in zip(below, band.sizes, strict=False)]
        outline = "".join(
            _outline(start, above[start:end], below[start:end], step, scale, floor)
            for start, end in _stretches(band.sizes)
        )
        # Neighbours of one colour differ in shade.
        shade = " shaded" if number % 2 else ""
        yield (
            f'<path class="band {color_class(band.label)}{shade}" d="{outline}">'
            f"<title>{escape(_band_title(band))}</title></path>"
        )
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


def _outline(start: int, above: Sequence[int], below: Sequence[int], step: float, scale: float, floor: float) -> str:
    """The upper edge from left to right, then the lower one back; a corner only where a height changes."""

    def x(column: int) -> str:
        return f"{LEFT + (start + column) * step:.1f}".removesuffix(".0")

    def y(size: int) -> str:
        return f"{floor - size * scale:.1f}".removesuffix(".0")

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


def _byte_axis(top_bytes: float, floor: float, scale: float) -> Iterator[str]:
    for tick, label in byte_ticks(top_bytes):
        y = floor - tick * scale
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield svg_text(LEFT - 10, y + 4, label, "tick", "end")


def _operation_axis(picture: Picture, floor: float, step: float) -> Iterator[str]:
    end = LEFT + len(picture.columns) * step
    middle = LEFT + picture.boundary * step
    has_backward = picture.boundary < len(picture.columns)
    for tick in number_ticks(picture.columns[-1], 8) if picture.columns else ():
        if tick == int(tick):
            x = LEFT + (bisect_left(picture.columns, tick) + 0.5) * step
            yield svg_text(x, floor + 20, str(int(tick)), "tick", "middle")
    yield svg_text(LEFT - 10, floor + 20, "operation", "tick", "end")
    if picture.boundary:
        yield svg_text((LEFT + middle) / 2, TOP - 14, "forward", "pass", "middle")
    if has_backward:
        yield svg_text((middle + end) / 2, TOP - 14, "backward", "pass", "middle")
        yield f'<path class="boundary" d="M{middle:.1f} {TOP - 24}V{floor}"/>'


def _mark_peak(x: float, y: float, peak_bytes: int) -> Iterator[str]:
    yield f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    is_right = x > WIDTH * 0.8
    anchor, dx = ("end", -9) if is_right else ("start", 9)
    yield svg_text(x + dx, y - 7, f"peak {format_bytes(peak_bytes)}", "peak-label", anchor)


def draw_curve(
    curve: Sequence[tuple[float, float]],
    plan: Plan,
    measured: tuple[float, float] | None,
) -> str:
    """Time of a step over its peak memory; `curve` and `measured` are (peak bytes, step microseconds)."""
    here = (float(plan.peak_bytes), plan.step_us)
    points = sorted((float(size), float(duration)) for size, duration in curve)
    shown = [*points, here, *([measured] if measured is not None else [])]
    left_bytes, right_bytes = _widen(min(p[0] for p in shown), max(p[0] for p in shown))
    low_us, high_us = _widen(min(p[1] for p in shown), max(p[1] for p in shown))
    floor = CURVE_HEIGHT - BOTTOM - 12

    def to_pixels(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (point[0] - left_bytes) / (right_bytes - left_bytes)
        return x, floor - (floor - TOP) * (point[1] - low_us) / (high_us - low_us)

    parts = [
        f'<svg id="curve" viewBox="0 0 {WIDTH} {CURVE_HEIGHT}" role="img" aria-labelledby="curve-title">'
        f'<title id="curve-title">Time of a step over its peak memory, {len(points)} plans</title>'
    ]
    for tick in number_ticks(high_us, 5, low_us):
        y = to_pixels((left_bytes, tick))[1]
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(svg_text(LEFT - 10, y + 4, format_us(tick), "tick", "end"))
    for tick, label in byte_ticks(right_bytes, left_bytes):
        x = to_pixels((tick, low_us))[0]
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{floor}"/>')
        parts.append(svg_text(x, floor + 20, label, "tick", "middle"))
    if plan.budget_bytes is not None and left_bytes <= plan.budget_bytes <= right_bytes:
        x = to_pixels((plan.budget_bytes, low_us))[0]
        parts.append(f'<path class="budget" d="M{x:.1f} {TOP}V{floor}"/>')
        parts.append(svg_text(x + 6, TOP + 12, "budget", "budget-label", "start"))
    parts.append(svg_text(LEFT - 10, TOP - 14, "time of a step", "tick", "start"))
    parts.append(svg_text(WIDTH - RIGHT, floor + 38, "peak memory", "tick", "end"))
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(to_pixels, points))
    parts.append(f'<path class="line" d="M{line}"/>' if len(points) > 1 else "")
    parts += [_dot(to_pixels(point), point, "point", "") for point in points]
    if measured is not None:
        parts.append(_dot(to_pixels(measured), measured, "measured", "measured"))
    parts.append(_dot(to_pixels(here), here, "here", "this plan"))
    return "".join(parts) + "</svg>"


def _dot(at: tuple[float, float], point: tuple[float, float], kind: str, label: str) -> str:
    title = escape(f"{label + ': ' if label else ''}{format_bytes(point[0])}, {format_us(point[1])}")
    radius = 3.5 if kind == "point" else 6
    dot = f'<circle class="{kind}" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius}"><title>{title}</title></circle>'
    is_right = at[0] > WIDTH * 0.85
    anchor, dx = ("end", -11) if is_right else ("start", 11)
    dy = 16 if kind == "measured" else -9
    return dot + (svg_text(at[0] + dx, at[1] + dy, label, "peak-label", anchor) if label else "")


def _widen(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.08 or max(high, 1.0) * 0.1
    return max(low - margin, 0.0), high + margin


def byte_ticks(high: float, low: float = 0.0) -> list[tuple[float, str]]:
    """Round numbers of the binary unit that suits `high`, and how they are written."""
    power = min(max(int(math.log(max(high, 1), 1024)), 0), 3)
    unit, name = 1024.0**power, ("B", "KiB", "MiB", "GiB")[power]
    return [(tick * unit, f"{round(tick, 6):g} {name}") for tick in number_ticks(high / unit, 6, low / unit)]


def number_ticks(high: float, count: int, low: float = 0.0) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    rough = (high - low) / max(count, 1)
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def svg_text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    """A piece of text in a picture, escaped."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
