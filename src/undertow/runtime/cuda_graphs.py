"""A training step on a GPU as a CUDA graph: captured once, then started by one call instead of one per kernel.

In: a plan of a whole training step, a function that runs it, and the inputs of each call. Out: what that function
returns, by the same kernels and with the same bits.

A graph reads and writes fixed addresses. Arguments are copied into tensors of its own; parameters, buffers, gradients
and the optimizer's state are the user's. A call that finds one of them at another address, or a changed setting,
releases the graph and runs the step as it is. The step is captured again when nothing has changed for WARM_CALLS calls.
Gradients lie in the graph's memory and are the user's: while one of the last call is still referenced, nothing is
replayed. Draws come from PyTorch's own generator, whose state moves on as it does without a graph.

The graph's memory is one stretch that stays allocated between calls, as large as `graph_memory` finds it must be. A
graph that would take the step over its budget is given up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from undertow.ir import InputKind, Node, OpaqueType, Phase, Plan, Program, format_bytes
from undertow.ops.updates import OPTIMIZER
from undertow.runtime.graph_memory import copied_output_bytes, find_graph_memory
from undertow.torch_internals import storage_use_count

WARM_CALLS = 2  # before a capture, kernels must be loaded and chosen, and what they allocate once must be there
NUM_TRIALS = 5  # of sizes of the graph's memory, where the predicted one is too small
GRAPH_EXTRA = "CUDA graph, beyond what is alive"  # among what a plan holds: copies of arguments, gaps


def why_not_captured(program: Program) -> str | None:
    """Why a Program cannot be captured; None where it can."""
    if os.environ.get("UNDERTOW_GRAPHS") == "off":
        return "UNDERTOW_GRAPHS=off"
    if not program.count(Phase.UPDATE):
        return "only whole training steps are"
    devices = {item.value.tensor_type.device for item in program.inputs}
    if len(devices) > 1:
        return f"its inputs lie on {' and '.join(sorted(map(str, devices)))}"
    arguments = {item.value for item in program.inputs if item.kind is InputKind.ARGUMENT}
    if any(update.input in arguments for update in program.updates):
        return "the forward pass writes into an argument"
    if any(
        value.tensor_type.num_bytes < value.tensor_type.num_elements * value.tensor_type.dtype.itemsize
        for value in arguments
    ):
        return "elements of an argument share memory"
    reasons = (_why_not_node(node) for node in program.nodes)
    return next((reason for reason in reasons if reason is not None), None)


def _why_not_node(node: Node) -> str | None:
    reason = node.operation.why_not_captured(node)
    if reason is not None:
        return reason
    values = (*node.inputs, *node.named_outputs)
    if any(isinstance(value.type, OpaqueType) for value in values):
        return f"{node.name} runs code that may do anything ({node.origin})"
    if any(value.tensor_type.device.type != "cuda" for value in values):
        return f"{node.name} works on the CPU ({node.origin})"
    return None


class GraphedStep:
    """A step that is replayed as a graph while addresses and settings stay as they were."""

    def __init__(self, plan: Plan, live: Mapping[str, Any], run: Callable[[Sequence[Any]], list[Any]]) -> None:
        self._plan, self._run = plan, run
        self._arguments = [
            position for position, item in enumerate(plan.program.inputs) if item.kind is InputKind.ARGUMENT
        ]
        position_of = {item.value: position for position, item in enumerate(plan.program.inputs)}
        handing = [node for node in plan.nodes if node.operation.hands_over is not None]
        # Inputs whose gradients the step sets, and inputs that it overwrites.
        self._positions_given = [
            position_of[value] for node in handing for value in node.inputs if value in position_of
        ]
        written = [value for node in plan.nodes if node.phase is Phase.UPDATE for value in node.operation.writes(node)]
        self._positions_updated = [position_of[value] for value in written]
        self._optimizer = live.get(OPTIMIZER.name)
        self._parameters: list[Any] = []
        self._updated: list[Any] = []
        self.reason = why_not_captured(plan.program)
        if self.reason is None and plan.budget_bytes is not None and GRAPH_EXTRA not in plan.held:
            self.reason = "the budget has no room for copies of the arguments and gaps between tensors"
        self._marks: Any = None
        self._num_same = 0
        self._captured: _Captured | None = None

    @property
    def note(self) -> str:
        """How the step runs, for readers of its plan."""
        if self.reason is not None:
            return f"not captured as a CUDA graph: {self.reason}"
        if self._captured is None:
            return "not captured as a CUDA graph yet"
        return f"captured as a CUDA graph, which holds {format_bytes(self._captured.num_bytes)} between calls"

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the step and return its outputs, which are the user's own; gradients and parameters are set as always."""
        if self.reason is not None or torch.cuda.is_current_stream_capturing():
            return self._run(inputs)
        self._parameters = [inputs[position] for position in self._positions_given]
        self._updated = [inputs[position] for position in self._positions_updated]
        marks = self._find_marks(inputs)
        if self._captured is None or marks != self._marks or self._captured.is_in_use():
            self.release()
            self._num_same = self._num_same + 1 if marks == self._marks else 0
            self._marks = marks
            if self._num_same < WARM_CALLS or not self._capture(inputs):
                return self._run(inputs)
        assert self._captured is not None
        return self._captured.replay(inputs)

    def release(self) -> None:
        """Free the graph and its memory. After a few more calls the step is captured again."""
        if self._captured is not None:
            self._captured = None
            self._num_same = 0
            torch.cuda.empty_cache()

    def _find_marks(self, inputs: Sequence[Any]) -> Any:
        """What a graph is valid for: the addresses of all that it does not copy, and what decides on kernels."""
        arguments = set(self._arguments)
        addresses = [item.data_ptr() for position, item in enumerate(inputs) if position not in arguments]
        gradients = [None if item.grad is None else item.grad.data_ptr() for item in self._parameters]
        return addresses, gradients, self._optimizer_marks(), _settings()

    def _optimizer_marks(self) -> Any:
        if self._optimizer is None:
            return ()
        groups = [
            [(name, _mark(item)) for name, item in group.items() if name != "params"]
            for group in self._optimizer.param_groups
        ]
        states = [self._optimizer.state.get(parameter, {}) for parameter in self._updated]
        return groups, [[_mark(item) for item in state.values()] for state in states]

    def _capture(self, inputs: Sequence[Any]) -> bool:
        """Capture the step; returns False, and records the reason, where that fails."""
        before = [item.grad for item in self._parameters]
        stream = torch.cuda.current_stream()
        try:
            self._keep_within_budget(self._capture_least(inputs))
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # PyTorch does not set it back when a capture fails
            self.reason = f"capturing failed: {str(error.__context__ or error).strip().partition(chr(10))[0]}"
        finally:
            for item, gradient in zip(self._parameters, before, strict=True):
                item.grad = gradient
        if self._captured is None:
            torch.cuda.empty_cache()  # the memory of failed captures is freed
        return self._captured is not None

    def _capture_least(self, inputs: Sequence[Any]) -> _Captured:
        """Capture the step in the predicted stretch or, where that is too small, in the least of a few others.

        Without measured costs a plan does not know the kernels' workspace, and kernels may take it in several pieces.
        """
        size = least = find_graph_memory(self._plan).stretch_bytes
        captured = self._capture_within(inputs, size)
        if captured.is_whole:
            return captured
        taken = {size: captured.num_bytes}
        size = most = captured.num_bytes
        for _ in range(NUM_TRIALS):
            del captured  # two at the same time might not fit
            captured = self._capture_within(inputs, size)
            taken[size] = captured.num_bytes
            least, most = (least, size) if captured.is_whole else (size, most)
            size = (least + most) // 2
            if size in taken:
                break
        del captured
        return self._capture_within(inputs, min(taken, key=lambda size: taken[size]))

    def _keep_within_budget(self, captured: _Captured) -> None:
        others = sum(size for name, size in self._plan.held.items() if name != GRAPH_EXTRA)
        total_bytes = others + captured.num_bytes + copied_output_bytes(self._plan.program)
        budget_bytes = self._plan.budget_bytes
        if budget_bytes is None or total_bytes <= budget_bytes:
            self._captured = captured
        else:
            self.reason = f"with it the step would take {format_bytes(total_bytes)}, over the budget"

    def _capture_within(self, inputs: Sequence[Any], num_bytes: int) -> _Captured:
        """Capture the step in a stretch of so many bytes; where that is too little, PyTorch takes more."""
        capture = _capture_stream(inputs[0].device)
        capture.ensure_workspace()
        stream = capture.stream
        memory, graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        kinds = [self._plan.program.inputs[position].value.tensor_type for position in self._arguments]
        with torch.cuda.graph(memory, stream=stream, capture_error_mode="thread_local"):
            stretch = torch.empty(num_bytes, dtype=torch.uint8, device=inputs[0].device)
            stretch[:1].zero_()  # PyTorch warns about an empty graph
            del stretch
            copies = [
                torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device) for kind in kinds
            ]
        given = list(inputs)
        for position, copy in zip(self._arguments, copies, strict=True):
            given[position] = copy
        fresh = [item for item in self._parameters if item.grad is None]
        with torch.cuda.graph(graph, pool=memory.pool(), stream=stream, capture_error_mode="thread_local"):
            outputs = self._run(given)
        gradients = [(item, item.grad) for item in fresh]
        for item in fresh:
            item.grad = None
        written = [inputs[position] for position in self._written_inputs()] + self._updated
        return _Captured(memory, graph, self._arguments, copies, outputs, gradients, written)

    def _written_inputs(self) -> list[int]:
        updated = {update.input for update in self._plan.program.updates}
        return [position for position, item in enumerate(self._plan.program.inputs) if item.value in updated]


