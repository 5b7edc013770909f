"""A Plan for the terminal: does it fit, how long does it take, what is in memory at the peak, what was decided and why.

In: a Plan. Out: text of at most 80 columns, or as many as the terminal has, and plain characters (`print_plan`, and
`explain` for one layer), and the same numbers as plain data (`plan_to_dict`). Long lists are cut to their largest
entries; the data is whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from undertow.errors import CallError
from undertow.ir import Phase, Plan, format_bytes
from undertow.report.columns import align, bar, cut, cut_middle, format_us, line_columns, size_or_dash, wrap
from undertow.report.decisions import Decisions, LayerDecisions, is_within
from undertow.report.peak import LiveStorage, Peak
from undertow.report.reasons import find_decisions

MAX_LAYERS = 40
MAX_SENTENCES = 10
LAYER_COLUMNS = 36
NAME_COLUMNS = 26


def print_plan(plan: Plan, cannot_see: Sequence[str] = (), found: Sequence[str] = ()) -> str:
    """The whole report, the verdict last. `cannot_see` takes memory and is not in the plan; `found` was measured."""
    decisions = find_decisions(plan)
    parts = [_peak_table(decisions.peak)]
    parts += [_largest(decisions.peak.largest)] if decisions.peak.largest else []
    parts += [_layers_table(decisions)] if decisions.layers else []
    parts += _lists(decisions.total, MAX_SENTENCES)
    parts += ["\n".join(map(wrap, plan.notes))] if plan.notes else []
    parts += ["\n".join(["not counted", *(wrap(line, "  ") for line in cannot_see)])] if cannot_see else []
    parts += ["\n".join(map(wrap, [*found, *verdict(plan, decisions.total)]))]
    return "\n\n".join(parts)


def explain(plan: Plan, module_path: str) -> str:
    """What was decided about one module and what it contains, and why; the empty path is the whole model."""
    check_module_path(plan, module_path)
    decisions = find_decisions(plan)
    chosen = decisions.within(module_path)
    peak = decisions.peak
    at_peak = [item for item in peak.largest if is_within(item.made_by.layer, module_path)]
    lines = [
        module_path or "(model)",
        f"kept for the backward pass: {_values(len(chosen.kept), chosen.kept_bytes)}",
        f"recomputed: {_values(len(chosen.recomputed), chosen.recomputed_bytes)} saved, "
        f"{format_us(chosen.recompute_us)}",
        f"encoded: {_values(len(chosen.encoded), chosen.encoded_bytes)} in {format_bytes(chosen.code_bytes)}, "
        f"{format_us(chosen.code_us)}",
        f"written over: {_values(len(chosen.written_over), chosen.written_over_bytes)} saved",
    ]
    parts = ["\n".join(lines)]
    parts += [_largest(at_peak)] if at_peak else []
    return "\n\n".join([*parts, *_lists(chosen, None)])


def check_module_path(plan: Plan, module_path: str) -> None:
    """Raise CallError unless the plan has a module of this path."""
    known = module_paths(plan)
    if module_path in known:
        return
    close = difflib.get_close_matches(module_path, known, n=3, cutoff=0.4)
    hint = f"; close to it: {', '.join(map(repr, close))}" if close else ""
    raise CallError(
        f"explain: the model has no module {module_path!r} that runs an operation or stores a tensor{hint}; "
        f"'' is the whole model"
    )


def module_paths(plan: Plan) -> list[str]:
    """Every module of the plan, also those that only contain others, in the order in which they are met."""
    paths = dict.fromkeys(node.origin.module_path for node in plan.nodes)
    paths |= dict.fromkeys(item.path.rpartition(".")[0] for item in plan.program.inputs)
    found = {"": None}
    for path in paths:
        words = path.split(".")
        found |= dict.fromkeys(".".join(words[:length]) for length in range(1, len(words) + 1))
    return list(found)


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Everything as plain data."""
    decisions = find_decisions(plan)
    return {
        "fits": fits(plan),
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "step_us": plan.step_us,
        "lower_bound_us": plan.lower_bound_us if plan.lower_bound_ns else None,
        "gap": plan.gap if plan.lower_bound_ns else None,
        "outcome": plan.outcome.name.lower(),
        "has_measured_costs": plan.has_measured_costs,
        "num_forward_nodes": plan.program.count(Phase.FORWARD),
        "num_nodes": len(plan.nodes),
        "held": dict(plan.held),
        "peak": decisions.peak.to_dict(),
        "totals": decisions.total.totals(),
        "layers": [layer.to_dict() for layer in decisions.layers],
        "without_rule": [f"{node.name}  {node.origin}".strip() for node in plan.without_rule],
    }


def fits(plan: Plan) -> bool | None:
    """Whether the predicted peak is within the budget; None without one."""
    return None if plan.budget_bytes is None else plan.peak_bytes <= plan.budget_bytes


