"""An Inspection as text for the terminal: at most 100 columns, plain characters, the same numbers as its `to_dict`."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.costs.work import Work
from undertow.ir import format_bytes
from undertow.report.columns import align, bar, cut, cut_middle, line_columns, size_or_dash, wrap
from undertow.report.inspection import Inspection, Layer, Memory, Site

LAYER_COLUMNS = 30


def print_inspection(inspection: Inspection) -> str:
    """Memory by layer, arithmetic by layer, what im2col would need, totals."""
    parts = [_memory_table(inspection), _work_table(inspection)]
    if inspection.amplifications:
        parts.append(_amplification_table(inspection))
    parts.append(_totals(inspection))
    if inspection.without_rule:
        parts.append(_without_rule(inspection.without_rule))
    return "\n\n".join(parts)


def _memory_table(inspection: Inspection) -> str:
    largest = max((layer.kept_bytes for layer in inspection.layers), default=0)
    rows: list[tuple[str, ...]] = [("layer", "weights", "output", "kept", "", "kept, needed by")]
    for layer in inspection.layers:
        askers = dict.fromkeys(site.operation for item in layer.kept for site in item.asked_for_by)
        rows.append(
            (
                _title(layer),
                size_or_dash(layer.parameter_bytes),
                size_or_dash(layer.output_bytes),
                size_or_dash(layer.kept_bytes),
                bar(layer.kept_bytes, largest),
                ", ".join(askers),
            )
        )
    rows.append(
        (
            f"{inspection.num_parameters:,} parameters",
            size_or_dash(inspection.parameter_bytes),
            "",
            size_or_dash(inspection.kept_bytes),
        )
    )
    return align(rows, "<>>><<")


def _work_table(inspection: Inspection) -> str:
    rows: list[tuple[str, ...]] = [("layer", "forward", "backward", "other", "moved", "ops/byte", "DRAM")]
    rows += [(_title(layer), *_work_cells(layer.forward, layer.backward)) for layer in inspection.layers]
    rows.append(("all", *_work_cells(inspection.forward, inspection.backward)))
    return align(rows, "<>>>>>>")


def _amplification_table(inspection: Inspection) -> str:
    rows: list[tuple[str, ...]] = [("convolution", "input", "by im2col", "times")]
    rows += [
        (
            cut_middle(item.layer or item.location or "(model)", LAYER_COLUMNS),
            format_bytes(item.input_bytes),
            format_bytes(item.patch_bytes),
            f"{item.factor:.2f}",
        )
        for item in inspection.amplifications
    ]
    inputs = sum(item.input_bytes for item in inspection.amplifications)
    patches = sum(item.patch_bytes for item in inspection.amplifications)
    rows.append(("all", format_bytes(inputs), format_bytes(patches), f"{patches / inputs:.2f}"))
    return align(rows, "<>>>")


def _work_cells(forward: Work, backward: Work) -> tuple[str, ...]:
    both = forward + backward
    return (
        _count(forward.flops, "flop"),
        _count(backward.flops, "flop"),
        _count(both.element_operations, "op"),
        size_or_dash(both.moved_bytes),
        f"{both.operations_per_byte:.1f}" if both.moved_bytes else "-",
        _joules(both.dram_joules),
    )


_ROLES = (
    ("weights", "parameter_bytes"),
    ("buffers", "buffer_bytes"),
    ("batch", "batch_bytes"),
    ("constants", "constant_bytes"),
    ("kept for the backward pass", "kept_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer state", "optimizer_bytes"),
    ("values in use", "other_bytes"),
    ("peak", "peak_bytes"),
)


def _totals(inspection: Inspection) -> str:
    columns: list[tuple[str, Memory]] = [("inference", inspection.inference)]
    if inspection.training is not None:
        columns.append(("training", inspection.training))
    rows: list[tuple[str, ...]] = [("memory at the peak", *(name for name, _ in columns))]
    rows += [
        (title, *(size_or_dash(getattr(memory, role)) for _, memory in columns))
        for title, role in _ROLES
        if role == "peak_bytes" or any(getattr(memory, role) for _, memory in columns)
    ]
    lines = [align(rows, "<" + ">" * len(columns)), ""]
    lines += [
        cut_middle(f"the peak of {name} is at {memory.at}", line_columns()) for name, memory in columns if memory.at
    ]
    more = _training_lines(inspection) if inspection.training else [_NO_GRADIENT]
    return "\n".join([*lines, *map(wrap, more)])


_NO_GRADIENT = "nothing in the model carries a gradient: there is no backward pass"


def _training_lines(inspection: Inspection) -> list[str]:
    whole = inspection.forward + inspection.backward
    num_kept = sum(len(layer.kept) for layer in inspection.layers)
    lines = [
        f"kept for the backward pass: {num_kept} values, {format_bytes(inspection.kept_bytes)}",
        f"read again there, not counted as kept: weights {format_bytes(inspection.reread_parameter_bytes)}, "
        f"batch {format_bytes(inspection.reread_batch_bytes)}",
        f"gradients in the end: {format_bytes(inspection.gradient_bytes)}{_copies(inspection.gradient_copies)}",
        _optimizer_line(inspection),
    ]
    if inspection.gradient_copies is not None and inspection.optimizer_copies is not None:
        copies = 1 + inspection.gradient_copies + inspection.optimizer_copies
        lines.append(
            f"weights, gradients and optimizer state: {format_bytes(round(copies * inspection.parameter_bytes))}"
            f"{_copies(copies)}"
        )
    if inspection.memory_ratio is not None:
        lines.append(f"training / inference memory: {inspection.memory_ratio:.2f} (rule of thumb: 3 to 4)")
    if inspection.flops_ratio is not None:
        lines.append(f"backward / forward flops: {inspection.flops_ratio:.2f} (rule of thumb: 2)")
    lines.append(
        f"one step moves {format_bytes(whole.moved_bytes)} and computes {whole.operations_per_byte:.1f} operations per "
        f"byte; {_joules(whole.dram_joules)} in DRAM"
    )
    return lines


def _optimizer_line(inspection: Inspection) -> str:
    optimizer = inspection.optimizer
    if optimizer is None:
        return "optimizer state: no optimizer was given, none is counted"
    if optimizer.num_bytes is None:
        return f"optimizer state: {optimizer.name}'s is unknown before its first step, none is counted"
    copies = _copies(inspection.optimizer_copies)
    return f"optimizer state: {format_bytes(optimizer.num_bytes)} for {optimizer.name}{copies}"


def _copies(number: float | None) -> str:
    """How many copies of the weights a size is."""
    return "" if number is None else f", {number:.2f} times the weights"


def _without_rule(sites: Sequence[Site]) -> str:
    lines = [wrap("no rule: the derivative is taken through autograd at run time")]
    for site in sites:
        where = "  ".join(part for part in (site.layer, site.location) if part)
        lines.append(cut_middle(f"  {site.operation}  {where}".rstrip(), line_columns()))
    return "\n".join(lines)


def _title(layer: Layer) -> str:
    """`features.0 Conv2d`; a long path loses its middle."""
    kind = cut(layer.kind, LAYER_COLUMNS // 2)
    return f"{cut_middle(layer.path or '(model)', LAYER_COLUMNS - len(kind) - 1)} {kind}".rstrip()


def _count(number: float, unit: str) -> str:
    """Decimal prefixes: `30.9 Gflop`."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.1f} {prefix}{unit}"
    return f"{number:.0f} {unit}" if number else "-"


def _joules(joules: float) -> str:
    for factor, prefix in ((1.0, ""), (1e-3, "m"), (1e-6, "u")):
        if joules >= factor:
            return f"{joules / factor:.1f} {prefix}J"
    return f"{joules / 1e-9:.1f} nJ" if joules else "-"
