"""What a plan decided, on programs so small that every number is known by hand."""

import json

import pytest
import torch

from undertow.errors import CallError
from undertow.ir import Gradient, Input, InputKind, Node, Origin, Outcome, Phase, Program, Task, TensorType, Value
from undertow.ir.cost import Cost
from undertow.ir.pytorch import operation_of
from undertow.memory.tables import make_plan
from undertow.ops.own import GENERATOR_STATE, kernel, replayed
from undertow.report.decisions import Reason, is_within
from undertow.report.plan_summary import explain, module_paths, plan_to_dict, print_plan
from undertow.report.reasons import find_decisions
from undertow.report.timeline import Timeline

aten = torch.ops.aten
CPU = torch.device("cpu")
UNIT = 4000  # bytes of a value
KIND = TensorType(torch.float32, (1000,), (1,), CPU)
CODE_KIND = TensorType(torch.uint8, (125,), (1,), CPU)
STATE_KIND = TensorType(torch.uint8, (5056,), (1,), CPU)
PACK = kernel("pack_signs", lambda x: x)
SELECT = kernel("select_by_bits", lambda ct, code: ct)
NODE_US = 10
HELD = {"parameters": 1000, "batch": UNIT}


class Example:
    """x -> a = cos(x) -> b = exp(a) -> c = relu(b) -> d = bernoulli(c) and back; derivatives read results."""

    def __init__(self):
        names = ("x", "a", "b", "c", "d", "ct_d", "ct_c", "ct_b", "ct_a", "ct_x", "a_again", "b_again", "d_again")
        self.values = {name: Value(name, KIND) for name in names}
        self.values["c_code"] = Value("c_code", CODE_KIND)
        self.values["state"] = Value("state", STATE_KIND)

    def node(self, target, reads, makes, layer, derived_from="", task=Task.FIRST):
        arguments = tuple(self.values.get(name, name) for name in reads)
        phase = Phase.BACKWARD if derived_from and task is not Task.ENCODE else Phase.FORWARD
        return Node(target, arguments, {}, (self.values[makes],), Origin(layer, "net.py", 7, derived_from), phase, task)

    def program(self, nodes, num_forward):
        return Program(
            inputs=(Input(self.values["x"], InputKind.ARGUMENT, "x"),),
            nodes=tuple(nodes),
            outputs=(self.values["d"],),
            boundary=num_forward,
            cotangents=(Input(self.values["ct_d"], InputKind.COTANGENT, "d"),),
            gradients=(Gradient(self.values["x"], self.values["ct_x"]),),
        )

    def base(self):
        node = self.node
        forward = [
            node(aten.cos.default, ["x"], "a", "block.first"),
            node(aten.exp.default, ["a"], "b", "block.second"),
            node(aten.relu.default, ["b"], "c", "relu"),
            node(aten.bernoulli.default, ["c"], "d", "noise"),
        ]
        backward = [
            node(aten.mul.Tensor, ["ct_d", "c"], "ct_c", "noise", "d"),
            node(aten.threshold_backward.default, ["ct_c", "c", 0], "ct_b", "relu", "c"),
            node(aten.mul.Tensor, ["ct_b", "b"], "ct_a", "block.second", "b"),
            node(aten.mul.Tensor, ["ct_a", "a"], "ct_x", "block.first", "a"),
        ]
        return self.program([*forward, *backward], 4)

    def planned(self):
        """a and b are made again, a for b and for its own derivative. The ReLU's derivative reads c as a code."""
        node = self.node
        first = self.base().nodes
        nodes = [
            *first[:3],
            node(PACK, ["c"], "c_code", "relu", "c", Task.ENCODE),
            first[3],
            first[4],
            node(SELECT, ["ct_c", "c_code"], "ct_b", "relu", "c", Task.READ_CODE),
            node(aten.cos.default, ["x"], "a_again", "block.first", task=Task.AGAIN),
            node(aten.exp.default, ["a_again"], "b_again", "block.second", task=Task.AGAIN),
            node(aten.mul.Tensor, ["ct_b", "b_again"], "ct_a", "block.second", "b"),
            node(aten.mul.Tensor, ["ct_a", "a_again"], "ct_x", "block.first", "a"),
        ]
        bases = [(base,) for base in (0, 1, 2, 5, 3, 4, 5, 0, 1, 6, 7)]
        repeats = {self.values["a_again"]: self.values["a"], self.values["b_again"]: self.values["b"]}
        return self.program(nodes, 5), bases, repeats


