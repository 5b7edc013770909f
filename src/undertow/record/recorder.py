"""The recorder of a whole model or function: inputs as they are met, and numbers read from tensors as guards."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from undertow.errors import CaptureError
from undertow.ir import Input, InputKind, Node, Origin, TensorType, Value
from undertow.ir.pytorch import operation_of
from undertow.ir.schema import bind_arguments, flatten_outputs
from undertow.ops.interpret import generators_of, run_node
from undertow.ops.own import GUARD_SCALAR, GUARD_SHAPE, as_tensor, bind
from undertow.record.origins import current_origin
from undertow.record.outlines import Outline
from undertow.record.traced_tensor import TWIN_NAMES, TracedTensor
from undertow.record.tracing import Namer, Recorder, map_tensors, unusual_layout
from undertow.torch_internals import FakeTensor, FakeTensorMode, OpOverload, disable_current_modes

aten = torch.ops.aten


class CaptureRecorder(Recorder):
    """Records user code. `kinds` tells, by id, what a real tensor is to the user."""

    def __init__(self, module_paths: dict[int, str]) -> None:
        super().__init__(FakeTensorMode(allow_non_fake_inputs=True), Namer())
        self.module_paths = module_paths
        self.inputs: list[Input] = []
        self.reals: dict[Value, torch.Tensor] = {}
        self.outcomes: list[Any] = []
        self._twins: dict[int, TracedTensor] = {}
        # Parameters and buffers that are replaced by traced twins: owner, name, the real tensor, its twin.
        self.exchanged: list[tuple[dict[str, Any], str, torch.Tensor, TracedTensor]] = []

    @contextmanager
    def untraced(self) -> Iterator[None]:
        """Give the modules their real tensors back for a trial run, whose gradients are thrown away."""
        gradients = [(tensor, tensor.grad) for _, _, tensor, _ in self.exchanged]
        for owner, name, tensor, _ in self.exchanged:
            owner[name], tensor.grad = tensor, None
        try:
            yield
        finally:
            for owner, name, _, twin in self.exchanged:
                owner[name] = twin
            for tensor, gradient in gradients:
                tensor.grad = gradient

    def origin(self) -> Origin:
        return current_origin(self.module_paths)

    def add_input(self, tensor: torch.Tensor, kind: InputKind, path: str) -> TracedTensor:
        """The traced twin of an input; one tensor met twice (tied weights) has one twin."""
        twin = self._twins.get(id(tensor))
        if twin is not None:
            return twin
        if torch.nn.parameter.is_lazy(tensor):
            raise CaptureError(f"{path} reads an uninitialized (lazy) parameter; run the model once first")
        if layout := unusual_layout(tensor):
            raise CaptureError(f"{path} is a tensor of layout {layout}; only dense strided tensors can be recorded")
        value = Value(path if kind is not InputKind.CONSTANT else self.names.unique("constant"), TensorType.of(tensor))
        with disable_current_modes():
            twin = self.new_tensor(value)
            if tensor.requires_grad:  # under vmap even asking for False is refused
                twin.requires_grad_()
        if isinstance(tensor, torch.nn.Parameter):
            twin._is_param = True
        vars(twin).update({name: item for name, item in vars(tensor).items() if name not in TWIN_NAMES})
        self.inputs.append(Input(value, kind, path, tensor.is_leaf))
        self.reals[value] = tensor
        self._twins[id(tensor)] = twin
        return twin

    def held_twins(self) -> Iterator[tuple[str, torch.Tensor, TracedTensor]]:
        """The tensors that modules hold, each with its path and its twin."""
        for item in self.inputs:
            if item.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.ATTRIBUTE):
                real = self.reals[item.value]
                yield item.path, real, self._twins[id(real)]

    def release(self) -> None:
        super().release()
        self._twins.clear()
        constants = {item.value for item in self.inputs if item.kind is InputKind.CONSTANT}
        self.reals = {value: real for value, real in self.reals.items() if value in constants}

    def real_after_capture(self, tensor: TracedTensor) -> torch.Tensor:
        value = getattr(tensor, "value_at_end", None)
        if value is None or not self.is_constant(value):
            maker = next((node for node in self.nodes if value in node.outputs), None)
            raise CaptureError(
                f"a tensor that the model made{f' at {maker.origin}' if maker else ''} while it was captured was kept "
                f"outside of it and is used again; keep it in a buffer, or compute it at every call"
            )
        if value not in self.reals:
            (self.reals[value],) = self.evaluate((value,))
        return self.reals[value]

    def lift(self, tensor: torch.Tensor) -> TracedTensor:
        twin = self._twins.get(id(tensor))
        return self.add_input(tensor, InputKind.CONSTANT, str(self.origin())) if twin is None else twin

    def find_twin(self, item: Any) -> TracedTensor | None:
        """The twin of an input, or of the input behind a weak reference; None for anything else."""
        return self._twins.get(id(item() if isinstance(item, weakref.ref) else item))

    def real_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real tensor behind an input's twin; any other tensor itself."""
        return self.reals.get(tensor.alias.value, tensor) if isinstance(tensor, TracedTensor) else tensor

    def append_output(self, value: Value) -> None:
        """Give the last node one more output."""
        self.nodes[-1] = replace(self.nodes[-1], outputs=(*self.nodes[-1].outputs, value))

    @staticmethod
    def is_fake(outputs: Sequence[Any]) -> bool:
        """Whether any of the tensors has no data."""
        return any(isinstance(output, FakeTensor) for output in outputs)

    def read_scalar(self, tensor: TracedTensor) -> Any:
        value = self.value_of(tensor)
        (real,) = self.evaluate((value,))
        number = real.item()
        if not self.is_constant(value):
            self._guard(GUARD_SCALAR, value, number)
        return number

    def run_for_types(self, func: OpOverload, args: Any, kwargs: Any, error: Exception) -> Any:
        # Fake kernels are sometimes stricter than real ones. If the call is wrong, this gives eager's own error.
        real_args = self.evaluate_arguments((args, tuple(kwargs.values())))
        with disable_current_modes(), torch.no_grad():
            result = func(*real_args[0], **dict(zip(kwargs, real_args[1], strict=True)))
        if not isinstance(result, torch.Tensor | tuple | list):
            # Operations such as torch.equal: the answer is a Python value, and a guard compares it at every step.
            return self._guard_python_result(func, args, kwargs, result)
        self.refuse_layouts(func, (), result)
        fakes = map_tensors(result, self.fake_like)
        return list(fakes) if isinstance(result, list) else fakes

    def guard_shapes(self, outputs: Sequence[Value]) -> None:
        """Let every step check that outputs whose shape depends on values have the recorded shape."""
        for value in outputs:
            self._guard(GUARD_SHAPE, value, value.tensor_type.shape)

    def _record(self, func: OpOverload, args: Any, kwargs: Any, made: list[Outline | None], result: Any) -> Any:
        recorded = super()._record(func, args, kwargs, made, result)
        if torch.Tag.dynamic_output_shape in func.tags or self._indexes_by_mask(func, args):
            self.guard_shapes([self.value_of(tensor) for tensor in flatten_outputs(recorded) if tensor is not None])
        return recorded

    @staticmethod
    def _indexes_by_mask(func: OpOverload, args: Any) -> bool:
        if func is not aten.index.Tensor:
            return False
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])

    def _guard_python_result(self, func: OpOverload, args: Any, kwargs: Any, result: Any) -> Any:
        fake = self.fake_like(torch.tensor(result))
        bound = bind_arguments(func, args, kwargs)
        target = as_tensor(operation_of(func))
        (value,) = self.emit(target, tuple(self.values_of(item) for item in bound.values()), {}, [fake])
        self._guard(GUARD_SCALAR, value, result)
        return result

    def _guard(self, target: Any, value: Value, outcome: Any) -> None:
        self.emit(target, (value, outcome, len(self.outcomes)), {}, ())
        self.outcomes.append(outcome)

    def evaluate_arguments(self, arguments: Any) -> Any:
        """`arguments` with every traced tensor replaced by its real value on the example inputs."""
        values: list[Value] = []
        map_tensors(arguments, lambda tensor: values.append(self.value_of(tensor)))
        reals = dict(zip(values, self.evaluate(values), strict=True))
        return map_tensors(arguments, lambda tensor: reals[self.value_of(tensor)])

    def evaluate(self, values: Sequence[Value]) -> list[torch.Tensor]:
        """The real values on the example inputs: runs what they depend on, and leaves the generators as they were."""
        needed = set(values)
        slice_nodes: list[Node] = []
        # A random operation in between moves the generator even if its result is not needed.
        is_any_random = any(node.operation.is_random for node in self._ancestors(values))
        for node in reversed(self.nodes):
            is_needed = any(value in needed for value in node.outputs)
            if is_needed or (is_any_random and node.operation.is_random):
                slice_nodes.append(node)
                if is_needed and _reads_elements(node):
                    needed.update(node.inputs)
        slice_nodes.reverse()
        environment = _PlaceholderEnvironment(self.reals)
        generators = [bind(item, self.live) for item in generators_of(slice_nodes)]
        states = [generator.get_state() for generator in generators]
        try:
            with disable_current_modes(), torch.no_grad():
                for node in slice_nodes:
                    run_node(node, environment, self.live)
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        return [environment[value] for value in values]

    def _ancestors(self, values: Sequence[Value]) -> list[Node]:
        needed, found = set(values), []
        for node in reversed(self.nodes):
            if any(value in needed for value in node.outputs):
                found.append(node)
                if _reads_elements(node):
                    needed.update(node.inputs)
        return found

    def is_constant(self, value: Value) -> bool:
        """Whether the value is the same in every step: it follows from no input and no draw."""
        nodes = self._ancestors((value,))
        inputs = {item.value: item.kind for item in self.inputs}
        sources = {read for node in nodes for read in node.inputs} | {value}
        return not any(node.operation.is_random for node in nodes) and all(
            inputs.get(source, InputKind.CONSTANT) is InputKind.CONSTANT for source in sources
        )


class _PlaceholderEnvironment(dict[Value, Any]):
    """Of values that nobody computed only the shape is read: they get memory without content."""

    def __missing__(self, value: Value) -> torch.Tensor:
        kind = value.tensor_type
        return torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device)


def _reads_elements(node: Node) -> bool:
    """Whether what the node makes depends on more of its arguments than their shape."""
    return node.operation.reads_elements and not node.operation.is_filled
