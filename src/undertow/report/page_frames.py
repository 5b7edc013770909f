"""The frame that a picture is drawn into: its size and margins, once for wide screens and once for narrow ones.

A picture is drawn twice, because one that is scaled down to a telephone has text that nobody can read, and one that
scrolls hides half of what it says. The page's style shows the drawing that suits the screen. Units are pixels of text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

SMALL_HEIGHT_SHARE = 0.66  # of the height of the wide drawing


@dataclass(frozen=True)
class Frame:
    """`kind` is the class of the page's style that shows the drawing; `num_ticks` is for the horizontal axis."""

    kind: str
    width: int
    height: int
    left: int
    right: int
    num_ticks: int
    top: int = 34
    bottom: int = 34

    @property
    def floor(self) -> int:
        """Where the horizontal axis is."""
        return self.height - self.bottom

    @property
    def end(self) -> int:
        """Where the horizontal axis ends."""
        return self.width - self.right


def make_figure(height: int, draw: Callable[[Frame], str], below: str = "") -> str:
    """A figure of the drawing for wide and for narrow screens; `below` is HTML."""
    wide = Frame("wide", 1120, height, 76, 16, num_ticks=8)
    small = Frame("small", 336, round(height * SMALL_HEIGHT_SHARE), 70, 16, num_ticks=4)
    return f"<figure>{draw(wide)}{draw(small)}{below}</figure>"


def open_svg(frame: Frame, name: str, title: str, attributes: str = "") -> str:
    """The start of a drawing; `name` is its id in the wide frame."""
    number = name if frame.kind == "wide" else f"{name}-{frame.kind}"
    return (
        f'<svg id="{number}" class="{name} {frame.kind}" viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-labelledby="{number}-title"{attributes}><title id="{number}-title">{escape(title)}</title>'
    )


def svg_text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    """A piece of text in a picture, escaped."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
