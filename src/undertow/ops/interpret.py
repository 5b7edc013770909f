"""Running a few nodes directly on tensors, without compiling them; and the generators that nodes draw from.

This is for reading a value while a model is being recorded, and for checks. `runtime` runs training steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from undertow.ir import Live, Node, TensorType, Value
from undertow.ops.own import bind, default_generator, default_generator_of

NO_LIVE: Mapping[str, Any] = {}


def run_node(node: Node, environment: dict[Value, Any], live: Mapping[str, Any] = NO_LIVE) -> None:
    """Run one node on the values in `environment` and add its outputs to it."""
    args = bind_arguments_of(node.args, environment, live)
    kwargs = {name: bind_arguments_of(item, environment, live) for name, item in node.kwargs.items()}
    result = node.operation.run(*args, **kwargs)
    outputs = result if isinstance(result, tuple | list) else [result]
    for value, output in zip(node.outputs, outputs, strict=False):
        if value is not None:
            environment[value] = output


def bind_arguments_of(item: Any, environment: Mapping[Value, Any], live: Mapping[str, Any]) -> Any:
    """Nested arguments with every Value and every Live thing replaced by what it stands for."""
    if isinstance(item, Value):
        return environment[item]
    if isinstance(item, Live):
        return bind(item, live)
    if isinstance(item, tuple | list):
        return tuple(bind_arguments_of(part, environment, live) for part in item)
    return item


def without_live(item: Any) -> Any:
    """Arguments with None instead of a generator: code that runs without data draws nothing."""
    if isinstance(item, dict):
        return {name: without_live(part) for name, part in item.items()}
    if isinstance(item, tuple | list):
        return tuple(map(without_live, item))
    return None if isinstance(item, Live) else item


def generator_of(node: Node) -> Live:
    """The generator that a random node draws from: one that it was given, or PyTorch's own for its device."""
    given = [item for item in (*node.args, *node.kwargs.values()) if isinstance(item, Live)]
    device = next(value.tensor_type.device for value in (*node.outputs, *node.inputs) if value is not None)
    return given[0] if given else default_generator_of(device)


def state_type_of(node: Node) -> TensorType:
    """The type of the state of a random node's generator, which lies on the CPU whatever the device."""
    device = next(value.tensor_type.device for value in (*node.outputs, *node.inputs) if value is not None)
    num_bytes = default_generator(device).get_state().numel()
    return TensorType(torch.uint8, (num_bytes,), (1,), torch.device("cpu"))


def generators_of(nodes: Iterable[Node]) -> list[Live]:
    """The generators that the nodes draw from, each once."""
    return list(dict.fromkeys(generator_of(node) for node in nodes if node.operation.is_random))