@dataclass(eq=False)
class _Captured:
    """A graph and what it reads and writes; `memory` is a graph that does nothing and owns the stretch."""

    memory: torch.cuda.CUDAGraph
    graph: torch.cuda.CUDAGraph
    arguments: list[int]
    copies: list[torch.Tensor]
    outputs: list[torch.Tensor]
    gradients: list[tuple[torch.nn.Parameter, Any]]
    written: list[torch.Tensor]

    def __post_init__(self) -> None:
        segments = _segments(self.graph.pool())
        self.num_bytes = sum(segment["total_size"] for segment in segments)
        self.is_whole = sum(segment["segment_type"] == "large" for segment in segments) <= 1
        self._storages = list({gradient.untyped_storage()._cdata for _, gradient in self.gradients})
        self._counts = self._count_references()

    def _count_references(self) -> list[int]:
        return [storage_use_count(storage) for storage in self._storages]

    def is_in_use(self) -> bool:
        """Whether something still refers to a gradient of the last call."""
        return self._count_references() != self._counts

    def replay(self, inputs: Sequence[Any]) -> list[Any]:
        with torch.no_grad():
            for copy, position in zip(self.copies, self.arguments, strict=True):
                copy.copy_(inputs[position])
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient.detach()  # another tensor in the same memory, whose references are counted
        torch.autograd.graph.increment_version(self.written)
        return [output.clone() for output in self.outputs]