def verdict(plan: Plan, total: LayerDecisions) -> list[str]:
    """How long does it take, how near is that to the best, and last: does it fit. One line each."""
    peak = format_bytes(plan.peak_bytes)
    if plan.budget_bytes is None:
        lines = [f"no budget: {peak} predicted at the peak"]
    else:
        budget, left = format_bytes(plan.budget_bytes), plan.budget_bytes - plan.peak_bytes
        share = f"{plan.peak_bytes / plan.budget_bytes:.1%} of " if plan.budget_bytes else ""
        lines = [
            f"fits: {peak} predicted at the peak, {share}the budget of {budget}; {format_bytes(left)} are left"
            if left >= 0
            else f"does not fit: {peak} predicted at the peak, {format_bytes(-left)} over the budget of {budget}"
        ]
    if plan.step_us:
        lines.append(f"time: {format_us(plan.step_us)} predicted for a step{_extra(plan, total)}")
    else:
        lines.append("time: not predicted; no operation was timed, because no budget asks for a choice")
    if plan.lower_bound_ns:
        lines.append(
            f"bound: no plan {'within the budget ' if plan.budget_bytes is not None else ''}takes less than "
            f"{format_us(plan.lower_bound_us)}; this one is at most {plan.gap:.1%} slower ({plan.outcome.value})"
        )
    else:
        lines.append(f"bound: none was computed ({plan.outcome.value})")
    lines.append(_describe_costs(plan))
    # Last is what a reader looks for first: the end of the text is what a terminal shows.
    return [*lines[1:], lines[0]]


def _describe_costs(plan: Plan) -> str:
    if not plan.has_measured_costs:
        return "costs: from a model, nothing was measured; the kernels' workspace is not counted"
    return "costs: measured on this device" if plan.step_us else "costs: workspace measured on this device, no times"


def _extra(plan: Plan, total: LayerDecisions) -> str:
    if not total.extra_us:
        return ", none of it to save memory"
    num_runs = sum(item.num_operations for item in total.recomputed)
    share = f" ({total.extra_us / plan.step_us:.1%})" if plan.step_us else ""
    return (
        f"; {format_us(total.extra_us)}{share} of it to save memory: {_count(num_runs, 'operation')} run again, "
        f"{_count(len(total.encoded), 'value')} encoded"
    )


def _peak_table(peak: Peak) -> str:
    largest = max((size for _, size in peak.parts), default=0)
    rows: list[tuple[str, ...]] = [
        (name, format_bytes(size), f"{size / peak.num_bytes:.1%}", bar(size, largest)) for name, size in peak.parts
    ]
    rows.append(("together", format_bytes(peak.num_bytes)))
    where = ""
    if peak.at is not None:
        site = "  ".join(part for part in (peak.at.operation, peak.at.layer, peak.at.location) if part)
        where = f", during operation {peak.position}: {site}"
    return f"{cut_middle(f'memory at the peak{where}', line_columns())}\n{align(rows, '<>><')}"


def _largest(storages: Sequence[LiveStorage]) -> str:
    rows: list[tuple[str, ...]] = [("largest values at the peak", "bytes", "what", "layer", "where")]
    for item in storages:
        layer = cut_middle(item.made_by.layer or "(model)", NAME_COLUMNS - 4)
        name = cut_middle(f"%{item.value}", NAME_COLUMNS)
        rows.append((name, format_bytes(item.num_bytes), item.role.value, layer, item.made_by.location))
    return align(rows, "<><<<")


def _layers_table(decisions: Decisions) -> str:
    """A line per layer; of many layers, those about which most bytes were decided."""
    shown = {layer.path for layer in sorted(decisions.layers, key=lambda layer: -layer.decided_bytes)[:MAX_LAYERS]}
    rows: list[tuple[str, ...]] = [("layer", "kept", "recomputed", "encoded", "in codes", "written over", "extra time")]
    rows += [
        (cut_middle(layer.path or "(model)", LAYER_COLUMNS), *_layer_cells(layer))
        for layer in decisions.layers
        if layer.path in shown
    ]
    rows.append(("all", *_layer_cells(decisions.total)))
    table = align(rows, "<>>>>>>")
    left_out = len(decisions.layers) - len(shown)
    return f"{table}\n({_count(left_out, 'layer')} with less left out)" if left_out > 0 else table


def _layer_cells(layer: LayerDecisions) -> tuple[str, ...]:
    sizes = (layer.kept_bytes, layer.recomputed_bytes, layer.encoded_bytes, layer.code_bytes, layer.written_over_bytes)
    return (*map(size_or_dash, sizes), format_us(layer.extra_us) if layer.extra_us else "-")


def _lists(chosen: LayerDecisions, limit: int | None) -> list[str]:
    lists: tuple[tuple[str, Sequence[Any]], ...] = (
        ("recomputed", chosen.recomputed),
        ("encoded", chosen.encoded),
        ("kept for the backward pass", chosen.kept),
    )
    if limit is None:
        lists += (("written over", chosen.written_over),)
    return [_sentences(title, items, limit) for title, items in lists if items]


def _sentences(title: str, items: Sequence[Any], limit: int | None) -> str:
    """The largest entries of a list, each with its reason."""
    shown = sorted(items, key=lambda item: -item.num_bytes)[:limit]
    lines = [title if len(shown) == len(items) else f"{title}: the {len(shown)} largest of {len(items)} values"]
    for item in shown:
        site = "  ".join(part for part in (item.made_by.layer, item.made_by.location) if part)
        lines.append(cut(f"  %{item.value}  {format_bytes(item.num_bytes)}  {site}".rstrip(), line_columns()))
        lines.append(wrap(item.sentence, "    "))
    return "\n".join(lines)


def _values(count: int, num_bytes: int) -> str:
    return f"{_count(count, 'value')}, {format_bytes(num_bytes)}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
