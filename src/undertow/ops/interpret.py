"""Running a few nodes directly on tensors, without compiling them.

For reading a value while a capture is under way, and for checks. Training steps are run by `runtime`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from undertow.ir import Node, Value, map_values
from undertow.ops.own import default_generator, is_random


def run_node(node: Node, environment: dict[Value, Any]) -> None:
    """Run one node on the values in `environment` and add its outputs to it."""
    args = map_values(node.args, environment.__getitem__)
    kwargs = {name: map_values(item, environment.__getitem__) for name, item in node.kwargs.items()}
    result = node.target(*args, **kwargs)
    outputs = result if isinstance(result, tuple | list) else [result]
    for value, output in zip(node.outputs, outputs, strict=False):
        if value is not None:
            environment[value] = output


def ancestors(nodes: Iterable[Node], wanted: Iterable[Value], known: Iterable[Value] = ()) -> list[Node]:
    """The nodes that `wanted` depends on, in order, not looking behind `known` values."""
    needed, stop = set(wanted), set(known)
    found = []
    for node in reversed(list(nodes)):
        if any(value in needed and value not in stop for value in node.outputs if value is not None):
            found.append(node)
            needed.update(node.inputs)
    return found[::-1]


def generators_of(nodes: Iterable[Node]) -> list[torch.Generator]:
    """The generators that the nodes draw from, each once."""
    generators: list[torch.Generator] = []
    for node in nodes:
        if is_random(node.target):
            generator = generator_of(node)
            if not any(generator is other for other in generators):
                generators.append(generator)
    return generators


def generator_of(node: Node) -> torch.Generator:
    """The generator that a random node draws from."""
    given = [item for item in (*node.args, *node.kwargs.values()) if isinstance(item, torch.Generator)]
    device = next(value.tensor_type.device for value in (*node.outputs, *node.inputs) if value is not None)
    return given[0] if given else default_generator(device)
