"""An embedding as a picture.

In: an embedding layer. Out: HTML. An embedding of characters is a map: each character where the two directions of
largest spread (principal components; Pearson, 1901) put its vector, so that characters which the network treats alike
are near each other. Any other embedding, such as one of positions, is shown by how alike its vectors are: the cosine of
each two.
"""

from __future__ import annotations

import torch

from undertow.look.layers import UnitLayer
from undertow.look.pictures import draw_signed
from undertow.look.text import SIGNS
from undertow.report.page_frames import Frame, make_figure, open_svg, svg_text

MAX_ROWS = 256
MAP_HEIGHT = 560
ROOM = 16  # between the outermost characters and the edge


def embedding_section(layer: UnitLayer, vocabulary: str | None) -> str:
    """The picture with a line about it."""
    table = layer.module.weight.detach().float().cpu()  # type: ignore[operator]
    about = f"{len(table):,} vectors of {table.shape[1]:,} numbers. "
    if vocabulary is not None and layer.reads_input and len(table) == len(vocabulary) and len(table) > 2:
        points, share = _project(table)
        note = (
            f"Each character is at its vector's place in the two directions of largest spread, which hold {share:.0%} "
            f"of it; near ones are alike to the network."
        )
        name = f"map-{layer.path}"
        figure = make_figure(MAP_HEIGHT, lambda frame: _draw_map(name, points, vocabulary, frame))
        return f'<p class="note">{about}{note}</p>{figure}'
    rows = torch.nn.functional.normalize(table[:MAX_ROWS], dim=1)
    part = "" if len(table) <= MAX_ROWS else f"of the first {MAX_ROWS} "
    picture = draw_signed(rows @ rows.t(), largest=1.0)
    return (
        f'<p class="note">{about}The cosine {part}of each two: orange where they are alike, blue where they are '
        f'opposite.</p><figure class="cosines"><img src="{picture}" alt="cosines"></figure>'
    )


def _project(table: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Coordinates between 0 and 1, and the share of the spread that they hold."""
    centred = (table - table.mean(0)).double()
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    # A direction's sign is arbitrary: its largest coordinate is made positive, so that two machines draw one map.
    points = centred @ directions[:2].t()
    points = points * torch.where(points.gather(0, points.abs().argmax(0)[None]) < 0, -1.0, 1.0)
    low, high = points.min(0).values, points.max(0).values
    share = float(values[:2].square().sum() / values.square().sum().clamp_min(1e-30))
    return (points - low) / (high - low).clamp_min(1e-30), share


def _draw_map(name: str, points: torch.Tensor, vocabulary: str, frame: Frame) -> str:
    parts = [open_svg(frame, name, "Characters by their vectors")]
    width, height = frame.width - 2 * ROOM, frame.height - 2 * ROOM
    for (x, y), character in zip(points.tolist(), vocabulary, strict=True):
        sign = "␣" if character == " " else SIGNS.get(character, character if character.isprintable() else "·")
        kind = "vowel" if character.lower() in "aeiou" else "letter" if character.isalpha() else "sign"
        parts.append(svg_text(ROOM + x * width, ROOM + 5 + y * (height - 5), sign, f"character {kind}", "middle"))
    return "".join(parts) + "</svg>"
