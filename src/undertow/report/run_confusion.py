"""The confusion matrix of an evaluation as a picture: a row for each class that was wanted, a column for each found.

In: counts and the names of classes. Out: SVG text. A cell is as strong as its share of its row; what was wrong has
another colour than what was right. Counts are written where a cell has room for them; a title names each cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from undertow.report.columns import cut
from undertow.report.page_frames import SMALL_HEIGHT_SHARE, Frame, make_figure, open_svg, svg_text

MAX_CLASSES = 24  # a larger matrix is no picture any more
ROW_HEIGHT = 28
MAX_CELL_WIDTH = 64
CHARACTER_WIDTH = 7.0  # of the page's text, at most
LEAST_SHARE, MOST_SHARE = 0.10, 0.75  # a single count shows, and text on the strongest cell can be read

Matrix = Sequence[Sequence[int]]


def confusion_figure(matrix: Matrix, classes: Sequence[str]) -> str:
    """The figure; `classes` are names of the rows, from the first on."""
    names = [classes[index] if index < len(classes) else str(index) for index in range(len(matrix))]
    # The narrow drawing has rows of at least 16 pixels, whatever share of the height it gets.
    height = 68 + max(ROW_HEIGHT * len(matrix), round(16 * len(matrix) / SMALL_HEIGHT_SHARE))
    return make_figure(height, lambda frame: _draw(matrix, names, frame))


def _draw(matrix: Matrix, names: Sequence[str], frame: Frame) -> str:
    width = min((frame.end - frame.left) / len(matrix), MAX_CELL_WIDTH)
    height = (frame.floor - frame.top) / len(matrix)
    are_names_shown = max(map(len, names)) * CHARACTER_WIDTH <= width
    parts = [open_svg(frame, "confusion", "How often each class was taken for each")]
    parts.append(svg_text(8, frame.top - 16, "wanted (rows) and found (columns)", "tick", "start"))
    for row, counts in enumerate(matrix):
        y = frame.top + row * height
        label = names[row] if are_names_shown or names[row] == str(row) else f"{row} {names[row]}"
        label = cut(label, int((frame.left - 12) / CHARACTER_WIDTH))
        parts.append(svg_text(frame.left - 8, y + height / 2 + 4, label, "tick", "end"))
        given = sum(counts)
        for column, count in enumerate(counts):
            x = frame.left + column * width
            share = count / given if given else 0.0
            opacity = LEAST_SHARE + (MOST_SHARE - LEAST_SHARE) * share if count else 0.0
            kind = "right" if row == column else "wrong"
            title = escape(f"{names[row]} taken for {names[column]}: {count:,} of {given:,}")
            parts.append(
                f'<rect class="cell {kind}" x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{height - 1:.1f}" '
                f'fill-opacity="{opacity:.3f}"><title>{title}</title></rect>'
            )
            if count and len(str(count)) * CHARACTER_WIDTH + 2 <= width:
                parts.append(svg_text(x + width / 2, y + height / 2 + 4, str(count), "count", "middle"))
    for column, name in enumerate(names):
        label = name if are_names_shown else str(column)
        if len(label) * CHARACTER_WIDTH <= width:
            parts.append(svg_text(frame.left + (column + 0.5) * width, frame.floor + 18, label, "tick", "middle"))
    return "".join(parts) + "</svg>"
