"""Where the memory and the arithmetic of a training step go, layer by layer.

In: the plans of a training step and of its forward pass alone. Out: an Inspection, data that prints as tables
(`tables.py`) and turns into JSON (`to_dict`).

A node belongs to the module that ran it, a node of the backward pass to the module of the operation it derives from.
Values in the same memory count once: what an in-place operation overwrites, and what views look at. Only the bytes of
values count. Not counted are the workspace of kernels, and what a tensor without data does not show: the workspace that
oneDNN's LSTM keeps for its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from undertow.costs.optimizer_state import OptimizerState
from undertow.costs.work import Work, total_work
from undertow.ir import Input, InputKind, Node, OpaqueType, Plan, Program, TensorType, Value
from undertow.ir.plan import ARENA_GAPS
from undertow.memory.lifetimes import Lifetimes, find_lifetimes
from undertow.report.amplification import Amplification, find_amplifications


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer."""

    path: str
    num_elements: int
    num_bytes: int


@dataclass(frozen=True)
class Site:
    """An operation of the forward pass, and where it is in the model."""

    operation: str
    layer: str
    location: str


@dataclass(frozen=True)
class Kept:
    """Memory that lives from the forward to the backward pass, and the operations whose derivatives read it."""

    value: str
    type: str
    made_by: str
    num_bytes: int
    asked_for_by: tuple[Site, ...]


