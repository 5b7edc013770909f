"""Reading the public rematerialisation graphs (networkx node-link JSON) into an `Instance`.

In: a file whose nodes have `out_cost` and `duration` with links `{"0": from, "1": to}`, or `cost_ram` and `cost_cpu`
with links `source`/`target`. Out: one value and one repeatable kind per node, or `ValueError` naming what is wrong.

Every node must run. A node that nothing reads has no bytes alive after its run, so it also writes a target of zero
bytes. The base order is `graph.order` where the file has one, else the order of the nodes.
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

from undertow.planner.instance import MAXIMUM_TOTAL, Instance, make_instance

MAXIMUM_FILE_BYTES = 256 * 2**20
MAXIMUM_NODES = 200_000
MAXIMUM_LINKS = 4_000_000
MAXIMUM_DIGITS = 30  # more than any accepted amount has
COST_KEYS = (("out_cost", "duration"), ("cost_ram", "cost_cpu"))
LINK_KEYS = (("0", "1"), ("source", "target"))


def read_graph(path: str | Path) -> Instance:
    """The instance in a graph file; `ValueError` says what is wrong with the file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"graph file: {path} is not a file")
    if path.stat().st_size > MAXIMUM_FILE_BYTES:
        raise ValueError(f"graph file: {path} has {path.stat().st_size} bytes, at most {MAXIMUM_FILE_BYTES} are read")
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_int=_parse_int)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"graph file: {path} is not JSON: {error}") from error
    return graph_instance(document)


def _parse_int(digits: str) -> int | float:
    """Python refuses whole numbers of thousands of digits; as a float, one reaches the check that names its node."""
    return int(digits) if len(digits) < MAXIMUM_DIGITS else float(digits)


def graph_instance(document: Any) -> Instance:
    """The instance in a parsed node-link document."""
    nodes, links = _list_of(document, "nodes", MAXIMUM_NODES), _list_of(document, "links", MAXIMUM_LINKS)
    if not nodes:
        raise ValueError("graph file: there are no nodes")
    size_key, time_key = _keys_present(nodes[0], COST_KEYS, "node 0")
    names: dict[Any, int] = {}
    for index, node in enumerate(nodes):
        name = node.get("id", node.get("name")) if isinstance(node, dict) else None
        if not isinstance(name, (int, str)) or isinstance(name, bool) or name in names:
            raise ValueError(f"graph file: node {index} needs an `id` (or `name`) of its own, found {name!r}")
        names[name] = index
    sizes = [_amount(node, size_key, index) for index, node in enumerate(nodes)]
    durations = [_amount(node, time_key, index) for index, node in enumerate(nodes)]
    if max(sum(sizes), sum(durations)) > MAXIMUM_TOTAL:
        raise ValueError("graph file: the sizes or the durations add up to more than 2**59")
    reads = _reads(links, names)
    order = _base_order(document, names, reads)
    is_read = {source for row in reads for source in row}
    writes = [[index] for index in range(len(nodes))]
    for index in range(len(nodes)):
        if index not in is_read:
            writes[index].append(len(sizes))
            sizes.append(0)
    targets = range(len(nodes), len(sizes))
    return make_instance(sizes, durations, reads, writes, order=order, targets=targets)


def _list_of(document: Any, key: str, limit: int) -> list[Any]:
    if not isinstance(document, dict) or not isinstance(document.get(key), list):
        raise ValueError(f"graph file: a JSON object with a list `{key}` is required")
    if len(document[key]) > limit:
        raise ValueError(f"graph file: {len(document[key])} {key}, at most {limit} are read")
    found: list[Any] = document[key]
    return found


def _keys_present(record: Any, choices: tuple[tuple[str, str], ...], what: str) -> tuple[str, str]:
    for keys in choices:
        if isinstance(record, dict) and all(key in record for key in keys):
            return keys
    wanted = " or ".join(" and ".join(f"`{key}`" for key in keys) for keys in choices)
    raise ValueError(f"graph file: {what} needs {wanted}")


def _amount(node: Any, key: str, index: int) -> int:
    amount = node.get(key)
    if isinstance(amount, float) and amount.is_integer():
        amount = int(amount)
    if not isinstance(amount, int) or isinstance(amount, bool) or amount < 0:
        raise ValueError(f"graph file: node {index} needs a whole number `{key}` of at least 0, found {amount!r}")
    return amount


def _reads(links: list[Any], names: dict[Any, int]) -> list[list[int]]:
    reads: list[set[int]] = [set() for _ in names]
    for index, link in enumerate(links):
        first, second = _keys_present(link, LINK_KEYS, f"link {index}")
        ends = []
        for key in (first, second):
            name = link[key]
            if not isinstance(name, (int, str)) or isinstance(name, bool) or name not in names:
                raise ValueError(f"graph file: link {index} names {name!r}, which is not a node")
            ends.append(names[name])
        if ends[0] == ends[1]:
            raise ValueError(f"graph file: link {index} leads from node {link[first]!r} to itself")
        reads[ends[1]].add(ends[0])
    return [sorted(row) for row in reads]


def _base_order(document: Any, names: dict[Any, int], reads: list[list[int]]) -> list[int]:
    """The order that the file gives, which must be valid; without one, the order of the nodes, sorted where needed."""
    graph = document.get("graph")
    given = graph.get("order") if isinstance(graph, dict) else None
    if given is None:
        return _sorted_nodes(reads)
    is_complete = isinstance(given, list) and len(given) == len(names)
    if not is_complete or any(not isinstance(name, (int, str)) or name not in names for name in given):
        raise ValueError("graph file: `graph.order` must list every node once")
    order = [names[name] for name in given]
    if len(set(order)) != len(order):
        raise ValueError("graph file: `graph.order` lists a node twice")
    _sorted_nodes(reads)
    position_of = {node: position for position, node in enumerate(order)}
    for node, row in enumerate(reads):
        for source in row:
            if position_of[source] > position_of[node]:
                raise ValueError(f"graph file: in `graph.order` node {node} runs before node {source}, which it reads")
    return order


def _sorted_nodes(reads: list[list[int]]) -> list[int]:
    """A topological order, the lowest-numbered ready node first: the order of the nodes itself where it is valid."""
    readers: list[list[int]] = [[] for _ in reads]
    num_missing = [len(row) for row in reads]
    for node, row in enumerate(reads):
        for source in row:
            readers[source].append(node)
    ready = [node for node, missing in enumerate(num_missing) if missing == 0]
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for node in readers[order[-1]]:
            num_missing[node] -= 1
            if num_missing[node] == 0:
                heapq.heappush(ready, node)
    if len(order) < len(reads):
        raise ValueError(f"graph file: the links of {len(reads) - len(order)} nodes form or follow a cycle")
    return order