def plan_of(budget_bytes=None, **about):
    example = Example()
    program, bases, repeats = example.planned()
    return make_plan(
        program,
        base=example.base(),
        bases=bases,
        repeats=repeats,
        cost_of=lambda node: Cost(NODE_US * 1000, 100),
        held=HELD,
        budget_bytes=budget_bytes,
        outcome=Outcome.FEASIBLE,
        lower_bound_ns=100_000,
        **about,
    )


def test_bytes_of_every_moment_agree_with_the_plan():
    plan = plan_of()
    timeline = Timeline(plan)
    for position, live in enumerate(plan.live_bytes):
        alive = [life for life in timeline.lives if 0 <= life.first <= position <= life.last]
        assert sum(life.num_bytes for life in alive) + sum(HELD.values()) + 100 == live


def test_kept_recomputed_and_encoded_values():
    total = find_decisions(plan_of()).total
    assert [(item.value, item.num_bytes, item.made_by.layer) for item in total.kept] == [("c", UNIT, "relu")]
    assert [site.operation for site in total.kept[0].asked_for_by] == ["bernoulli"]
    assert (total.kept[0].first, total.kept[0].last, total.kept[0].recompute_us) == (0, 5, NODE_US)
    made_again = {item.value: item for item in total.recomputed}
    assert set(made_again) == {"a", "b"}
    assert (made_again["b"].saved_bytes, made_again["b"].extra_us) == (UNIT, NODE_US)
    assert (made_again["a"].made_again_at, made_again["b"].made_again_at) == (7, 8)
    (code,) = total.encoded
    assert (code.value, code.num_bytes, code.code_bytes, code.extra_us) == ("c", UNIT, 125, NODE_US)
    assert (code.encoded_at, code.read_at, code.encoding) == (3, 6, "pack_signs")
    assert total.extra_us == 3 * NODE_US
    assert total.recomputed_bytes == 2 * UNIT


def test_results_written_over_their_arguments():
    total = find_decisions(plan_of()).total
    over = {item.value: item.over for item in total.written_over}
    assert over["b"] == "a" and over["c"] == "b"
    assert all(item.num_bytes == UNIT and item.reason is Reason.READ_NO_MORE for item in total.written_over)


def reasons(plan):
    return {item.value: item.reason for item in find_decisions(plan).total.recomputed}


def test_the_reason_is_the_budget_where_the_value_would_not_fit():
    # b is given up after operation 1, where c is written over it, and is made again at 8. a is missing from 1 to 6.
    fullest = max(plan_of().live_bytes[2:8])
    assert reasons(plan_of())["b"] is Reason.NOT_FORCED
    assert reasons(plan_of(fullest + UNIT - 1))["b"] is Reason.OVER_BUDGET
    assert reasons(plan_of(fullest + UNIT))["b"] is Reason.TOGETHER_OVER_BUDGET
    assert reasons(plan_of(fullest + 2 * UNIT - 1))["b"] is Reason.TOGETHER_OVER_BUDGET
    assert reasons(plan_of(fullest + 2 * UNIT))["b"] is Reason.NOT_FORCED


def test_a_value_made_again_only_for_another_saves_nothing():
    example = Example()
    program, bases, repeats = example.planned()
    nodes = list(program.nodes)
    nodes[10] = example.node(aten.neg.default, ["ct_a"], "ct_x", "block.first", "a")
    plan = make_plan(example.program(nodes, 5), base=example.base(), bases=bases, repeats=repeats, budget_bytes=1)
    made_again = find_decisions(plan).total.recomputed
    # exp writes over the result of cos: one storage, one decision, two operations.
    assert [(item.value, item.saved_bytes, item.num_operations) for item in made_again] == [("b", UNIT, 2)]
    nodes[9] = example.node(aten.mul.Tensor, ["ct_b", "c"], "ct_a", "block.second", "b")
    nodes[8] = example.node(aten.cat.default, ["a_again"], "b_again", "block.second", task=Task.AGAIN)
    plan = make_plan(example.program(nodes, 5), base=example.base(), bases=bases, repeats=repeats, budget_bytes=1)
    chain = next(item for item in find_decisions(plan).total.recomputed if item.value == "a")
    assert (chain.saved_bytes, chain.reason) == (0, Reason.PART_OF_CHAIN)


