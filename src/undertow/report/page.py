"""A Plan as one HTML page that needs nothing else: no network, and no script for its tables.

In: a Plan, and what was measured of it. Out: the page's text. Every name from the user's code is escaped where it is
written. The page's policy allows only its own script to run, and nothing to be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
from collections.abc import Sequence
from html import escape
from typing import Any, Protocol

import torch

from undertow.ir import Phase, Plan, TensorType, format_bytes
from undertow.report.columns import format_us
from undertow.report.decisions import Decisions
from undertow.report.page_bands import Band, Picture, make_picture
from undertow.report.page_frames import make_figure
from undertow.report.page_pictures import CURVE_HEIGHT, MEMORY_HEIGHT, color_class, draw_curve, draw_memory
from undertow.report.page_script import SCRIPT
from undertow.report.page_style import make_style
from undertow.report.page_tables import (
    curve_table,
    decision_tables,
    environment_table,
    largest_table,
    layers_table,
    measured_table,
    peak_table,
)
from undertow.report.peak import WORKSPACE, LiveStorage
from undertow.report.plan_summary import fits, verdict
from undertow.report.reasons import find_decisions
from undertow.report.timeline import Timeline, short_name


class Measured(Protocol):
    """What the allocator and the clock saw; the time is a median of several steps, None if there were too few."""

    @property
    def peak_bytes(self) -> int: ...

    @property
    def step_s(self) -> float | None: ...


def render_page(
    plan: Plan,
    *,
    title: str,
    curve: Sequence[tuple[float, float]] = (),
    measured: Measured | None = None,
    process_bytes: int | None = None,
    cannot_see: Sequence[str] = (),
    advice: str = "",
) -> str:
    """The page. `curve` is (peak bytes, step microseconds) of other plans; `cannot_see` is what no plan counts.

    `advice` is a section that comes first.
    """
    decisions = find_decisions(plan)
    timeline = Timeline(plan)
    picture = make_picture(timeline)
    sections = [
        _header(plan, title, decisions),
        advice,
        memory_section(plan, timeline, picture),
        section("At the peak", peak_table(plan, decisions.peak), largest_table(decisions.peak)),
        section("What was decided, layer by layer", layers_table(decisions), *decision_tables(decisions)),
    ]
    if curve:
        point = None
        if measured is not None and measured.step_s is not None:
            point = float(measured.peak_bytes), measured.step_s * 1e6
        figure = make_figure(CURVE_HEIGHT, lambda frame: draw_curve(curve, plan, point, frame))
        sections.append(section("Time and memory of other plans", figure, curve_table(curve)))
    sections.append(section("Predicted and measured", measured_table(plan, measured, process_bytes)))
    limits = [*cannot_see, *_without_rule(plan)]
    if limits:
        items = "".join(f"<li>{escape(line)}</li>" for line in limits)
        sections.append(section("What this report cannot see", f"<ul>{items}</ul>"))
    sections.append(section("Environment", environment_table(_environment(plan))))
    page = document(title, "".join(sections), moments_of(plan, timeline, picture))
    # A file name may contain bytes that are not text; the page must be written all the same.
    return page.encode("utf-8", "replace").decode("utf-8")


def document(title: str, body: str, moments: dict[str, Any] | None = None, style: str = "") -> str:
    """The whole page around its sections; `style` is added to that of all pages.

    `moments` is what the script says about the picture of memory; a page without that picture has no script.
    """
    script = ""
    if moments is not None:
        script = (
            f'<script type="application/json" id="moments">{script_json(moments)}</script>\n<script>{SCRIPT}</script>\n'
        )
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if script else "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{make_style()}{style}</style>\n</head>\n<body>\n<main>\n{body}</main>\n"
        f"{script}</body>\n</html>\n"
    )


def script_json(data: Any) -> str:
    """JSON that is safe inside a script element: none of its characters opens or closes markup."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def section(title: str, *parts: str) -> str:
    """A part of the page under its title."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>\n"


def _header(plan: Plan, title: str, decisions: Decisions) -> str:
    is_fitting = fits(plan)
    head, _, rest = verdict(plan, decisions.total)[-1].partition(":")
    kind = "" if is_fitting is None else "good" if is_fitting else "bad"
    mark = "" if is_fitting is None else "✓ " if is_fitting else "✗ "
    total = decisions.total
    share = f"{total.extra_us / plan.step_us:.1%} of the step" if plan.step_us else ""
    bound = f"bound {format_us(plan.lower_bound_us)}" if plan.lower_bound_ns else _outcome(plan)
    budget = plan.budget_bytes
    tiles = [
        ("Predicted peak", format_bytes(plan.peak_bytes), f"{plan.peak_bytes:,} bytes"),
        ("Budget", "none" if budget is None else format_bytes(budget), "" if budget is None else f"{budget:,} bytes"),
        _time_tile(plan),
        ("Spent to save memory", format_us(total.extra_us), share),
        ("Gap to the bound", f"{plan.gap:.1%}" if plan.lower_bound_ns else "unknown", bound),
    ]
    return (
        f'<header><h1>{escape(title)}</h1><p class="verdict"><b class="{kind}">{mark}{escape(head.capitalize())}:</b>'
        f"{escape(rest)}</p>{tile_list(tiles)}</header>\n"
    )


def _outcome(plan: Plan) -> str:
    return "the budget cannot be met" if fits(plan) is False else plan.outcome.value


def _time_tile(plan: Plan) -> tuple[str, str, str]:
    if not plan.step_us:
        return "Predicted step", "unknown", "no operation was timed"
    return "Predicted step", format_us(plan.step_us), "measured costs" if plan.has_measured_costs else "modelled costs"


def tile_list(tiles: Sequence[tuple[str, str, str]]) -> str:
    """The few numbers that matter most: a name, a value, a note."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def memory_section(plan: Plan, timeline: Timeline, picture: Picture) -> str:
    """The picture of memory with its legend."""
    if not picture.columns:
        return section("Memory over the step", "<p>The plan runs no operation.</p>")
    largest: dict[str, int] = {}
    for band in picture.bands:
        largest[band.label] = max(largest.get(band.label, 0), *band.sizes)
    legend = "".join(
        f'<li><i class="{color_class(label)}"></i>{escape(label)}</li>' for label, size in largest.items() if size
    )
    shown = len(picture.columns)
    note = f"Bytes alive while each of {len(plan.nodes)} operations runs, in their order. "
    note += f"The fullest of every few is shown, {shown} in all. " if shown < len(plan.nodes) else ""
    if plan.budget_bytes is not None:
        note += f"The budget is {format_bytes(plan.budget_bytes)}. "
    note += "Point at a band to see what it is and why it is there; arrow keys move a cursor."
    return section(
        "Memory over the step",
        f'<p class="note">{escape(note)}</p>',
        make_figure(
            MEMORY_HEIGHT, lambda frame: draw_memory(plan, picture, frame), f'<ul class="legend">{legend}</ul>'
        ),
    )