@dataclass(frozen=True)
class Layer:
    """One module: what it stores, returns, keeps and computes, submodules not included."""

    path: str
    kind: str
    parameters: tuple[Stored, ...]
    buffers: tuple[Stored, ...]
    output_bytes: int
    kept: tuple[Kept, ...]
    forward: Work
    backward: Work

    @property
    def num_parameters(self) -> int:
        """Elements of its parameters."""
        return sum(item.num_elements for item in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of its parameters."""
        return sum(item.num_bytes for item in self.parameters)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of its buffers."""
        return sum(item.num_bytes for item in self.buffers)

    @property
    def kept_bytes(self) -> int:
        """Bytes it makes in the forward pass that the backward pass reads."""
        return sum(item.num_bytes for item in self.kept)

    @property
    def work(self) -> Work:
        """Forward and backward together."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Memory:
    """The bytes alive at the peak, by what they are."""

    parameter_bytes: int
    buffer_bytes: int
    batch_bytes: int
    constant_bytes: int
    kept_bytes: int
    gradient_bytes: int
    other_bytes: int  # values that this moment computes with, cotangents among them
    optimizer_bytes: int
    at: str

    @property
    def peak_bytes(self) -> int:
        """Everything together."""
        return (
            self.parameter_bytes
            + self.buffer_bytes
            + self.batch_bytes
            + self.constant_bytes
            + self.kept_bytes
            + self.gradient_bytes
            + self.other_bytes
            + self.optimizer_bytes
        )


@dataclass(frozen=True)
class Inspection:
    """Where the memory and the arithmetic of a step go. `training` is None where nothing carries a gradient."""

    layers: tuple[Layer, ...]
    inference: Memory
    training: Memory | None
    gradient_bytes: int
    reread_parameter_bytes: int  # the backward pass reads these inputs again: they are held, so they are not kept
    reread_batch_bytes: int
    optimizer: OptimizerState | None
    without_rule: tuple[Site, ...]
    amplifications: tuple[Amplification, ...]  # what im2col would make of each convolution's input

    def __getitem__(self, path: str) -> Layer:
        return next(layer for layer in self.layers if layer.path == path)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def gradient_copies(self) -> float | None:
        """How many times the parameters all gradients are."""
        return self.gradient_bytes / self.parameter_bytes if self.parameter_bytes else None

    @property
    def optimizer_copies(self) -> float | None:
        """How many times the parameters the optimizer's state is: 1 for momentum, 2 for Adam; None if it is unknown."""
        if self.optimizer is None or self.optimizer.num_bytes is None or not self.parameter_bytes:
            return None
        return self.optimizer.num_bytes / self.parameter_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that live from the forward to the backward pass."""
        return sum(layer.kept_bytes for layer in self.layers)

    @property
    def forward(self) -> Work:
        """The forward pass."""
        return sum((layer.forward for layer in self.layers), Work())

    @property
    def backward(self) -> Work:
        """The backward pass."""
        return sum((layer.backward for layer in self.layers), Work())

    @property
    def memory_ratio(self) -> float | None:
        """Peak of training over peak of inference; the rule of thumb is 3 to 4."""
        if self.training is None or not self.inference.peak_bytes:
            return None
        return self.training.peak_bytes / self.inference.peak_bytes

    @property
    def flops_ratio(self) -> float | None:
        """Flops of the backward pass over flops of the forward pass; the rule of thumb is 2."""
        return self.backward.flops / self.forward.flops if self.training is not None and self.forward.flops else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "layers": [_layer_to_dict(layer) for layer in self.layers],
            "num_parameters": self.num_parameters,
            "kept_bytes": self.kept_bytes,
            "parameter_bytes": self.parameter_bytes,
            "gradient_bytes": self.gradient_bytes,
            "gradient_copies": self.gradient_copies,
            "optimizer_copies": self.optimizer_copies,
            "reread_parameter_bytes": self.reread_parameter_bytes,
            "reread_batch_bytes": self.reread_batch_bytes,
            "forward": self.forward.to_dict(),
            "backward": self.backward.to_dict(),
            "inference_memory": _memory_to_dict(self.inference),
            "training_memory": None if self.training is None else _memory_to_dict(self.training),
            "memory_ratio": self.memory_ratio,
            "flops_ratio": self.flops_ratio,
            "optimizer": None if self.optimizer is None else asdict(self.optimizer),
            "without_rule": [asdict(item) for item in self.without_rule],
            "im2col": [asdict(item) | {"factor": item.factor} for item in self.amplifications],
        }

    def __str__(self) -> str:
        from undertow.report.tables import print_inspection

        return print_inspection(self)


def inspect_plans(
    step_plan: Plan,
    forward_plan: Plan,
    kinds: dict[str, str],
    unused: Sequence[Input],
    optimizer: OptimizerState | None,
) -> Inspection:
    """The Inspection of a training step; `kinds` is the class of every module by its path.

    `unused` are parameters and buffers that no operation reads: they are not inputs of the Programs, but take memory.
    """
    step = step_plan.program
    lifetimes = find_lifetimes(step)
    makers = {value: node for node in step.nodes for value in node.named_outputs}
    kept = _find_kept(step, lifetimes, makers)
    reread = {lifetimes.root[value] for node in step.second_pass for value in node.inputs}
    differentiated = {gradient.input for gradient in step.gradients if gradient.value is not None}
    optimizer_bytes = optimizer.num_bytes or 0 if optimizer is not None else 0
    return Inspection(
        layers=tuple(_make_layers(step, kept, makers, kinds, unused)),
        inference=_memory_at_peak(forward_plan, unused, optimizer_bytes=0),
        training=_memory_at_peak(step_plan, unused, optimizer_bytes) if step.second_pass else None,
        gradient_bytes=_bytes_of_kind(step, InputKind.PARAMETER, differentiated),
        reread_parameter_bytes=_bytes_of_kind(step, InputKind.PARAMETER, reread),
        reread_batch_bytes=_bytes_of_kind(step, InputKind.ARGUMENT, reread),
        optimizer=optimizer,
        without_rule=_find_without_rule(step),
        amplifications=find_amplifications(step.first_pass),
    )


def _make_layers(
    program: Program,
    kept: dict[str, list[Kept]],
    makers: dict[Value, Node],
    kinds: dict[str, str],
    unused: Sequence[Input],
) -> Iterable[Layer]:
    """One per module that runs an operation or stores something, in the order in which they are first met."""
    stored = [item for item in (*program.inputs, *unused) if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
    owners = {item.value: _owner(item) for item in stored}
    order: dict[str, None] = {}
    for node in program.first_pass:
        for value in node.inputs:
            if value in owners:
                order[owners[value]] = None
        order[node.origin.module_path] = None
    order |= dict.fromkeys((*owners.values(), *(node.origin.module_path for node in program.second_pass)))
    outputs = _output_bytes(program, makers)
    for path in order:
        mine = [item for item in stored if owners[item.value] == path]
        yield Layer(
            path=path,
            kind=kinds.get(path, ""),
            parameters=tuple(_to_stored(item) for item in mine if item.kind is InputKind.PARAMETER),
            buffers=tuple(_to_stored(item) for item in mine if item.kind is InputKind.BUFFER),
            output_bytes=outputs.get(path, 0),
            kept=tuple(kept.get(path, ())),
            forward=total_work(node for node in program.first_pass if node.origin.module_path == path),
            backward=total_work(node for node in program.second_pass if node.origin.module_path == path),
        )


def _find_kept(program: Program, lifetimes: Lifetimes, makers: dict[Value, Node]) -> dict[str, list[Kept]]:
    """What the backward pass reads of the forward pass: each storage once, under the layer that last wrote it."""
    names = {value.name: node for node in program.first_pass for value in node.named_outputs}
    readers: dict[Value, dict[Site, None]] = {}
    contents: dict[Value, Value] = {}
    forward = set(program.first_pass)
    for node in program.second_pass:
        asker = names.get(node.origin.derived_from, node)
        for value in node.inputs:
            root = lifetimes.root[value]
            if root in makers and makers[root] in forward and makers[value] in forward:
                readers.setdefault(root, {})[_site(asker)] = None
                contents[root] = _written(value, makers)
    kept: dict[str, list[Kept]] = {}
    for root, askers in sorted(readers.items(), key=lambda pair: lifetimes.born[pair[0]]):
        content = contents[root]
        maker = makers[content]
        entry = Kept(content.name, str(content.type), _operation(maker), root.type.num_bytes, tuple(askers))
        kept.setdefault(maker.origin.module_path, []).append(entry)
    return kept


def _written(value: Value, makers: dict[Value, Node]) -> Value:
    """The value whose operation wrote what `value` looks at."""
    while makers[value].operation.is_view:
        source = makers[value].shared_input
        if source is None or source not in makers:
            break
        value = source
    return value


def _output_bytes(program: Program, makers: dict[Value, Node]) -> dict[str, int]:
    """Bytes that leave each layer: another layer's forward pass reads them, or the user gets them. If a view and what
    it looks at both leave, one counts."""
    leaving: dict[Value, None] = {}
    for node in program.first_pass:
        for value in node.inputs:
            if value in makers and makers[value].origin.module_path != node.origin.module_path:
                leaving[value] = None
    leaving |= dict.fromkeys(value for value in program.outputs if value in makers)
    found: dict[str, int] = {}
    for value in leaving:
        node = makers[value]
        source = node.shared_input
        is_double = source in leaving and makers[source].origin.module_path == node.origin.module_path
        if isinstance(value.type, TensorType) and not is_double:
            size = value.type.num_elements * value.type.dtype.itemsize
            found[node.origin.module_path] = found.get(node.origin.module_path, 0) + size
    return found


def _memory_at_peak(plan: Plan, unused: Sequence[Input], optimizer_bytes: int) -> Memory:
    program, lifetimes = plan.program, find_lifetimes(plan.program)
    peak = plan.live_bytes.index(max(plan.live_bytes)) if plan.live_bytes else 0
    kinds = {item.value: item.kind for item in program.inputs}
    kept = {item.value for item in plan.kept}
    gradients = {lifetimes.root[item.value] for item in program.gradients if item.value is not None}
    sizes = dict.fromkeys((*InputKind, "kept", "gradient", "other"), 0)
    for value, born in lifetimes.born.items():
        if not born <= peak <= lifetimes.last_use[value]:
            continue
        if value in gradients and value not in kinds:
            role: InputKind | str = "gradient"
        else:
            role = kinds.get(value, "kept" if value in kept else "other")
        sizes[role] += value.type.num_bytes
    for item in (*unused, *program.unread):
        sizes[item.kind] += item.value.type.num_bytes
    node = plan.peak_node
    return Memory(
        parameter_bytes=sizes[InputKind.PARAMETER],
        buffer_bytes=sizes[InputKind.BUFFER],
        batch_bytes=sizes[InputKind.ARGUMENT],
        constant_bytes=sizes[InputKind.CONSTANT],
        kept_bytes=sizes["kept"],
        gradient_bytes=sizes["gradient"],
        other_bytes=sizes["other"] + plan.held.get(ARENA_GAPS, 0),
        optimizer_bytes=optimizer_bytes,
        at="" if node is None else f"{_operation(node)} {node.origin}".strip(),
    )


def _bytes_of_kind(program: Program, kind: InputKind, values: set[Value]) -> int:
    return sum(item.value.type.num_bytes for item in program.inputs if item.kind is kind and item.value in values)


def _find_without_rule(program: Program) -> tuple[Site, ...]:
    """The operations whose derivative PyTorch takes at run time."""
    found: dict[Site, None] = {}
    for node in program.nodes:
        if node.operation.derivative_of is not None:
            found[Site(_short_name(node.operation.derivative_of.name), *_layer_and_location(node))] = None
        elif node.operation.runs_user_code and any(isinstance(value.type, OpaqueType) for value in node.named_outputs):
            found[_site(node)] = None
    return tuple(found)


def _site(node: Node) -> Site:
    return Site(_operation(node), *_layer_and_location(node))


def _layer_and_location(node: Node) -> tuple[str, str]:
    return node.origin.module_path, node.origin.location


def _operation(node: Node) -> str:
    return _short_name(node.name)


def _short_name(name: str) -> str:
    """`add` for `add_.Tensor`: the overload, and whether it is in-place, do not matter here."""
    return name.partition(".")[0].rstrip("_")


def _owner(item: Input) -> str:
    return item.path.rpartition(".")[0]


def _to_stored(item: Input) -> Stored:
    return Stored(item.path, item.value.tensor_type.num_elements, item.value.type.num_bytes)


def _layer_to_dict(layer: Layer) -> dict[str, Any]:
    return {
        "path": layer.path,
        "kind": layer.kind,
        "num_parameters": layer.num_parameters,
        "parameter_bytes": layer.parameter_bytes,
        "buffer_bytes": layer.buffer_bytes,
        "output_bytes": layer.output_bytes,
        "kept_bytes": layer.kept_bytes,
        "parameters": [asdict(item) for item in layer.parameters],
        "buffers": [asdict(item) for item in layer.buffers],
        "kept": [asdict(item) for item in layer.kept],
        "forward": layer.forward.to_dict(),
        "backward": layer.backward.to_dict(),
    }


def _memory_to_dict(memory: Memory) -> dict[str, Any]:
    return asdict(memory) | {"peak_bytes": memory.peak_bytes}
