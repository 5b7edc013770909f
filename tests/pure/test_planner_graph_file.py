"""Reading graph files: both formats, and the errors for hostile files."""

from __future__ import annotations

import copy
import json

import pytest

from undertow.planner.graph_file import graph_instance, read_graph
from undertow.planner.instance import replay
from undertow.planner.solve import solve_graph

COSTS = {
    "nodes": [{"name": name, "out_cost": 10 * (name + 1), "duration": name} for name in range(3)],
    "links": [{"0": 0, "1": 1}, {"0": 1, "1": 2}, {"0": 0, "1": 2}],
    "graph": {"order": [0, 1, 2]},
}
RAM = {
    "nodes": [{"id": name, "cost_ram": 10 * (name + 1), "cost_cpu": name, "backward": False} for name in range(3)],
    "links": [{"source": 0, "target": 1}, {"source": 1, "target": 2}, {"source": 0, "target": 2}],
}


@pytest.mark.parametrize("document", [COSTS, RAM])
def test_both_formats_give_the_same_instance(document, tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document))
    instance = read_graph(path)
    found = replay(instance, instance.order)
    assert found.run_bytes.tolist() == [10, 30, 60]
    assert found.time == 3


def _with(change):
    document = copy.deepcopy(COSTS)
    change(document)
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "list `nodes`"),
        ({"nodes": []}, "list `links`"),
        ({"nodes": [], "links": []}, "no nodes"),
        (_with(lambda d: d["nodes"][0].pop("out_cost")), "node 0 needs"),
        (_with(lambda d: d["nodes"][2].pop("duration")), "node 2 needs a whole number `duration`"),
        (_with(lambda d: d["nodes"][1].update(out_cost=-1)), "at least 0, found -1"),
        (_with(lambda d: d["nodes"][1].update(out_cost=float("nan"))), "whole number"),
        (_with(lambda d: d["nodes"][1].update(out_cost=2**70)), "add up to more"),
        (_with(lambda d: d["nodes"][1].update(name=0)), "of its own"),
        (_with(lambda d: d["nodes"].append(7)), "node 3 needs"),
        (_with(lambda d: d["links"].append({"0": 0})), "link 3 needs"),
        (_with(lambda d: d["links"].append({"0": 0, "1": 9})), "not a node"),
        (_with(lambda d: d["links"].append({"0": 0, "1": [1]})), "not a node"),
        (_with(lambda d: d["links"].append({"0": 1, "1": 1})), "to itself"),
        (_with(lambda d: d["links"].append({"0": 2, "1": 0})), "cycle"),
        (_with(lambda d: d["graph"].update(order=[0, 1])), "every node once"),
        (_with(lambda d: d["graph"].update(order=[0, 1, 1])), "twice"),
        (_with(lambda d: d["graph"].update(order=[2, 1, 0])), "runs before"),
    ],
)
def test_a_bad_document_is_refused(document, message):
    with pytest.raises(ValueError, match=message):
        graph_instance(document)


def test_nodes_listed_in_no_valid_order_are_sorted():
    document = _with(lambda d: (d.pop("graph"), d["nodes"].reverse()))
    instance = graph_instance(document)
    assert replay(instance, instance.order).peak_bytes == 60


@pytest.mark.parametrize("text", ["", "{", "\x00", "[" * 100_000])
def test_a_file_that_is_not_json_is_refused(text, tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not JSON"):
        read_graph(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a file"):
        read_graph(tmp_path / "none.json")


def test_a_number_of_thousands_of_digits_names_its_node(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(COSTS).replace('"out_cost": 20', f'"out_cost": {"9" * 5000}'))
    with pytest.raises(ValueError, match="node 1 needs a whole number `out_cost`"):
        read_graph(path)


@pytest.mark.parametrize("share", [1.0, 1e308])
def test_a_graph_that_takes_no_time_and_no_memory(share):
    document = _with(lambda d: [node.update(out_cost=0, duration=0) for node in d["nodes"]])
    solved = solve_graph(graph_instance(document), share, is_fixed_order=False)
    assert (solved.outcome, solved.extra_time_percent, solved.gap_percent) == ("optimal", 0, 0)


def test_a_budget_beyond_every_value_is_no_limit():
    assert solve_graph(graph_instance(COSTS), 1e308, is_fixed_order=True).outcome == "optimal"
