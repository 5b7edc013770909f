"""The time and the workspace of operations, measured one by one on the device where they will run.

In: nodes. Out: a Cost per signature. Arguments are made up: numbers between 0.5 and 1, which can be probabilities,
and zeros for indices. Some nodes cannot run alone (a custom Function's derivative reads a context; a guard raises).
Their cost comes from the model in `costs/work.py`.

Workspace is what a kernel allocates beyond its outputs. Where a kernel refuses made-up arguments, it is assumed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from undertow.costs.apart import Watch, belongs_apart, measure_apart
from undertow.costs.usage import watch_memory
from undertow.costs.work import work_of
from undertow.ir import Node, OpaqueType, Value
from undertow.ir.cost import Cost, signature
from undertow.ir.schema import flatten_outputs
from undertow.memory.destinations import assumed_workspace
from undertow.ops.interpret import bind_arguments_of
from undertow.ops.modes import below_autograd

# Repeat until this much time is spent on an operation. The least time counts: the others were disturbed.
MEASURE_NS = 20_000_000
MIN_REPEATS = 2
MAX_REPEATS = 20

# Rates of a machine of 2 cores in float32: for planning without measuring.
MODEL_FLOPS_PER_NS = 100.0
MODEL_BYTES_PER_NS = 8.0
MODEL_CALL_NS = 3_000

_MEASURING = threading.Lock()  # two at once would disturb each other's times


def model_cost(node: Node) -> Cost:
    """The cost by arithmetic and memory traffic, without running anything."""
    if node.operation.costs_nothing:
        return Cost(0, 0)
    work = work_of(node)
    busy = max(work.flops / MODEL_FLOPS_PER_NS, work.moved_bytes / MODEL_BYTES_PER_NS)
    return Cost(int(busy) + MODEL_CALL_NS, 0)


def unmeasured_cost(node: Node) -> Cost:
    """The cost of a node that could not be measured: a kernel that refused may still need workspace in a step."""
    workspace_bytes = assumed_workspace(node) if _can_run_alone(node) else 0
    return replace(model_cost(node), workspace_bytes=workspace_bytes)


def measure_costs(
    nodes: Iterable[Node],
    known: dict[str, Cost],
    live: Mapping[str, Any],
    watch: Watch = iter,
    *,
    is_apart: bool = False,
) -> int:
    """Add to `known` the cost of every node that can run alone and is not there yet; returns how many were added.

    One operation at a time, with only its own tensors: a step that fits holds more than that. `is_apart`: large ones
    are measured in another process. `watch` iterates over what is to be timed, and may show progress.
    """
    missing = {key: node for node in nodes if (key := signature(node)) not in known and _can_run_alone(node)}
    if not missing:
        return 0
    num_known = len(known)
    with _MEASURING:
        if is_apart:
            apart = {key: node for key, node in missing.items() if belongs_apart(node)}
            costs, strangers = measure_apart(apart, watch)
            known.update(costs)
            missing = {key: node for key, node in missing.items() if key not in apart or key in strangers}
        _measure_here(missing, known, live, watch)
    return len(known) - num_known


def _measure_here(missing: dict[str, Node], known: dict[str, Cost], live: Mapping[str, Any], watch: Watch) -> None:
    with torch.random.fork_rng():  # random operations draw while they are measured
        measured = _measure_workspace(list(missing.values()), live)
        for (key, node), workspace in watch(list(zip(missing.items(), measured, strict=True))):
            if workspace is not None:
                known[key] = Cost(_measure_duration(node, live), workspace)


def measure_workspaces(nodes: Iterable[Node], known: dict[str, int], live: Mapping[str, Any]) -> None:
    """Add to `known` the workspace of every node that is not there yet, without timing anything."""
    missing = {key: node for node in nodes if (key := signature(node)) not in known}
    alone = {key: node for key, node in missing.items() if _can_run_alone(node)}
    with _MEASURING, torch.random.fork_rng():
        measured = dict(zip(alone, _measure_workspace(list(alone.values()), live), strict=True))
    for key, node in missing.items():
        workspace = measured.get(key)
        known[key] = unmeasured_cost(node).workspace_bytes if workspace is None else workspace


def _can_run_alone(node: Node) -> bool:
    if node.operation.costs_nothing or not node.operation.is_measurable:
        return False
    return not any(isinstance(value.type, OpaqueType) for value in (*node.inputs, *node.named_outputs))


def _prepare(node: Node, live: Mapping[str, Any]) -> tuple[Callable[[], Any], dict[int, int]]:
    """A call of the node on made-up tensors, and the memory that these lie in.

    Masks get as many true elements as give the outputs their recorded shapes.
    """
    if any(value.tensor_type.dtype is torch.bool for value in node.inputs):
        kinds = [value.tensor_type for value in (*node.inputs, *node.named_outputs)]
        sizes = {size for kind in kinds for size in (*kind.shape, kind.num_elements)}
        for num_true in (None, *sorted(sizes, reverse=True)):
            if _makes_what_was_recorded(node, _bind(node, live, num_true)[0]):
                return _bind(node, live, num_true)
    return _bind(node, live)


def _makes_what_was_recorded(node: Node, call: Callable[[], Any]) -> bool:
    try:
        with below_autograd(), torch.enable_grad():
            outputs = flatten_outputs(call())
    except (RuntimeError, IndexError):  # made-up numbers may make no sense to a kernel, or have no room
        return False
    pairs = [(made, value) for made, value in zip(outputs, node.outputs, strict=False) if value is not None]
    return all(made is not None and tuple(made.shape) == value.tensor_type.shape for made, value in pairs)


def _bind(node: Node, live: Mapping[str, Any], num_true: int | None = None) -> tuple[Callable[[], Any], dict[int, int]]:
    tensors = {value: _make_tensor(value, num_true) for value in dict.fromkeys(node.inputs)}
    args = bind_arguments_of(node.args, tensors, live)
    kwargs = {name: bind_arguments_of(item, tensors, live) for name, item in node.kwargs.items()}
    rehearse, run = node.operation.rehearse, node.operation.run
    call = rehearse(*args, **kwargs) if rehearse is not None else lambda: run(*args, **kwargs)
    return call, _storages(list(tensors.values()))


def _make_tensor(value: Value, num_true: int | None) -> torch.Tensor:
    kind = value.tensor_type
    tensor = torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device)
    flat = tensor if 0 not in kind.strides else tensor.as_strided((kind.num_bytes // kind.dtype.itemsize,), (1,))
    generator = torch.Generator(kind.device).manual_seed(0)
    if kind.dtype.is_floating_point or kind.dtype.is_complex:
        flat.uniform_(0.5, 1.0, generator=generator) if kind.dtype.is_floating_point else flat.fill_(1)
    else:
        flat.fill_(kind.dtype is torch.bool)
    if kind.dtype is torch.bool and num_true is not None:
        tensor.copy_(torch.arange(kind.num_elements, device=kind.device).view(kind.shape) < num_true)
    return tensor


def _measure_duration(node: Node, live: Mapping[str, Any]) -> int:
    call, _ = _prepare(node, live)
    is_cuda = any(value.tensor_type.device.type == "cuda" for value in (*node.inputs, *node.named_outputs))
    times: list[int] = []
    with below_autograd(), torch.enable_grad():
        while len(times) < MIN_REPEATS or (sum(times) < MEASURE_NS and len(times) < MAX_REPEATS):
            if is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter_ns()
            call()
            if is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter_ns() - start)
    return min(times)


def _measure_workspace(nodes: Sequence[Node], live: Mapping[str, Any]) -> list[int | None]:
    """Bytes beyond the outputs at the worst moment of each run; None where the made-up arguments were refused."""
    if torch.cuda.is_available() and any(
        value.tensor_type.device.type == "cuda" for node in nodes for value in node.named_outputs
    ):
        return [_measure_workspace_cuda(node, live) for node in nodes]
    with watch_memory():  # the profiler then knows the arguments; it warns when memory is freed that it does not know
        return [_measure_workspace_cpu(node, live) for node in nodes]


def _measure_workspace_cpu(node: Node, live: Mapping[str, Any]) -> int | None:
    with below_autograd(), torch.enable_grad():
        try:
            call, given = _prepare(node, live)
            with watch_memory() as usage:
                outputs = flatten_outputs(call())
        except (RuntimeError, IndexError):
            return None
    kept = [output for output, value in zip(outputs, node.outputs, strict=False) if value is not None]
    kept_bytes = sum(size for pointer, size in _storages(kept).items() if pointer not in given)
    return max(0, usage.peak_bytes - kept_bytes)


def _storages(tensors: Sequence[torch.Tensor | None]) -> dict[int, int]:
    """Address and bytes of the memory that tensors lie in."""
    return dict(_storage(tensor) for tensor in tensors if tensor is not None)


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.is_mkldnn:  # PyTorch shows no storage of oneDNN's own layouts
        return torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _measure_workspace_cuda(node: Node, live: Mapping[str, Any]) -> int | None:
    call, _ = _prepare(node, live)
    with below_autograd(), torch.enable_grad():
        try:
            call()  # a kernel keeps what it allocates for itself in its first run
            with watch_memory(is_cuda=True) as usage:
                outputs = call()
        except (RuntimeError, IndexError):
            return None
    del outputs
    return usage.peak_bytes - usage.held_bytes
