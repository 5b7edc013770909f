"""Programs as Python functions: straight-line code, one line per node, each value deleted after its last use.

The forward pass is one function. The backward pass is cut into segments. Each ends where gradients are complete, so
that they can be handed to autograd at once. Values that one function makes and another reads wait in `slots`, a list.
After them in that list come the tensors of the arena, into which operations write the values that have an offset.

A pass that pauses is a generator: its values wait in its variables until it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType
from typing import Any

import torch

from undertow.doing import MARK, STEP_FILE, STEP_SOURCE
from undertow.ir import Gradient, Live, Node, Program, Value
from undertow.ir.pytorch import operation_of
from undertow.memory.lifetimes import find_lifetimes
from undertow.ops.own import bind
from undertow.runtime.bindings import callable_for

aten = torch.ops.aten

# Gradients with fewer bytes than this in total are handed over together: an autograd node takes about 20 microseconds.
SEGMENT_BYTES = 1 << 20

# Rules record a view of a cotangent. Where the user's own cotangent has other strides, it has to be a copy.
ON_ANY_STRIDES: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}


@dataclass(frozen=True, eq=False)
class Segment:
    """A segment of the backward pass: `run(inputs, slots)` returns the gradients of `gradients`, in order."""

    run: Callable[[Sequence[Any], list[Any]], tuple[Any, ...]]
    gradients: tuple[Gradient, ...]
    read_inputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StepCode:
    """A compiled Program. `forward(inputs, slots)` returns the outputs, then the values of the updates."""

    forward: Callable[[Sequence[Any], list[Any]], tuple[Any, ...]]
    segments: tuple[Segment, ...]
    slots: dict[Value, int]
    placed: tuple[Value, ...]  # their tensors are expected after the slots
    num_cotangents: int
    source: str


def compile_program(
    program: Program,
    live: Mapping[str, Any],
    placed: Sequence[Value] = (),
    rooms: Mapping[Node, Callable[[], None]] | None = None,
) -> StepCode:
    """Python functions for the passes of a Program, bound to live things. Cotangents are in the first slots.

    `rooms` are calls that make room for an operation, right before it.
    """
    return _Writer(program, live, placed, rooms or {}).compile()


class _Writer:
    def __init__(
        self,
        program: Program,
        live: Mapping[str, Any],
        placed: Sequence[Value],
        rooms: Mapping[Node, Callable[[], None]],
    ) -> None:
        self.program, self.live, self.rooms = program, live, rooms
        self.placed = tuple(placed)
        self.input_index = {item.value: index for index, item in enumerate(program.inputs)}
        self.roots = find_lifetimes(program).root
        self.constants: dict[str, Any] = {}
        self.constant_names: dict[int, str] = {}
        self.names: dict[Value, str] = {}
        self.stretches = self._cut()
        self.last_stretch = self._find_last_stretch()
        self.slots = self._assign_slots()
        self.places = {value: len(self.slots) + index for index, value in enumerate(self.placed)}

    def compile(self) -> StepCode:
        ends = (*self.program.outputs, *(update.value for update in self.program.updates))
        sources = [self._write_function("forward", 0, self.program.first_pass, ends)]
        for index, (nodes, gradients) in enumerate(self.stretches, start=1):
            results = tuple(gradient.value for gradient in gradients if gradient.value is not None)
            sources.append(self._write_function(f"backward_{index}", index, nodes, results))
        source, code = _compile("\n".join(sources))
        namespace = {STEP_SOURCE: source, **self.constants}
        exec(code, namespace)
        segments = tuple(
            Segment(namespace[f"backward_{index}"], gradients, self._read_inputs(nodes, gradients))
            for index, (nodes, gradients) in enumerate(self.stretches, start=1)
        )
        num_cotangents = len(self.program.cotangents)
        return StepCode(namespace["forward"], segments, self.slots, self.placed, num_cotangents, source)

    def _cut(self) -> list[tuple[tuple[Node, ...], tuple[Gradient, ...]]]:
        """Stretches of backward nodes, each with the gradients that are complete at its end and not read after it.

        Autograd would copy a tensor that something else still holds, and hooks may change the tensor that they get.
        What pauses hands its gradients over by itself, and autograd gets none.
        """
        if any(node.operation.pauses for node in self.program.nodes):
            return []
        last_use = {
            self.roots[value]: index
            for index, node in enumerate(self.program.second_pass)
            for value in (*node.inputs, *node.named_outputs)
        }
        complete: dict[int, list[Gradient]] = {}
        for gradient in self.program.gradients:
            if gradient.value is not None:
                complete.setdefault(last_use.get(self.roots[gradient.value], -1), []).append(gradient)
        stretches, start, pending, num_bytes = [], 0, list(complete.pop(-1, [])), 0
        for end in sorted(complete):
            pending += complete[end]
            num_bytes += sum(gradient.value.type.num_bytes for gradient in complete[end] if gradient.value is not None)
            if num_bytes >= SEGMENT_BYTES or end == max(complete):
                stretches.append((self.program.second_pass[start : end + 1], tuple(pending)))
                start, pending, num_bytes = end + 1, [], 0
        if pending:
            stretches.append(((), tuple(pending)))
        return stretches

    def _find_last_stretch(self) -> dict[Value, int]:
        """The last function (0 is the forward pass) that reads each value."""
        last: dict[Value, int] = {}
        for node in self.program.first_pass:
            last.update(dict.fromkeys(node.inputs, 0))
        last.update(dict.fromkeys(self.program.outputs, 0))
        for index, (nodes, gradients) in enumerate(self.stretches, start=1):
            for node in nodes:
                last.update(dict.fromkeys(node.inputs, index))
            last.update({gradient.value: index for gradient in gradients if gradient.value is not None})
        return last

    def _assign_slots(self) -> dict[Value, int]:
        slots = {item.value: index for index, item in enumerate(self.program.cotangents)}
        for nodes, index in [(self.program.first_pass, 0), *((s[0], i) for i, s in enumerate(self.stretches, 1))]:
            for node in nodes:
                for value in node.outputs:
                    if value is not None and self.last_stretch.get(value, -1) > index:
                        slots[value] = len(slots)
        return slots

    def _read_inputs(self, nodes: Sequence[Node], gradients: Sequence[Gradient]) -> tuple[int, ...]:
        """The inputs whose memory the stretch reads, also through views that the forward pass made of them."""
        read = {value for node in nodes for value in node.inputs} | {gradient.value for gradient in gradients}
        roots = {self.roots[value] for value in read if value is not None}
        return tuple(sorted(self.input_index[value] for value in roots if value in self.input_index))

    def _write_function(self, name: str, index: int, nodes: Sequence[Node], ends: Sequence[Value]) -> str:
        lines: list[str] = []
        known: set[Value] = set()
        last_read = {value: position for position, node in enumerate(nodes) for value in node.inputs}

        def load(value: Value) -> str:
            variable = self._name(value)
            if value not in known:
                known.add(value)
                if value in self.input_index:
                    lines.append(f"{variable} = inputs[{self.input_index[value]}]")
                else:
                    lines.append(f"{variable} = slots[{self.slots[value]}]")
                    if self.last_stretch.get(value) == index:
                        lines.append(f"slots[{self.slots[value]}] = None")
            return variable

        def drop(value: Value) -> None:
            known.discard(value)
            lines.append(f"del {self._name(value)}")

        for position, node in enumerate(nodes):
            for value in node.inputs:
                load(value)
            if node in self.rooms:
                lines.append(f"{self._constant(self.rooms[node])}()")
            lines.append(
                f"{self._write_node(node, is_backward=index > 0)}{MARK}{node.phase.value} {node.operation.name}"
            )
            for value in dict.fromkeys(node.inputs):
                if last_read[value] == position and value not in ends:
                    drop(value)
            for value in node.named_outputs:
                known.add(value)
                if self.last_stretch.get(value, -1) > index:
                    lines.append(f"slots[{self.slots[value]}] = {self._name(value)}")
                if value not in last_read and value not in ends:
                    drop(value)
        results = [load(value) for value in ends]
        lines.append(f"return ({', '.join(results)}{',' if results else ''})")
        return "\n    ".join([f"def {name}(inputs, slots):", *lines])

    def _write_node(self, node: Node, is_backward: bool) -> str:
        operation = node.operation
        if operation.pauses:
            return "yield"
        if is_backward and node.target in ON_ANY_STRIDES:
            operation = operation_of(ON_ANY_STRIDES[node.target])
        arguments = [self._write_argument(argument) for argument in node.args]
        arguments += [f"{name}={self._write_argument(argument)}" for name, argument in node.kwargs.items()]
        if any(value in self.places for value in node.named_outputs):
            return self._write_into(node, arguments)
        function = operation.run
        if operation.overload is function:
            function = callable_for(operation.overload, node.args, node.kwargs)
        call = f"{self._constant(function)}({', '.join(arguments)})"
        if not node.outputs:
            return call
        names = [self._name(value) if value is not None else "_" for value in node.outputs]
        line = f"{', '.join(names)}, = {call}" if operation.returns_tuple else f"{names[0]} = {call}"
        return f"{line}; del _" if "_" in names else line

    def _write_into(self, node: Node, arguments: list[str]) -> str:
        """The call of an operation that is told where to write; outputs outside the arena are allocated before it."""
        destination = node.operation.destination
        assert destination is not None
        tensors = [self._write_tensor(value, destination.takes_some) for value in node.outputs]
        function = self._constant(destination.call)
        names = [self._name(value) if value is not None else "_" for value in node.outputs]
        if destination.names is None:
            arguments.append(f"out=({', '.join(tensors)},)")
            line = (
                f"{', '.join(names)}{',' if node.operation.returns_tuple else ''} = {function}({', '.join(arguments)})"
            )
            return f"{line}; del _" if "_" in names else line
        lines = [f"{name} = {tensor}" for name, tensor in zip(names, tensors, strict=True)]
        arguments += [f"{key}={name}" for key, name in zip(destination.names, names, strict=True)]
        return "; ".join([*lines, f"{function}({', '.join(arguments)})"])

    def _write_tensor(self, value: Value | None, makes_others: bool) -> str:
        """The tensor for an output: one of the arena, or a new one, which the operation may make for itself."""
        if value in self.places:
            return f"slots[{self.places[value]}]"
        return "None" if value is None or makes_others else f"{self._constant(partial(_make, value))}()"

    def _write_argument(self, argument: Any) -> str:
        if isinstance(argument, Value):
            return self._name(argument)
        if isinstance(argument, tuple | list) and not _is_sizes(argument):
            items = ", ".join([self._write_argument(item) for item in argument])
            return f"({items}{',' if len(argument) == 1 else ''})"
        if argument is None or isinstance(argument, bool):
            return repr(argument)
        if isinstance(argument, int | tuple | list):
            return self._new_constant(argument if isinstance(argument, int) else tuple(argument))
        return self._constant(bind(argument, self.live) if isinstance(argument, Live) else argument)

    def _constant(self, item: Any) -> str:
        name = self.constant_names.get(id(item))
        if name is None:
            name = self.constant_names[id(item)] = self._new_constant(item)
        return name

    def _new_constant(self, item: Any) -> str:
        """A name of its own: sizes are not in the text, nor which of them are equal."""
        name = f"k{len(self.constants)}"
        self.constants[name] = item
        return name

    def _name(self, value: Value) -> str:
        return self.names.setdefault(value, f"v{len(self.names)}")


@lru_cache(maxsize=256)
def _compile(source: str) -> tuple[str, CodeType]:
    """The code of a text, and the text as it was first met. Steps of other lengths have the same text."""
    return source, compile(source, STEP_FILE, "exec")


def _is_sizes(argument: Sequence[Any]) -> bool:
    return all(type(item) is int for item in argument)


def _make(value: Value) -> torch.Tensor:
    kind = value.tensor_type
    return torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device)
