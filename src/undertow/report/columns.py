"""Text for the terminal in plain characters: aligned columns, lines of at most 100 characters, sizes, times, bars."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from undertow.ir import format_bytes

MAX_COLUMNS = 100
BAR_COLUMNS = 10


def align(rows: Sequence[tuple[str, ...]], alignments: str) -> str:
    """Columns two blanks apart; the last takes what is left of the line."""
    num_columns = len(alignments)
    padded = [row + ("",) * (num_columns - len(row)) for row in rows]
    widths = [max(len(row[column]) for row in padded) for column in range(num_columns)]
    lines = []
    for row in padded:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, alignments, widths, strict=True)]
        lines.append(cut("  ".join(cells).rstrip(), MAX_COLUMNS))
    return "\n".join(lines)


def wrap(text: str, indent: str = "") -> str:
    """A sentence over as many lines as it needs; what follows the first is indented further."""
    return textwrap.fill(
        text, MAX_COLUMNS, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


def bar(size: int, largest: int) -> str:
    """A bar as long as the size in proportion; any size above 0 shows."""
    return "#" * max(round(BAR_COLUMNS * size / largest), 1) if size else ""


def size_or_dash(num_bytes: int) -> str:
    """Bytes as a person reads them; 0 is a dash."""
    return format_bytes(num_bytes) if num_bytes else "-"


def format_us(duration_us: float) -> str:
    """A time given in microseconds: `17.2 ms`."""
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if duration_us >= factor:
            return f"{duration_us / factor:.{2 if unit == 's' else 1}f} {unit}"
    return f"{duration_us:.1f} us" if duration_us else "0 us"


def cut(line: str, num_columns: int) -> str:
    """The line, its end left out if it is too long."""
    return line if len(line) <= num_columns else line[: num_columns - 2] + ".."


def cut_middle(text: str, num_columns: int) -> str:
    """The text, its middle left out if it is too long."""
    if len(text) <= num_columns:
        return text
    head = num_columns // 2 - 1
    return f"{text[:head]}..{text[len(text) - (num_columns - head - 2) :]}"
