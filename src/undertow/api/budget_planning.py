"""Planning a derived Program for a budget: costs, the planner, the check, and the refusal that says what would fit."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from undertow.alternatives.registry import find_alternatives
from undertow.api.budgets import parse_budget
from undertow.api.calls import check_time_limit
from undertow.costs.cache import MAX_COSTS, cache_path, keep_costs, load_costs
from undertow.costs.measuring import measure_costs, model_cost
from undertow.costs.optimizer_state import count_optimizer_state
from undertow.errors import CallError, InfeasibleBudget
from undertow.ir import InputKind, Node, Plan, Program, format_bytes
from undertow.ir.check_plan import check_plan
from undertow.ir.cost import Cost, signature
from undertow.ir.plan import Outcome
from undertow.ops.interpret import NO_LIVE, generator_of, state_type_of
from undertow.ops.updates import SEPARABLE_OPTIMIZERS
from undertow.planner.plan import Planner, make_planner
from undertow.report.peak import find_peak
from undertow.report.timeline import Role, Timeline
from undertow.runtime.cuda_graphs import is_for_graph, with_graph_memory, workspace_bytes


class CostSource(StrEnum):
    """Where the times of operations come from."""

    MEASURED = "measured"
    MODEL = "model"


class Numerics(StrEnum):
    """Which kernels may run: those with eager's bits, or also those that round otherwise within a stated bound.

    `bf16` is `fast` for a forward pass in bfloat16 (see `precision`).
    """

    EXACT = "exact"
    FAST = "fast"
    BF16 = "bf16"


class Preference(StrEnum):
    """By what a kernel is chosen, where several may run."""

    TIME = "time"
    WORKSPACE = "workspace"


@dataclass(frozen=True)
class Terms:
    """What a plan is to keep to. Without a budget nothing is searched and nothing is measured.

    `table` holds the measured costs that plans were made from; those that are in it beforehand are not measured again.
    """

    budget_bytes: int | None = None
    optimizer: torch.optim.Optimizer | None = field(default=None, repr=False)
    costs: CostSource = CostSource.MEASURED
    time_limit_s: float = math.inf
    numerics: Numerics = Numerics.EXACT
    table: dict[str, Cost] = field(default_factory=dict, repr=False, compare=False)
    allows_other_bits: bool = False
    preference: Preference = Preference.TIME


def parse_terms(
    *,
    budget: int | str | None,
    optimizer: torch.optim.Optimizer | None,
    costs: str | Mapping[str, tuple[int, int]],
    time_limit_s: float,
    numerics: str,
    allow_other_bits: bool,
) -> Terms:
    """The terms that a user named; `costs` may be those that another step was planned from."""
    check_time_limit(time_limit_s)
    return Terms(
        None if budget is None else parse_budget(budget),
        optimizer,
        parse_costs(costs) if isinstance(costs, str) else CostSource.MEASURED,
        time_limit_s,
        parse_numerics(numerics),
        {} if isinstance(costs, str) else {key: Cost(*cost) for key, cost in costs.items()},
        allow_other_bits,
    )


def parse_numerics(numerics: str) -> Numerics:
    """The numerics that a user named."""
    if numerics not in list(Numerics):
        names = ", ".join(f'"{name}"' for name in Numerics)
        raise CallError(f"numerics must be one of {names}, got {numerics!r}")
    return Numerics(numerics)


def parse_costs(costs: str) -> CostSource:
    """The source of costs that a user named."""
    if costs not in list(CostSource):
        raise CallError(f'costs must be "measured" or "model", got {costs!r}')
    return CostSource(costs)


def held_bytes(
    model: torch.nn.Module, program: Program, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """What a step holds from its start to its end, by what it is; each storage counts once."""
    held = {
        "parameters": _storage_bytes(model.parameters()),
        "buffers": _storage_bytes(model.buffers()),
        "batch": sum(item.value.type.allocated_bytes for item in program.inputs if item.kind is InputKind.ARGUMENT),
        "constants": sum(
            item.value.type.allocated_bytes
            for item in program.inputs
            if item.kind in (InputKind.CONSTANT, InputKind.ATTRIBUTE)
        ),
        "prepared weights": sum(
            item.value.type.allocated_bytes for item in program.inputs if item.kind is InputKind.PREPARED
        ),
    }
    if program.cotangents or any(node.operation.is_guard for node in program.first_pass):
        # Kept with every forward pass, so that a second backward pass, or another way at a branch, can run it again.
        drawing = {generator_of(node): node for node in program.first_pass if node.operation.is_random}
        held["generator states"] = sum(state_type_of(node).num_bytes for node in drawing.values())
    if optimizer is not None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        held["optimizer state"] = count_optimizer_state(optimizer, trained).num_bytes or 0
    device = next((item.value.tensor_type.device for item in program.inputs), torch.device("cpu"))
    if device.type == "cuda":  # for the stream of captures too; autograd runs a backward pass in a thread of its own
        held["cuBLAS workspaces"] = workspace_bytes(device) * (3 if program.cotangents else 2)
    return {name: size for name, size in held.items() if size}


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What storages take; on CUDA the blocks they were given, which may be up to a MiB larger."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    blocks: dict[int, int] = {}
    if any(storage.device.type == "cuda" for storage in storages.values()):
        segments = torch.cuda.memory_snapshot()
        blocks = {block["address"]: block["size"] for segment in segments for block in segment["blocks"]}
    return sum(blocks.get(address, storage.nbytes()) for address, storage in storages.items())


def make_budget_planner(
    program: Program, held: Mapping[str, int], terms: Terms, live: Mapping[str, Any] = NO_LIVE
) -> Planner:
    """Measure what is not known yet, and find the curve of the step."""
    alternatives = find_alternatives(program)
    nodes = [*program.nodes, *(alternative.node for alternative in alternatives)]
    for node in nodes:
        if node.operation.compile is not None:
            node.operation.compile()
    cost_of = _cost_table(nodes, terms, live)
    return make_planner(
        program,
        alternatives,
        cost_of,
        held,
        has_measured_costs=terms.costs is CostSource.MEASURED,
        time_limit_s=terms.time_limit_s,
    )


def measured_costs(terms: Terms, nodes: Sequence[Node]) -> Callable[[Node], Cost]:
    """The measured cost of nodes such as these; kernels are chosen by it whatever the plan is made from."""
    return _cost_table(list(nodes), replace(terms, costs=CostSource.MEASURED), NO_LIVE)


def _cost_table(nodes: list[Node], terms: Terms, live: Mapping[str, Any]) -> Callable[[Node], Cost]:
    known = terms.table
    parts = {node: node.operation.parts(node, live) for node in nodes if node.operation.parts is not None}
    nodes = nodes + [part for found in parts.values() for part in found.nodes]
    if terms.costs is CostSource.MEASURED:
        device = next((value.tensor_type.device for node in nodes for value in node.named_outputs), torch.device("cpu"))
        path = cache_path(device)
        cached = load_costs(path)
        given = dict(known)
        keys = {signature(node) for node in nodes}
        known.update({key: cached[key] for key in keys if key in cached and key not in given})
        # A given table may come from another machine: what is kept for this one is what was measured here.
        if measure_costs(nodes, known, live, _show_progress):
            known.update(keep_costs(path, {key: known[key] for key in known if key not in given and key not in cached}))
    found = {key: known[key] for node in nodes if (key := signature(node)) in known}
    for key in list(known)[:-MAX_COSTS]:
        del known[key]

    def cost_of(node: Node) -> Cost:
        if node.operation.costs_nothing:
            return Cost(0, 0)
        if node.operation.parts is not None:
            whole = parts[node] if node in parts else node.operation.parts(node, live)
            return whole.combine([cost_of(part) for part in whole.nodes])
        key = signature(node)
        if key not in found:
            found[key] = known[key] if key in known else model_cost(node)
        return found[key]

    return cost_of


def _show_progress(items: list[Any]) -> Iterable[Any]:
    """Go through what is to be timed, with a bar where somebody watches: the first plan on a machine takes longest."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, "timing operations on this machine", console=Console(stderr=True), transient=True)