def test_a_replayed_operation_names_its_recorded_state():
    example = Example()
    node = example.node
    nodes = list(example.base().nodes)
    state = node(GENERATOR_STATE, ["generator"], "state", "noise", task=Task.RECORD_STATE)
    repeated = replayed(operation_of(aten.bernoulli.default), CPU)
    again = node(repeated, ["state", "c"], "d_again", "noise", task=Task.AGAIN)
    reader = node(aten.mul.Tensor, ["ct_d", "d_again"], "ct_c", "noise", "d")
    program = example.program([*nodes[:3], state, nodes[3], again, reader, *nodes[5:]], 5)
    plan = make_plan(
        program,
        base=example.base(),
        bases=[(0,), (1,), (2,), (), (3,), (3,), (4,), (5,), (6,), (7,)],
        repeats={example.values["d_again"]: example.values["d"]},
    )
    (item,) = find_decisions(plan).total.recomputed
    assert item.state_bytes == 5056 and item.made_by.operation == "bernoulli replayed"
    assert "generator's state" in item.sentence


@pytest.mark.parametrize("budget_bytes", [None, 20_000])
def test_the_parts_at_the_peak_sum_to_it(budget_bytes):
    plan = plan_of(budget_bytes)
    peak = find_decisions(plan).peak
    assert sum(size for _, size in peak.parts) == peak.num_bytes == plan.peak_bytes
    assert dict(peak.parts)["parameters"] == 1000 and dict(peak.parts)["workspace"] == 100
    assert all(item.first <= peak.position <= item.last for item in peak.largest)
    assert [item.num_bytes for item in peak.largest] == sorted((item.num_bytes for item in peak.largest), reverse=True)


def test_layers_partition_the_decisions():
    decisions = find_decisions(plan_of())
    assert {layer.path for layer in decisions.layers} >= {"block.first", "block.second", "relu"}
    for name in ("kept", "recomputed", "encoded", "written_over"):
        assert sum(len(getattr(layer, name)) for layer in decisions.layers) == len(getattr(decisions.total, name))
    inside = decisions.within("block")
    assert {item.value for item in inside.recomputed} == {"a", "b"} and not inside.kept
    assert is_within("block.first", "block") and not is_within("blocks", "block") and is_within("anything", "")


def verdict_of(text):
    """The last sentence; lines that go on are indented."""
    return [line for line in text.splitlines() if not line.startswith(" ")][-1]


def test_the_text_answers_the_questions_within_80_columns():
    plan = plan_of(50_000)
    text = print_plan(plan, cannot_see=["the user's own loss"])
    assert verdict_of(text).startswith("fits: ") and "bound: no plan within the budget" in text
    for words in ("memory at the peak", "workspace", "runs again at operation 8", "held as 125 B", "net.py:7"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80
    assert verdict_of(print_plan(plan_of(1000))).startswith("does not fit: ")
    assert verdict_of(print_plan(plan_of())).startswith("no budget: ")


def test_explain_one_layer():
    plan = plan_of(20_000)
    text = explain(plan, "block")
    assert text.startswith("block\n") and "%b " in text and "%c " not in text
    assert explain(plan, "").startswith("(model)\n")
    assert module_paths(plan) == ["", "block", "block.first", "block.second", "relu", "noise"]
    with pytest.raises(CallError, match=r"no module 'blok'.*'block'"):
        explain(plan, "blok")


def test_data_is_plain_json():
    data = plan_to_dict(plan_of(20_000))
    assert json.loads(json.dumps(data, allow_nan=False)) == json.loads(json.dumps(data))
    assert data["totals"]["num_recomputed"] == 2
    assert {item["reason"] for layer in data["layers"] for item in layer["kept"]} == {"derivative_reads_it"}


def test_a_plan_without_operations():
    plan = make_plan(Program((Input(Value("x", KIND), InputKind.ARGUMENT, "x"),), (), ()))
    decisions = find_decisions(plan)
    assert decisions.layers == () and decisions.peak.num_bytes == UNIT
    assert verdict_of(print_plan(plan)).startswith("no budget: ")
