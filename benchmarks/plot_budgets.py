"""Pictures of benchmarks/results/budgets.json: step time over peak memory, one SVG per model, peers and Undertow.

Usage: scripts/bench plot_budgets
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results")
WIDTH, HEIGHT, MARGIN = 640, 400, 56
OWN = ("undertow", "undertow fast")
COLOURS = {
    "undertow": "#1b9e77", "undertow fast": "#e6ab02", "eager": "#444444", "checkpoint": "#d95f02",
    "selective": "#e7298a", "compile": "#7570b3",
}  # fmt: skip


def _label(row: dict[str, Any]) -> str:
    """The name of a row in the legend."""
    return next(label for label in reversed(COLOURS) if row["name"].startswith(label))


def draw(model: str, rows: list[dict[str, Any]]) -> str:
    """One picture."""
    peaks, times = [row["peak_mib"] for row in rows], [row["median_s"] for row in rows]
    low_x, high_x, low_y, high_y = min(peaks) * 0.97, max(peaks) * 1.03, min(times) * 0.95, max(times) * 1.05

    def x(peak: float) -> float:
        return MARGIN + (peak - low_x) / (high_x - low_x) * (WIDTH - 2 * MARGIN)

    def y(seconds: float) -> float:
        return HEIGHT - MARGIN - (seconds - low_y) / (high_y - low_y) * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"',
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">{escape(model)}: step time over measured peak</text>',
    ]
    for share in range(5):
        peak, seconds = low_x + (high_x - low_x) * share / 4, low_y + (high_y - low_y) * share / 4
        parts.append(f'<text x="{x(peak):.0f}" y="{HEIGHT - 32}" text-anchor="middle">{peak:.0f} MiB</text>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y(seconds):.0f}" text-anchor="end">{seconds:.2f} s</text>')
    for label in OWN:
        own = sorted((row["peak_mib"], row["median_s"]) for row in rows if _label(row) == label)
        points = " ".join(f"{x(peak):.1f},{y(seconds):.1f}" for peak, seconds in own)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[label]}" stroke-width="1.5"/>')
    for row in rows:
        colour = COLOURS[_label(row)]
        centre = f'cx="{x(row["peak_mib"]):.1f}" cy="{y(row["median_s"]):.1f}"'
        parts.append(f'<circle {centre} r="4" fill="{colour}"><title>{escape(row["name"])}</title></circle>')
    for index, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<circle cx="{MARGIN + 95 * index}" cy="{HEIGHT - 12}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{MARGIN + 8 + 95 * index}" y="{HEIGHT - 8}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Draw every model of the results."""
    results = json.loads((RESULTS / "budgets.json").read_text())
    for model, result in results["models"].items():
        (RESULTS / f"budgets-{model}.svg").write_text(draw(model, result["contenders"]))


if __name__ == "__main__":
    main()
