"""Text for the terminal in plain characters: aligned columns, lines that fit, sizes, times, bars.

A line has at most 80 characters, and fewer in a narrower terminal. A table that does not fit loses the middle of its
first column; one that would lose too much becomes a list, row by row.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from undertow.ir import format_bytes

MAX_COLUMNS = 80
MIN_COLUMNS = 40  # of a terminal that is narrower, lines wrap
MIN_NAME_COLUMNS = 14
BAR_COLUMNS = 10


def line_columns() -> int:
    """How many characters a line may have."""
    found = shutil.get_terminal_size((MAX_COLUMNS, 24)).columns
    return max(min(found, MAX_COLUMNS), MIN_COLUMNS)


def align(rows: Sequence[tuple[str, ...]], alignments: str) -> str:
    """Columns two blanks apart. The first row has the heads, where there are more than three columns."""
    num_columns = len(alignments)
    padded = [row + ("",) * (num_columns - len(row)) for row in rows]
    widths = [max(len(row[column]) for row in padded) for column in range(num_columns)]
    excess = sum(widths) + 2 * (num_columns - 1) - line_columns()
    # The last column, if it is text, is cut at the end; what it loses is the least important.
    if excess > 0 and alignments[-1] == "<" and num_columns > 1:
        given = min(excess, widths[-1])
        widths[-1] -= given
        excess -= given
    if excess > 0 and widths[0] - excess < min(MIN_NAME_COLUMNS, widths[0]):
        return _stack(padded)
    widths[0] -= max(excess, 0)
    lines = []
    for row in padded:
        shown = (cut_middle(row[0], widths[0]), *row[1:-1], cut(row[-1], widths[-1])) if num_columns > 1 else row
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(shown, alignments, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _stack(rows: Sequence[tuple[str, ...]]) -> str:
    """Each row as a list of what its columns say; what says nothing is left out."""
    heads, *rest = rows
    lines = [cut(heads[0], line_columns())]
    for row in rest:
        lines.append(cut_middle(row[0], line_columns()))
        said = [(head, cell) for head, cell in zip(heads[1:], row[1:], strict=True) if cell not in ("", "-")]
        lines += [cut(f"  {head}: {cell}" if head else f"  {cell}", line_columns()) for head, cell in said]
    return "\n".join(lines)


def wrap(text: str, indent: str = "") -> str:
    """A sentence over as many lines as it needs; what follows the first is indented further."""
    return textwrap.fill(
        text,
        line_columns(),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
        break_long_words=False,  # a path or a hash stays whole, so that it can be copied
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
    if num_columns < 4:
        return line[:num_columns]
    return line if len(line) <= num_columns else line[: num_columns - 2] + ".."


def cut_middle(text: str, num_columns: int) -> str:
    """The text, its middle left out if it is too long."""
    if len(text) <= num_columns:
        return text
    head = num_columns // 2 - 1
    return f"{text[:head]}..{text[len(text) - (num_columns - head - 2) :]}"
