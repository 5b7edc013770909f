"""Plans that were tampered with: the checker refuses each, and says what is wrong."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import undertow as ut
from undertow.api.training import make_step
from undertow.errors import PlanError
from undertow.ir import Node, Origin, Phase, Task, map_values
from undertow.ir.check_plan import check_plan
from undertow.ir.pytorch import operation_of
from undertow.pipeline import derive, find_planner, record
from undertow.terms import CostSource, Terms


@pytest.fixture(scope="module")
def plan():
    """A training step with little memory: operations run again, one of them dropout, and updates run inside."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.3))]
    model = nn.Sequential(*layers, nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(512, 64), torch.randint(64, (512,))
    terms = Terms(optimizer=optimizer, costs=CostSource.MODEL)
    step = make_step(model, 1, nn.functional.cross_entropy, optimizer, terms)
    program = derive(step.request, record(step.request, (x, y), {}).program, ())
    planner = find_planner(step.request, program, step.request.live)
    plan = check_plan(planner.plan_within(planner.smallest.peak_bytes * 22 // 20))
    assert sum(first is not None for first in plan.tables.offsets) > 20
    assert plan.recomputed and any(node.operation.repeats for node in plan.nodes)
    assert any(node.phase is Phase.UPDATE for node in plan.nodes)
    return plan


def with_tables(plan, **changes):
    return replace(plan, tables=replace(plan.tables, **changes))


def swapped(items, left, right):
    items = list(items)
    items[left], items[right] = items[right], items[left]
    return tuple(items)


def moved(plan, source, place):
    """The plan with the node at `source` moved before the one at `place`, in all tables."""

    def move(items):
        items = list(items)
        items.insert(place if place < source else place - 1, items.pop(source))
        return tuple(items)

    tables = replace(
        plan.tables,
        frees=move(plan.tables.frees),
        workspace_bytes=move(plan.tables.workspace_bytes),
        duration_ns=move(plan.tables.duration_ns),
    )
    program = replace(plan.program, nodes=move(plan.program.nodes))
    return replace(plan, program=program, bases=move(plan.bases), live_bytes=move(plan.live_bytes), tables=tables)


def inserted(plan, place, node, base):
    """The plan with one more node, which makes the outputs of node `base` of the original again."""

    def insert(items, item):
        return (*items[:place], item, *items[place:])

    original = plan.base.nodes[base[0]].named_outputs
    storage = dict(plan.tables.storage)
    storage |= {new: storage[old] for new, old in zip(node.named_outputs, original, strict=True)}
    tables = replace(
        plan.tables,
        storage=storage,
        frees=insert(plan.tables.frees, ()),
        workspace_bytes=insert(plan.tables.workspace_bytes, 0),
        duration_ns=insert(plan.tables.duration_ns, 0),
    )
    return replace(
        plan,
        program=replace(
            plan.program,
            nodes=insert(plan.program.nodes, node),
            boundary=plan.program.boundary + 1,
        ),
        bases=insert(plan.bases, base),
        repeats=plan.repeats | dict(zip(node.named_outputs, original, strict=True)),
        live_bytes=insert(plan.live_bytes, plan.live_bytes[place - 1]),
        tables=tables,
    )


def with_node(plan, position, node):
    nodes = list(plan.program.nodes)
    nodes[position] = node
    return replace(plan, program=replace(plan.program, nodes=tuple(nodes)))


def test_the_plan_itself_is_sound(plan):
    assert check_plan(plan) is plan


def test_freed_too_early(plan):
    frees = [list(row) for row in plan.tables.frees]
    storage, late = next((row[0], index) for index, row in enumerate(frees) if row and index > 20)
    born = next(i for i, n in enumerate(plan.nodes) if storage in {plan.tables.storage[v] for v in n.named_outputs})
    reader = next(n for n in plan.nodes[born + 1 :] if storage in {plan.tables.storage[item] for item in n.inputs})
    frees[late].remove(storage)
    frees[born].append(storage)
    size = plan.tables.storage_bytes[storage]
    live = tuple(held - size * (born < index <= late) for index, held in enumerate(plan.live_bytes))
    with pytest.raises(PlanError, match=rf"{reader.name}.*reads %.*freed after operation {born}"):
        check_plan(replace(with_tables(plan, frees=tuple(map(tuple, frees))), live_bytes=live))


def test_never_freed(plan):
    frees = [list(row) for row in plan.tables.frees]
    next(row for row in frees if row).pop()
    with pytest.raises(PlanError, match=r"bytes are held|never freed"):
        check_plan(with_tables(plan, frees=tuple(map(tuple, frees))))


def test_freed_twice(plan):
    frees = [list(row) for row in plan.tables.frees]
    first = next(index for index, row in enumerate(frees) if row)
    frees[first] += frees[first][:1]
    with pytest.raises(PlanError, match="which is not there"):
        check_plan(with_tables(plan, frees=tuple(map(tuple, frees))))


def test_overlapping_bytes(plan):
    offsets = list(plan.tables.offsets)
    sizes = plan.tables.storage_bytes
    large = [index for index, size in enumerate(sizes) if size > 100_000 and offsets[index] is not None]
    for index in large:
        offsets[index] = 0
    with pytest.raises(PlanError, match=r"overlaps %\w+.* in memory: bytes \d+ to \d+"):
        check_plan(with_tables(plan, offsets=tuple(offsets)))


def test_an_arena_that_raises_the_peak(plan):
    offsets = list(plan.tables.offsets)
    last = max(first for first in offsets if first is not None)
    offsets[offsets.index(last)] += 64 * 1024
    with pytest.raises(PlanError, match="bytes are held with all of the arena, the peak is"):
        check_plan(with_tables(plan, offsets=tuple(offsets)))


def test_outside_of_the_arena_without_room(plan):
    offsets = list(plan.tables.offsets)
    offsets[offsets.index(0)] = None
    with pytest.raises(PlanError, match="bytes are held with all of the arena, the peak is"):
        check_plan(with_tables(plan, offsets=tuple(offsets)))


def test_without_an_arena_a_plan_is_sound(plan):
    check_plan(with_tables(plan, offsets=(None,) * len(plan.tables.offsets)))


@pytest.mark.parametrize(
    ("value_of", "message"),
    [
        (lambda program: program.inputs[0].value, "is the user's, and lies in the step's arena"),
        (lambda program: program.outputs[0], "is a result of the step, which outlives it, and lies in its arena"),
    ],
    ids=["input", "output"],
)
def test_what_is_not_the_steps_in_its_arena(plan, value_of, message):
    offsets = list(plan.tables.offsets)
    offsets[plan.tables.storage[value_of(plan.program)]] = 0
    with pytest.raises(PlanError, match=message):
        check_plan(with_tables(plan, offsets=tuple(offsets)))


def test_recomputing_from_an_overwritten_input(plan):
    writer = next(
        index
        for index, node in enumerate(plan.nodes)
        if getattr(node.target, "_schema", None) is not None
        and node.target._schema.name.endswith("_")
        and any(node.args[0] in other.inputs for other in plan.nodes[:index])
    )
    overwritten = plan.nodes[writer].args[0]
    first = next(i for i, node in enumerate(plan.nodes[:writer]) if overwritten in node.inputs and node.named_outputs)
    again = tuple(replace(value, name=f"{value.name}_late") for value in plan.nodes[first].named_outputs)
    late = replace(plan.nodes[first], outputs=again)
    with pytest.raises(PlanError, match=rf"{late.name}.*reads {overwritten}, which .* overwrote"):
        check_plan(inserted(plan, writer + 1, late, plan.bases[first]))


def test_reading_a_parameter_that_was_updated(plan):
    update = next(i for i, node in enumerate(plan.nodes) if node.phase is Phase.UPDATE)
    (parameter,) = plan.nodes[update].operation.writes(plan.nodes[update])
    first = next(i for i, node in enumerate(plan.nodes) if parameter in node.inputs)
    again = [replace(value, name=f"{value.name}_late") for value in plan.nodes[first].named_outputs]
    late = replace(plan.nodes[first], outputs=tuple(again))
    with pytest.raises(PlanError, match=rf"{late.name}.*reads {parameter}, which .*update_sgd.* overwrote"):
        check_plan(inserted(plan, update + 1, late, plan.bases[first]))


def test_replayed_with_the_wrong_state(plan):
    replays = [i for i, node in enumerate(plan.nodes) if node.operation.repeats]
    states = [value for node in plan.nodes if node.task is Task.RECORD_STATE for value in node.outputs]
    position = replays[0]
    node = plan.nodes[position]
    others = [state for state in states if state is not node.args[0]]
    if others:
        wrong = replace(node, args=(others[0], *node.args[1:]))
        with pytest.raises(PlanError, match="wrong state|reads %"):
            check_plan(with_node(plan, position, wrong))
    unstated = replace(node, operation=node.operation.repeats, args=node.args[1:])
    with pytest.raises(PlanError, match="without the state|bytes are held|never freed|freed"):
        check_plan(with_node(plan, position, unstated))


def test_a_state_recorded_at_another_moment():
    class Sampling(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(torch.distributions.Gamma(x.exp(), 1.0).rsample())

    settings = {"loss": lambda y: y.square().mean(), "budget": "1MiB", "costs": "model"}
    plan = ut.train_step(nn.Sequential(nn.Linear(8, 8), Sampling()), (torch.randn(16, 8),), **settings).plan
    state = next(i for i, node in enumerate(plan.nodes) if node.task is Task.RECORD_STATE and plan.bases[i])
    draw = next(i for i, node in enumerate(plan.nodes) if i > state and node.operation.draws(node))
    with pytest.raises(PlanError, match="out of the order of draws and guards"):
        check_plan(moved(plan, state, draw + 1))


def test_wrong_order(plan):
    position = next(
        index
        for index in range(1, len(plan.nodes))
        if set(plan.nodes[index].inputs) & set(plan.nodes[index - 1].named_outputs)
    )
    with pytest.raises(PlanError, match="before it is assigned"):
        check_plan(moved(plan, position, position - 1))


def test_other_arguments(plan):
    position = next(i for i, node in enumerate(plan.nodes) if node.name == "addmm")
    node = plan.nodes[position]
    values = list(dict.fromkeys(node.inputs))
    change = {values[0]: values[0], values[1]: values[1], values[2]: values[2]}
    other = next(
        item.value for item in plan.program.inputs if item.value.type == values[0].type and item.value is not values[0]
    )
    change[values[0]] = other
    with pytest.raises(PlanError, match="other arguments"):
        check_plan(with_node(plan, position, replace(node, args=map_values(node.args, lambda value: change[value]))))


def test_more_bytes_than_the_plan_says(plan):
    low = tuple(size - 64 for size in plan.live_bytes)
    with pytest.raises(PlanError, match="bytes are held, the plan says"):
        check_plan(replace(plan, live_bytes=low))


def test_over_the_budget(plan):
    with pytest.raises(PlanError, match="more than the budget"):
        check_plan(replace(plan, budget_bytes=plan.peak_bytes - 1))


def test_a_result_that_is_not_there(plan):
    outputs = tuple(item.value for item in plan.program.inputs if item.kind.value == "argument")[:1]
    with pytest.raises(PlanError, match="outputs differ"):
        check_plan(replace(plan, program=replace(plan.program, outputs=outputs)))


def test_tables_that_do_not_fit(plan):
    with pytest.raises(PlanError, match="entries for"):
        check_plan(with_tables(plan, frees=plan.tables.frees[:-1]))
    with pytest.raises(PlanError, match="has no storage"):
        check_plan(with_tables(plan, storage={}))


def test_bytes_that_the_inputs_show(plan):
    for held in ({}, {"batch": sum(plan.held.values()) // 2}, {**plan.held, "more": -1}):
        change = sum(held.values()) - sum(plan.held.values())
        live_bytes = tuple(size + change for size in plan.live_bytes)
        with pytest.raises(PlanError, match="held throughout"):
            check_plan(replace(plan, held=held, live_bytes=live_bytes))


@pytest.mark.parametrize("move", [lambda first: first + 32, lambda first: first + 2**40])
def test_a_place_that_cannot_be(plan, move):
    offsets = tuple(None if first is None else move(first) for first in plan.tables.offsets)
    with pytest.raises(PlanError, match="a storage lies at byte"):
        check_plan(with_tables(plan, offsets=offsets))


@pytest.mark.parametrize("lower_bound_ns", [-1, 2**50])
def test_a_bound_that_is_none(plan, lower_bound_ns):
    with pytest.raises(PlanError, match="the bound of"):
        check_plan(replace(plan, lower_bound_ns=lower_bound_ns))


def test_other_arguments_of_an_operation_in_place():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    settings = {"loss": lambda out: out.pow(3).mean(), "budget": "1MiB", "costs": "model"}
    plan = ut.train_step(model, (torch.randn(16, 8),), **settings).plan
    position = next(i for i, node in enumerate(plan.nodes) if node.name == "pow_.Scalar")
    node = plan.nodes[position]
    assert plan.base.nodes[plan.bases[position][0]].name == "pow.Tensor_Scalar"
    with pytest.raises(PlanError, match="other arguments"):
        check_plan(with_node(plan, position, replace(node, args=(node.args[0], 7.0))))
    other = replace(node, operation=operation_of(torch.ops.aten.mul_.Scalar))
    with pytest.raises(PlanError, match="another operation"):
        check_plan(with_node(plan, position, other))


def test_an_update_that_does_not_run(plan):
    position = next(i for i, node in enumerate(plan.nodes) if node.phase is Phase.UPDATE)

    def without(items):
        return tuple(item for index, item in enumerate(items) if index != position)

    frees = list(plan.tables.frees)
    frees[position - 1] = (*frees[position - 1], *frees[position])
    tables = replace(
        plan.tables,
        frees=without(frees),
        workspace_bytes=without(plan.tables.workspace_bytes),
        duration_ns=without(plan.tables.duration_ns),
    )
    program = replace(plan.program, nodes=without(plan.program.nodes), boundary=plan.program.boundary - 1)
    broken = replace(
        plan, program=program, bases=without(plan.bases), live_bytes=without(plan.live_bytes), tables=tables
    )
    with pytest.raises(PlanError, match="update_sgd"):
        check_plan(broken)


def test_budgeted_plans_of_the_public_functions_are_checked():
    planned = ut.plan(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.randn(4, 8),), budget="1MiB", costs="model")
    assert check_plan(planned.plan) is planned.plan


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_attention_draws_where_something_is_dropped_out(kind, probability):
    overload = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default
    others = {item.name: None for item in overload._schema.arguments[3:]}
    node = Node(operation_of(overload), (None,) * 3, others | {"dropout_p": probability}, (), Origin())
    assert node.operation.is_random and node.operation.draws(node) == (probability > 0)
