"""Matrix products beside each other: naive, blocked at several sizes, packed, MKL, oneDNN. Two pictures, two tables.

The contenders are interleaved and the best of all rounds is taken: that is how fast a loop can go, whatever else the
machine does. Usage: scripts/bench products [--rounds N] [--out F]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

from undertow.kernels.packed_product import multiply_packed
from undertow.kernels.product import multiply_blocked, multiply_naive

BLOCK_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
MATRIX_SIZES = (64, 128, 256, 512, 1024, 2048)
SWEPT_SIZE = 1024
# Beyond this size the naive product would only cost time.
NAIVE_LIMIT = 1024
WIDTH, HEIGHT, MARGIN = 640, 400, 56
COLOURS = {"naive": "#d95f02", "blocked": "#1b9e77", "packed": "#e7298a", "MKL": "#444444", "oneDNN": "#7570b3"}


def contenders_of(size: int) -> dict[str, Callable[[], Any]]:
    """Every way to multiply two square matrices of this size."""
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    transposed = b.t().contiguous()
    contenders: dict[str, Callable[[], Any]] = {
        "MKL": lambda: torch.mm(a, b, out=out),
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(a, transposed, None, "none", [], ""),
        "packed": lambda: multiply_packed(a, b, out),
    }
    if size <= NAIVE_LIMIT:
        contenders["naive"] = lambda: multiply_naive(a, b, out)
    for block in BLOCK_SIZES if size == SWEPT_SIZE else (64, 128, 256):
        contenders[f"blocked {block}"] = lambda block=block: multiply_blocked(a, b, block, out)  # type: ignore[misc]
    return contenders


# Products in a step of an MLP and of GPT-2: rows, terms and columns, and which factor is transposed.
STEP_SHAPES = {
    "MLP, y = x w^T": (256, 4096, 4096, "right"),
    "MLP, ct_x = ct w": (256, 4096, 4096, ""),
    "MLP, ct_w = ct^T x": (4096, 256, 4096, "left"),
    "GPT-2, ct_w = ct^T x": (3072, 1024, 768, "left"),
    "GPT-2, vocabulary, y = x w^T": (1024, 768, 50257, "right"),
    "GPT-2, vocabulary, ct_w = ct^T x": (50257, 1024, 768, "left"),
}


def contenders_of_step(rows: int, terms: int, columns: int, transposed: str) -> dict[str, Callable[[], Any]]:
    """The ways that a fast step chooses from."""
    a = torch.randn(terms, rows).t() if transposed == "left" else torch.randn(rows, terms)
    b = torch.randn(columns, terms).t() if transposed == "right" else torch.randn(terms, columns)
    out = torch.empty(rows, columns)
    return {
        "MKL": lambda: torch.mm(a, b, out=out),
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], ""),
        "packed": lambda: multiply_packed(a, b, out),
    }


def measure(contenders: dict[str, Callable[[], Any]], num_flops: int, num_rounds: int) -> dict[str, float]:
    """GFLOP/s of every contender: the best of all rounds."""
    best = dict.fromkeys(contenders, math.inf)
    for contender in contenders.values():
        contender()
    for _ in range(num_rounds):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: round(num_flops / seconds / 1e9, 2) for name, seconds in best.items()}


def draw(title: str, unit: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    """A picture of GFLOP/s over sizes that double, both axes logarithmic."""
    points = [point for line in lines.values() for point in line]
    low_x, high_x = min(math.log2(x) for x, _ in points), max(math.log2(x) for x, _ in points)
    low_y = math.floor(math.log2(min(y for _, y in points)))
    high_y = math.ceil(math.log2(max(y for _, y in points)))

    def locate(x: float, y: float) -> tuple[float, float]:
        return (
            MARGIN + (math.log2(x) - low_x) / (high_x - low_x) * (WIDTH - 2 * MARGIN),
            HEIGHT - MARGIN - (math.log2(y) - low_y) / (high_y - low_y) * (HEIGHT - 2 * MARGIN),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"',
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for x in sorted({x for x, _ in points}):
        parts.append(f'<text x="{locate(x, 1)[0]:.0f}" y="{HEIGHT - 36}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 22}" text-anchor="end">{escape(unit)}</text>')
    for power in range(low_y, high_y + 1):
        parts.append(
            f'<text x="{MARGIN - 6}" y="{locate(2**low_x, 2**power)[1]:.0f}" text-anchor="end">{2**power:g}</text>'
        )
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[name.split()[0]]
        path = " ".join("{:.1f},{:.1f}".format(*locate(*point)) for point in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for point in line:
            x, y = locate(*point)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        parts.append(f'<circle cx="{MARGIN + 100 * index}" cy="{HEIGHT - 12}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{MARGIN + 8 + 100 * index}" y="{HEIGHT - 8}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Measure, write the table, draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "products.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine(), "unit": "GFLOP/s", "sizes": {}}
    for size in MATRIX_SIZES:
        result["sizes"][size] = measure(contenders_of(size), 2 * size**3, options.rounds)
        print(size, result["sizes"][size], flush=True)
    result["in steps"] = {}
    for name, (rows, terms, columns, transposed) in STEP_SHAPES.items():
        contenders = contenders_of_step(rows, terms, columns, transposed)
        result["in steps"][name] = measure(contenders, 2 * rows * terms * columns, options.rounds)
        print(name, result["in steps"][name], flush=True)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    swept = result["sizes"][SWEPT_SIZE]
    over_blocks = {"blocked": [(float(block), swept[f"blocked {block}"]) for block in BLOCK_SIZES]}
    for name in ("naive", "packed", "MKL", "oneDNN"):
        over_blocks[name] = [(float(block), swept[name]) for block in (BLOCK_SIZES[0], BLOCK_SIZES[-1])]
    over_sizes = {
        name: [(float(size), rates[name]) for size, rates in result["sizes"].items() if name in rates]
        for name in ("naive", "blocked 128", "packed", "MKL", "oneDNN")
    }
    title = f"GFLOP/s over the block size, {SWEPT_SIZE} x {SWEPT_SIZE}"
    options.out.with_name("products-blocks.svg").write_text(draw(title, "block size", over_blocks))
    options.out.with_name("products-sizes.svg").write_text(draw("GFLOP/s over the matrix size", "size", over_sizes))


if __name__ == "__main__":
    main()