def moments_of(plan: Plan, timeline: Timeline, picture: Picture) -> dict[str, Any]:
    """What the script needs: what runs at each column, and what each band is."""
    columns = []
    for position in picture.columns:
        node = plan.nodes[position]
        columns.append(
            {
                "position": position,
                "operation": short_name(node),
                "layer": node.origin.module_path,
                "location": node.origin.location,
                "live": plan.live_bytes[position],
                "pass": "forward" if position < timeline.boundary else "backward",
                "duration": format_us(timeline.duration_us(position)),
            }
        )
    bands = picture.bands if columns else ()
    return {"num_nodes": len(plan.nodes), "columns": columns, "bands": [_band(band) for band in bands]}


def _band(band: Band) -> dict[str, Any]:
    if band.value is not None:
        return {"label": band.label, "size": band.value.num_bytes, "value": _value(band.value)}
    if band.is_held:
        return {"label": band.label, "size": band.sizes[0], "why": "held during the whole step"}
    found = {
        "label": band.label,
        "where": band.where,
        "sizes": band.sizes,
        "members": [_value(item) for item in band.members],
    }
    return found | ({"why": "what the kernel allocates for itself while it runs"} if band.label == WORKSPACE else {})


def _value(item: LiveStorage) -> dict[str, Any]:
    return {
        "name": item.value,
        "type": item.type,
        "operation": item.made_by.operation,
        "layer": item.made_by.layer,
        "location": item.made_by.location,
        "size": item.num_bytes,
        "first": item.first,
        "last": item.last,
        "why": item.why,
    }


def _without_rule(plan: Plan) -> list[str]:
    names = dict.fromkeys(f"{node.name} {node.origin}".strip() for node in plan.without_rule)
    return [f"{name}: its derivative is taken through autograd at run time" for name in names]


def _environment(plan: Plan) -> list[tuple[str, str]]:
    types = (value.type for node in plan.nodes for value in node.named_outputs)
    devices = dict.fromkeys(str(kind.device) for kind in types if isinstance(kind, TensorType))
    return [
        ("PyTorch", torch.__version__),
        ("Python", platform.python_version()),
        ("device", ", ".join(devices) or "none"),
        ("machine", f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads"),
        ("costs", "measured on the device" if plan.has_measured_costs else "from a model; nothing was measured"),
        ("search", _outcome(plan)),
        ("operations", f"{len(plan.nodes)}, of them {plan.program.count(Phase.FORWARD)} of the forward pass"),
    ]
