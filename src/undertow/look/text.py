"""A stretch of text that triggers a unit, as HTML.

In: a sample. Out: a line in which each character is marked by its share of the derivative, and the character where the
unit responds is underlined. Line breaks and tabs are shown as signs.
"""

from __future__ import annotations

from html import escape

from undertow.look.looking import Sample

BEFORE, AFTER = 34, 6  # characters around the one where the unit responds
SIGNS = {"\n": "↵", "\t": "⇥", "\r": "␍", " ": "\u00a0"}


def draw_context(sample: Sample, vocabulary: str | None) -> str:
    """The line, with the response before it."""
    tokens = sample.inputs.tolist()
    start, end = max(sample.position - BEFORE, 0), min(sample.position + AFTER + 1, len(tokens))
    shares = [0.0] * len(tokens)
    if sample.gradient is not None:
        largest = float(sample.gradient.max())
        shares = [value / largest if largest > 0 else 0.0 for value in sample.gradient.tolist()]
    marked = "".join(
        _mark(_sign(tokens[index], vocabulary), shares[index], index - sample.position) for index in range(start, end)
    )
    return f'<p><small>{sample.response:.3g}</small><code title="test example {sample.example}">{marked}</code></p>'


def _sign(token: int, vocabulary: str | None) -> str:
    if vocabulary is None or not 0 <= token < len(vocabulary):
        return f"{token} "
    character = vocabulary[token]
    return SIGNS.get(character, character if character.isprintable() else "·")


def _mark(sign: str, share: float, distance: int) -> str:
    style = f' style="--share:{share:.2f}"' if share >= 0.01 else ""
    kind = ' class="at"' if distance == 0 else ' class="after"' if distance > 0 else ""
    return f"<span{kind}{style}>{escape(sign)}</span>" if style or kind else escape(sign)