def notes_of(program: Program) -> tuple[str, ...]:
    """What the plan of a program cannot see."""
    names = {node.name for node in program.nodes if node.operation.runs_user_code}
    if not names:
        return ()
    return (f"what custom autograd Functions keep and allocate inside is not counted: {', '.join(sorted(names))}",)


# The whole step as a Program, by the kernels that the terms prefer, and what it holds throughout.
DeriveStep = Callable[[Terms], tuple[Program, Mapping[str, int]]]


def plan_for_budget(derive_step: DeriveStep, terms: Terms, live: Mapping[str, Any]) -> tuple[Plan, Planner]:
    """The checked plan within the budget, and the planner it is from.

    Raises InfeasibleBudget with the least that would do. Where kernels may round otherwise, those of least workspace
    are tried before that: they are planned with if `terms` allow other bits, and named by the refusal if not.
    """
    program, held = derive_step(terms)
    planner = make_budget_planner(program, held, terms, live)
    plan, notes = find_plan(planner, terms.budget_bytes), notes_of(program)
    if plan is None:
        smaller = _smaller_kernels(program, derive_step, terms, live)
        plan = find_plan(smaller, terms.budget_bytes) if smaller is not None and terms.allows_other_bits else None
        if smaller is None or plan is None:
            raise _refusal(planner, smaller, terms)
        planner = smaller
        notes += ("the fastest kernels do not fit: those of least workspace run, and round otherwise",)
    plan = _leave_room_for_graph(planner, plan)
    return replace(check_plan(plan), notes=notes), planner


