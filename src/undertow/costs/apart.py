"""Operations measured in another process, so that a large one takes no memory of the user's, and no kernel stays in it.

In: nodes. Out: their costs. The other process (`undertow.measuring_process`) runs one node at a time. If the system
runs out of memory, it kills that process first; the node is then left unmeasured, and the next one goes to a new
process. Nodes travel as in a saved plan: as plain data, without pickle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from undertow.errors import PlanError
from undertow.ir import Live, Node
from undertow.ir.cost import Cost
from undertow.ir.saving import write_node
from undertow.ir.structure import leaves_in

Watch = Callable[[list[Any]], Iterable[Any]]  # iterates over what is to be timed, and may show progress

# An operation on less than this is measured in the user's process: starting another takes seconds.
FEWEST_BYTES = 8 << 20


def belongs_apart(node: Node) -> bool:
    """Whether a node is large, runs on the CPU, and reads nothing that lives in this process alone."""
    types = [value.tensor_type for value in dict.fromkeys((*node.inputs, *node.named_outputs))]
    if any(kind.device.type != "cpu" for kind in types) or sum(kind.num_bytes for kind in types) < FEWEST_BYTES:
        return False
    return next(leaves_in((node.args, node.kwargs), Live), None) is None


def measure_apart(nodes: Mapping[str, Node], watch: Watch) -> tuple[dict[str, Cost], dict[str, Node]]:
    """What was measured, by key, and the nodes that the other process does not know."""
    costs: dict[str, Cost] = {}
    strangers: dict[str, Node] = {}
    process: subprocess.Popen[str] | None = None
    try:
        for key, node in watch(list(nodes.items())):
            try:
                line = json.dumps(write_node(node))
            except PlanError:  # no other process could find the operation
                strangers[key] = node
                continue
            process = process or _start()
            match _ask(process, line):
                case [duration_ns, workspace_bytes]:
                    costs[key] = Cost(duration_ns, workspace_bytes)
                case "unknown":
                    strangers[key] = node
                case "died":
                    _end(process)
                    _warn(node, process.returncode)
                    process = None
    finally:
        if process is not None:
            _end(process)
    return costs, strangers


_MARK = "UNDERTOW_CHILD"


def is_child() -> bool:
    """Whether this process measures or compiles for another."""
    return _MARK in os.environ


def child_environment() -> dict[str, str]:
    """The environment of such a process: it finds the same Undertow, and leaves GPUs alone."""
    places = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "CUDA_VISIBLE_DEVICES": "", _MARK: "1"}


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "undertow.measuring_process", str(torch.get_num_threads())]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=child_environment(),
    )


def _ask(process: subprocess.Popen[str], line: str) -> Any:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline() or '"died"')
    except BrokenPipeError:
        return "died"


def _warn(node: Node, code: int) -> None:
    warnings.warn(
        f"the process that measured {node.name} ({node.origin}) ended with code {code}, perhaps for lack of memory; "
        f"the cost of this operation is estimated",
        stacklevel=2,
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