def is_for_graph(plan: Plan) -> bool:
    """Whether the plan's step can run as a graph."""
    is_on_gpu = any(item.value.tensor_type.device.type == "cuda" for item in plan.program.inputs)
    return is_on_gpu and why_not_captured(plan.program) is None


def with_graph_memory(plan: Plan) -> Plan:
    """The plan with all the memory that its step takes as a graph."""
    extra = find_graph_memory(plan).total_bytes - (plan.peak_bytes - sum(plan.held.values()))
    live_bytes = tuple(size + extra for size in plan.live_bytes)
    return replace(plan, held={**plan.held, GRAPH_EXTRA: extra}, live_bytes=live_bytes)


def without_graph_memory(plan: Plan) -> Plan:
    """The plan as `with_graph_memory` got it."""
    held = {name: size for name, size in plan.held.items() if name != GRAPH_EXTRA}
    extra = plan.held.get(GRAPH_EXTRA, 0)
    return replace(plan, held=held, live_bytes=tuple(size - extra for size in plan.live_bytes))


def workspace_bytes(device: torch.device) -> int:
    """The workspace of cuBLAS for each thread and stream that multiplies matrices."""
    return _capture_stream(device).workspace_bytes


def idle_graph_bytes() -> int:
    """Memory of graphs that PyTorch's allocator does not count as allocated; it is in use while they are replayed."""
    private = [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def _segments(pool: Any) -> list[dict[str, Any]]:
    return [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == pool]


class _CaptureStream:
    """The stream that all captures on a device use, and the workspace that cuBLAS takes for it.

    cuBLAS takes a workspace when a stream first multiplies matrices, and does not return it. It is taken here, in
    memory of a graph of its own: in the memory of a step it would prevent that memory from ever being freed.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._matrix = torch.ones(16, 16, device=device)
        torch.mm(self._matrix, self._matrix)  # cuBLAS cannot start in a capture
        self._holder = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._holder, stream=self.stream, capture_error_mode="thread_local"):
            torch.mm(self._matrix, self._matrix)
        segments = _segments(self._holder.pool())
        self.workspace_bytes = sum(segment["allocated_size"] for segment in segments)

    def ensure_workspace(self) -> None:
        """Take the workspace again where it was freed: PyTorch's own graphs make cuBLAS free it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._holder.pool(), stream=self.stream, capture_error_mode="thread_local"):
            torch.mm(self._matrix, self._matrix)


@cache
def _capture_stream(device: torch.device) -> _CaptureStream:
    return _CaptureStream(device)


def _mark(item: Any) -> Any:
    return ("at", item.data_ptr()) if isinstance(item, torch.Tensor) else item


def _settings() -> tuple[Any, ...]:
    """PyTorch's settings that decide which kernels run."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        products.allow_tf32,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
        convolutions.enabled,
        convolutions.allow_tf32,
        convolutions.benchmark,
        convolutions.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )
