"""A `.utz` file as one HTML page: the table of the literature, and for each tensor what is kept, its values, its bits.

In: a Report. Out: the page's text, made and protected like all pages: nothing is loaded, every name is escaped.
"""

from __future__ import annotations

import math
from html import escape

import torch
from torch import Tensor

from undertow.coding.table import Row
from undertow.coding.tensors import CodedTensor
from undertow.ir import format_bytes
from undertow.look.pictures import draw_signed
from undertow.report.page import document, section, tile_list
from undertow.report.page_frames import Frame, make_figure, open_svg, svg_text
from undertow.report.page_tables import table
from undertow.shrink.report import HEADS, Report

_MAX_PICTURES = 64  # tensors that are drawn; the largest
_NUM_BARS = 60
_HISTOGRAM_HEIGHT, _ROW_HEIGHT = 180, 26
_PARTS = (("place", "kept"), ("values", "recomputed"), ("codebook", "gradients"), ("not coded", "other"))
_STYLE = """
.tensors{display:grid;grid-template-columns:repeat(auto-fill,minmax(440px,1fr));gap:14px;margin:14px 0 0}
article{background:var(--raised);border:1px solid var(--faint);border-radius:10px;padding:14px;min-width:0}
article h3{margin:0 0 2px;overflow-wrap:anywhere}article>small{color:var(--soft);display:block;margin:0 0 10px}
article>img{width:100%;max-height:240px;object-fit:contain;image-rendering:pixelated;background:var(--page);
border-radius:3px;display:block}article figure{border:0;padding:0;margin:12px 0 0}
article svg.wide{display:none}article svg.small{display:block;max-width:none}
.bin{fill:var(--optimizer)}.value{stroke:var(--recomputed);stroke-width:2}
@media(max-width:760px){.tensors{grid-template-columns:minmax(0,1fr)}}
"""


def render_page(report: Report) -> str:
    """The page."""
    total = report.total()
    kept = f"{total['num_kept'] / total['num_weights']:.2%}" if total["num_weights"] else "-"
    tiles = [
        ("File", format_bytes(report.file.num_bytes), f"{report.file.num_bytes:,} bytes"),
        ("In float32", format_bytes(report.float_bytes), f"{report.float_bytes:,} bytes: parameters and buffers"),
        ("Weights kept", kept, f"{total['num_kept']:,} of {total['num_weights']:,}"),
        (
            "Names, shapes, sums",
            format_bytes(report.header_bytes),
            f"{report.header_bytes / report.file.num_bytes:.1%}",
        ),
    ]
    header = (
        f'<header><h1>{escape(report.title)}</h1><p class="verdict"><b class="good">{report.ratio:.1f} times</b> '
        f"smaller than all of its parameters and buffers in float32</p>{tile_list(tiles)}</header>\n"
    )
    *rows, last = report.cells()
    note = (
        '<p class="note">P is pruning, Q sharing of weights, H coding. Bits are those of a kept weight: of its value '
        "before (P+Q) and after coding (P+Q+H), and of its place (index) before and after. Rates are shares of float32 "
        "bytes; that of the total after coding counts every byte of the file.</p>"
    )
    kinds = ("name", *("number",) * (len(HEADS) - 1))
    sections = [
        header,
        section("Layer by layer", note, table(HEADS, rows, kinds, last)),
        section("Bytes of the file", _bits_figure(report)),
        section("What is kept, and its values", _tensor_articles(report)),
    ]
    page = document(report.title, "".join(sections), style=_STYLE)
    return page.encode("utf-8", "replace").decode("utf-8")


def _parts(report: Report, row: Row) -> tuple[int, ...]:
    """The bytes of a tensor by what they are: places, values, codebook with scales, not coded."""
    entry = report.file.entries[row.name]
    if row.shared_bytes is None:
        return 0, 0, 0, row.file_bytes
    return entry.sizes[0], entry.sizes[1], row.file_bytes - entry.sizes[0] - entry.sizes[1], 0


def _bits_figure(report: Report) -> str:
    rows = sorted((row for row in report.rows if row.file_bytes), key=lambda row: -row.file_bytes)[:_MAX_PICTURES]
    if not rows:
        return "<p>The file holds no elements.</p>"
    largest = rows[0].file_bytes

    def draw(frame: Frame) -> str:
        is_wide = frame.kind == "wide"
        left, step = (300 if is_wide else 118), _ROW_HEIGHT
        height = step * len(rows) + 12
        svg = open_svg(
            Frame(frame.kind, frame.width, height, left, 16, 0), "parts", "Bytes of each tensor by what they are"
        )
        for place, row in enumerate(rows):
            y = 6 + place * step
            name = row.name if len(row.name) <= (40 if is_wide else 15) else f"..{row.name[-(38 if is_wide else 13) :]}"
            svg += svg_text(left - 8, y + 16, name, "", "end")
            x = float(left)
            for size, (what, role) in zip(_parts(report, row), _PARTS, strict=True):
                width = size / largest * (frame.width - left - (90 if is_wide else 56))
                if size:
                    title = f"<title>{escape(row.name)}, {what}: {size:,} bytes</title>"
                    size_of = f'width="{width:.1f}" height="{step - 8}"'
                    svg += f'<rect class="role-{role}" x="{x:.1f}" y="{y + 3}" {size_of}>{title}</rect>'
                x += width
            svg += svg_text(x + 6, y + 16, f"{row.file_bytes:,}", "", "start")
        return svg + "</svg>"

    legend = "".join(f'<li><i class="role-{role}"></i>{what}</li>' for what, role in _PARTS)
    return make_figure(100, draw, f'<ul class="legend">{legend}</ul>')


