"""The tables of the page as HTML, readable without a script. In: data. Out: HTML text, every name escaped.

A list that is too long shows its largest entries and says how many are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from undertow.ir import Plan, format_bytes
from undertow.report.columns import format_us, size_or_dash
from undertow.report.decisions import Decisions, LayerDecisions
from undertow.report.inspection import Site
from undertow.report.page_pictures import color_class
from undertow.report.peak import Peak

MAX_ROWS = 200
MAX_LAYERS = 1000
MIN_TIMES = 10  # from here on a measured number is so many times the predicted one, not so many percent more
MAX_NARROW_COLUMNS = 3  # more of them do not fit the width of a telephone: the row is shown as a list there


class Html(str):
    """Text that is HTML already; any other text is escaped when it becomes a cell."""


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    kinds: Sequence[str],
    total: Sequence[str] = (),
    is_narrow: bool = False,
) -> str:
    """`kinds` is the class of each column; `total` is a last row; without `heads` there is no head row."""
    head = "".join(
        f'<th scope="col"{_class(kind)}>{escape(text)}</th>' for text, kind in zip(heads, kinds, strict=False)
    )
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    is_stacked = len(heads) > MAX_NARROW_COLUMNS
    names = heads if is_stacked else ()
    body = "".join(f"<tr>{_cells(row, kinds, names)}</tr>" for row in rows)
    foot = f'<tr class="total">{_cells(total, kinds, names)}</tr>' if total else ""
    kind = " ".join(["table", *(["narrow"] if is_narrow else []), *(["stacked"] if is_stacked else [])])
    # Focusable, so that keys can scroll a table wider than the screen.
    return f'<div class="{kind}" tabindex="0"><table>{head}<tbody>{body}{foot}</tbody></table></div>'


def peak_table(plan: Plan, peak: Peak) -> str:
    """What the bytes are, with bars."""
    where = ""
    if peak.at is not None:
        site = " · ".join(part for part in (peak.at.operation, peak.at.layer, peak.at.location) if part)
        where = f'<p class="note">During operation {peak.position} of {len(plan.nodes)}: {escape(site)}</p>'
    largest = max((size for _, size in peak.parts), default=1)
    rows = [
        (
            Html(f'<i class="{color_class(name)}"></i>{escape(name)}'),
            format_bytes(size),
            f"{size / peak.num_bytes:.1%}",
            Html(f'<span class="{color_class(name)}" style="width:{100 * size / largest:.1f}%"></span>'),
        )
        for name, size in peak.parts
    ]
    total = ("together", format_bytes(peak.num_bytes), "", "")
    return where + table(("what", "bytes", "share", ""), rows, ("", "number", "number", "bar"), total)


def largest_table(peak: Peak) -> str:
    """The values that take most at the peak."""
    rows = [
        (
            _code(f"%{item.value}"),
            format_bytes(item.num_bytes),
            Html(f'<i class="{color_class(item.role.value)}"></i>{escape(item.role.value)}'),
            _site_cell(item.made_by),
            item.why,
        )
        for item in peak.largest
    ]
    heads = ("value", "bytes", "what", "layer", "why it is there")
    kinds = ("value", "number", "what", "location", "why")
    return f"<h3>Its largest values</h3>{table(heads, rows, kinds)}" if rows else ""


def layers_table(decisions: Decisions) -> str:
    """A row per layer."""
    if not decisions.layers:
        return "<p>Nothing is kept, recomputed, encoded or written over.</p>"
    heads = ("layer", "kept", "recomputed", "encoded", "in codes", "written over", "extra time")
    largest = sorted(decisions.layers, key=lambda layer: -layer.decided_bytes)[:MAX_LAYERS]
    shown = {layer.path for layer in largest}
    rows = [(layer.path or "(model)", *_layer_cells(layer)) for layer in decisions.layers if layer.path in shown]
    total = ("all", *_layer_cells(decisions.total))
    note = (
        '<p class="note">Kept: stays in memory for the backward pass. Recomputed: freed and made again. Encoded: '
        "stored in fewer bytes. Written over: a result takes the memory of its argument.</p>"
    )
    left_out = len(decisions.layers) - len(rows)
    rest = f'<p class="note">{left_out} layers with less are left out.</p>' if left_out else ""
    return note + table(heads, rows, ("name", *("number",) * 6), total) + rest


def _layer_cells(layer: LayerDecisions) -> tuple[str, ...]:
    sizes = (layer.kept_bytes, layer.recomputed_bytes, layer.encoded_bytes, layer.code_bytes, layer.written_over_bytes)
    return (*map(size_or_dash, sizes), format_us(layer.extra_us) if layer.extra_us else "-")


def decision_tables(decisions: Decisions) -> list[str]:
    """Every decision with its reason: recomputed, encoded, kept, written over."""
    total = decisions.total
    return [
        _decision_table(
            "Recomputed",
            f"{format_bytes(total.recomputed_bytes)} saved, {format_us(total.recompute_us)}",
            total.recomputed,
            ("saved", "extra time"),
            lambda item: (size_or_dash(item.saved_bytes), format_us(item.extra_us)),
            is_open=True,
        ),
        _decision_table(
            "Encoded",
            f"{format_bytes(total.encoded_bytes)} in {format_bytes(total.code_bytes)}, {format_us(total.code_us)}",
            total.encoded,
            ("code", "extra time"),
            lambda item: (format_bytes(item.code_bytes), format_us(item.extra_us)),
            is_open=True,
        ),
        _decision_table(
            "Kept for the backward pass",
            format_bytes(total.kept_bytes),
            total.kept,
            ("operations alive", "to make again"),
            lambda item: (str(item.num_nodes_alive), format_us(item.recompute_us)),
        ),
        _decision_table(
            "Written over",
            format_bytes(total.written_over_bytes),
            total.written_over,
            ("operation",),
            lambda item: (str(item.position),),
        ),
    ]


def _decision_table(
    title: str, summary: str, items: Sequence[Any], heads: Sequence[str], cells: Any, is_open: bool = False
) -> str:
    if not items:
        return f'<p class="note">{title}: nothing.</p>'
    shown = sorted(items, key=lambda item: -item.num_bytes)[:MAX_ROWS]
    rows = [
        (
            _code(f"%{item.value}"),
            format_bytes(item.num_bytes),
            *cells(item),
            _site_cell(item.made_by),
            item.sentence,
        )
        for item in shown
    ]
    note = ""
    if len(shown) < len(items):
        rest = sum(item.num_bytes for item in items) - sum(item.num_bytes for item in shown)
        note = (
            f'<p class="note">{len(items) - len(shown)} smaller ones are left out, {format_bytes(rest)} together.</p>'
        )
    columns = ("value", "bytes", *heads, "layer", "why")
    kinds = ("value", "number", *("number" for _ in heads), "location", "why")
    count = f"{len(items)} value{'' if len(items) == 1 else 's'}, {summary}"
    is_open_text = " open" if is_open else ""
    return (
        f"<details{is_open_text}><summary>{title} <span>{count}</span></summary>{table(columns, rows, kinds)}{note}"
        f"</details>"
    )


def measured_table(plan: Plan, measured: Any, process_bytes: int | None) -> str:
    """Predicted and measured peak and time, and the memory of the whole process."""
    rows: list[tuple[str, ...]] = []
    pairs = (
        ("peak memory", float(plan.peak_bytes), None if measured is None else float(measured.peak_bytes), _exact_bytes),
        ("time of a step (median)", plan.step_us, _microseconds(measured), format_us),
    )
    for name, predicted, found, show in pairs:
        difference = _difference(found / predicted) if found is not None and predicted else "-"
        expected = show(predicted) if predicted else "not predicted: without a budget nothing is timed"
        rows.append((name, expected, "not measured" if found is None else show(found), difference))
    if plan.budget_bytes is not None:
        rows.append(("budget", _exact_bytes(plan.budget_bytes), "", ""))
    process = "not measured" if process_bytes is None else format_bytes(process_bytes)
    rows.append(("memory of the whole process", "", process, ""))
    kinds = ("", "number", "number", "number")
    note = (
        '<p class="note">The process takes more than the step: the interpreter, the libraries, and what the allocator '
        "has not returned.</p>"
    )
    shown = table(("", "predicted", "measured", "difference"), rows, kinds, is_narrow=True)
    return shown + (note if process_bytes is not None else "")


def _microseconds(measured: Any) -> float | None:
    return None if measured is None or measured.step_s is None else measured.step_s * 1e6


def _difference(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= MIN_TIMES else f"{ratio - 1:+.2%}"


def _exact_bytes(num_bytes: float) -> str:
    return f"{format_bytes(num_bytes)} ({num_bytes:,.0f} B)"


def curve_table(curve: Sequence[tuple[float, float]]) -> str:
    """The points of the curve."""
    fastest = min(duration for _, duration in curve)
    rows = [
        (format_bytes(size), format_us(duration), f"{duration / fastest - 1:+.1%}" if fastest else "-")
        for size, duration in sorted(curve)
    ]
    heads = ("peak memory", "time of a step", "beside the fastest")
    body = table(heads, rows, ("number",) * 3, is_narrow=True)
    return f"<details><summary>The {len(rows)} plans as a table</summary>{body}</details>"


def environment_table(rows: Sequence[tuple[str, str]]) -> str:
    """Where the numbers come from."""
    return table((), rows, ("", "name"), is_narrow=True)


def _site_cell(site: Site) -> Html:
    """The layer, and below it the operation and its line."""
    where = " · ".join(part for part in (site.operation, site.location) if part)
    return Html(f"{escape(site.layer or '(model)')}<small>{escape(where)}</small>")


def _code(text: str) -> Html:
    return Html(f"<code>{escape(text)}</code>" if text else "")


def _cells(row: Sequence[str], kinds: Sequence[str], heads: Sequence[str]) -> str:
    """The cells of a row; with `heads`, each cell has the name of its column for narrow screens."""
    cells = []
    for index, (cell, kind) in enumerate(zip(row, kinds, strict=True)):
        text = cell if isinstance(cell, Html) else escape(cell)
        head = f' data-head="{escape(heads[index])}"' if heads and heads[index] else ""
        kind = f"{kind} none".lstrip() if heads and text in ("", "-") else kind
        cells.append(f"<td{_class(kind)}{head}>{text}</td>")
    return "".join(cells)


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