def _leave_room_for_graph(planner: Planner, plan: Plan) -> Plan:
    """A plan that also fits when it runs as a CUDA graph; `plan` itself where there is none, or none is captured."""
    budget_bytes, smaller = plan.budget_bytes, plan
    while is_for_graph(smaller):
        whole = with_graph_memory(smaller)
        if budget_bytes is None or whole.peak_bytes <= budget_bytes:
            outcome = plan.outcome if smaller is plan else Outcome.FEASIBLE
            return replace(whole, budget_bytes=budget_bytes, lower_bound_ns=plan.lower_bound_ns, outcome=outcome)
        wanted_bytes = max(smaller.peak_bytes - (whole.peak_bytes - budget_bytes), planner.smallest.peak_bytes)
        if wanted_bytes >= smaller.peak_bytes:
            break
        found = find_plan(planner, wanted_bytes)
        assert found is not None
        smaller = found
    return plan


def find_plan(planner: Planner, budget_bytes: int | None) -> Plan | None:
    """The plan within a budget, not checked yet; None where the least found is more."""
    if budget_bytes is not None and budget_bytes < planner.smallest.peak_bytes:
        return None
    return planner.plan_within(budget_bytes)


def _smaller_kernels(
    program: Program, derive_step: DeriveStep, terms: Terms, live: Mapping[str, Any]
) -> Planner | None:
    """The planner of the step by kernels of least workspace; None where those are the kernels of `program`."""
    if terms.numerics is Numerics.EXACT:
        return None
    terms = replace(terms, preference=Preference.WORKSPACE)
    other, held = derive_step(terms)
    if [signature(node) for node in other.nodes] == [signature(node) for node in program.nodes]:
        return None
    return make_budget_planner(other, held, terms, live)


def _refusal(planner: Planner, smaller: Planner | None, terms: Terms) -> InfeasibleBudget:
    least, lower_bound_bytes = planner.smallest, planner.curve.lower_bound_peak_bytes
    budget_bytes = terms.budget_bytes
    assert budget_bytes is not None
    peak = find_peak(Timeline(least))
    parts = dict(peak.parts)
    breakdown = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak.parts if size)
    place = f" at {peak.at.operation} {peak.at.layer} {peak.at.location}".rstrip() if peak.at is not None else ""
    other_bits = None if smaller is None else smaller.smallest.peak_bytes
    if other_bits is not None and other_bits >= least.peak_bytes:
        other_bits = None
    ways = _ways_out(least, parts, other_bits, terms)
    message = (
        f"the budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) cannot be met: the least found is "
        f"{format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), and less than "
        f"{format_bytes(lower_bound_bytes)} is impossible. At the peak{place}: {breakdown}. "
        f"What would fit: {'; '.join(ways)}"
    )
    return InfeasibleBudget(message, least.peak_bytes, lower_bound_bytes, other_bits)


def _ways_out(least: Plan, parts: Mapping[str, int], other_bits: int | None, terms: Terms) -> list[str]:
    """What would fit, each with about how much it needs; `parts` are those of the least plan's peak."""
    gradients = parts.get(Role.GRADIENT.value, 0)
    state = parts.get("optimizer state", 0)
    lasting = sum(least.held.values()) - parts.get("batch", 0) + gradients
    passing = max(least.peak_bytes - lasting, 0)
    ways = [f"a budget of {format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes)"]
    if other_bits is not None:
        ways.append(
            f"allow_other_bits=True, which takes kernels of less workspace and changes bits: "
            f"{format_bytes(other_bits)} ({other_bits} bytes)"
        )
    ways.append(f"half the batch: about {format_bytes(lasting + passing // 2)}")
    if gradients:
        rest = format_bytes(least.peak_bytes - gradients)
        names = ", ".join(kind.__name__ for kind in SEPARABLE_OPTIMIZERS)
        ways.append(
            f"ut.train_step with an optimizer ({names}) and neither clip_norm nor accumulate, which updates inside the "
            f"backward pass: about {rest}"
        )
    weights = [item.value.tensor_type.dtype for item in least.program.inputs if item.kind is InputKind.PARAMETER]
    if torch.float32 in weights and terms.numerics is not Numerics.BF16:
        ways.append(f'numerics="bf16", with float32 weights: about {format_bytes(lasting + passing // 2)}')
    if torch.float32 in weights:
        ways.append(f"model.bfloat16(): about {format_bytes(least.peak_bytes // 2)}")
    if state:
        ways.append(f"an optimizer without state: {format_bytes(least.peak_bytes - state)}")
    return ways