def _tensor_articles(report: Report) -> str:
    rows = [row for row in report.rows if row.shared_bytes is not None]
    largest = sorted(rows, key=lambda row: -row.num_weights)[:_MAX_PICTURES]
    shown = [row for row in rows if row in largest]
    articles = "".join(_article(report, row, place) for place, row in enumerate(shown))
    rest = len(rows) - len(shown)
    left_out = f'<p class="note">{rest} smaller tensors are left out.</p>' if rest else ""
    note = (
        '<p class="note">Each picture has a row for every output, and what was removed is blank; positive weights are '
        "orange, negative ones blue. Below it, bars count the kept weights by value, and a line marks each shared "
        "value.</p>"
    )
    return f'{note}<div class="tensors">{articles}</div>{left_out}'


def _article(report: Report, row: Row, place: int) -> str:
    tensor = report.file.read(row.name)
    assert isinstance(tensor, CodedTensor)
    shape = " × ".join(map(str, row.shape)) or "a number"
    about = f"{shape}; {row.num_kept:,} of {row.num_weights:,} kept, {row.num_codes} values"
    picture = f'<img src="{draw_signed(_as_picture(tensor.dense()))}" alt="the kept weights of {escape(row.name)}">'
    figure = make_figure(_HISTOGRAM_HEIGHT, lambda frame: _draw_histogram(tensor, place, row.name, frame))
    return f"<article><h3>{escape(row.name)}</h3><small>{escape(about)}</small>{picture}{figure}</article>"


def _as_picture(weights: Tensor) -> Tensor:
    """A tensor as rows and columns; the kernels of a convolution side by side. A vector is folded to a square."""
    weights = weights.float()
    if weights.dim() < 2:
        side = max(math.ceil(math.sqrt(weights.numel())), 1)
        folded = torch.zeros(side * side)
        folded[: weights.numel()] = weights.reshape(-1)
        return folded.reshape(side, side)
    if weights.dim() == 2:
        return weights
    rows, channels, *kernel = weights.shape
    flat = weights.reshape(rows, channels, math.prod(kernel[:-1]), kernel[-1])
    return flat.permute(0, 2, 1, 3).reshape(rows * flat.shape[2], channels * flat.shape[3])


def _draw_histogram(tensor: CodedTensor, place: int, name: str, frame: Frame) -> str:
    counts = tensor.codes.bincount(minlength=len(tensor.codebook)).double()
    values = tensor.codebook.double()
    is_used = counts > 0
    values, counts = values[is_used], counts[is_used]
    low, high = float(values.min()), float(values.max())
    spread = (high - low) or 1.0
    low, high = low - 0.03 * spread, high + 0.03 * spread
    bins = ((values - low) / (high - low) * _NUM_BARS).long().clamp(0, _NUM_BARS - 1)
    heights = torch.zeros(_NUM_BARS, dtype=torch.float64).index_add_(0, bins, counts)
    most = float(heights.max())
    width = frame.width - frame.left - frame.right
    svg = open_svg(frame, f"values{place}", f"Kept weights of {name} by value")
    for index, height in enumerate(heights.tolist()):
        if height:
            size = max((frame.floor - frame.top) * height / most, 1.0)
            x = frame.left + width * index / _NUM_BARS
            svg += (
                f'<rect class="bin" x="{x:.1f}" y="{frame.floor - size:.1f}" width="{width / _NUM_BARS - 1:.1f}" '
                f'height="{size:.1f}"><title>{height:,.0f} weights</title></rect>'
            )
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        x = frame.left + width * (value - low) / (high - low)
        title = f"<title>{value:.4g}: {count:,.0f} weights</title>"
        svg += f'<line class="value" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.floor}" y2="{frame.floor + 7}">{title}</line>'
    svg += f'<path class="grid" d="M{frame.left} {frame.floor}H{frame.end}"/>'
    for value in (float(values.min()), 0.0, float(values.max())):
        if low <= value <= high:
            x = frame.left + width * (value - low) / (high - low)
            svg += svg_text(x, frame.floor + 22, f"{value:.3g}", "", "middle")
    return svg + svg_text(frame.left - 8, frame.top + 8, f"{most:,.0f}", "", "end") + "</svg>"
