"""The Program: a training step as an immutable, typed, single-assignment list of operations.

A Program is first recorded as a forward pass; autodiff returns a longer one that also holds the backward pass, and a
training step ends with updates. It is data: nodes name operations, values and live things; nothing in it is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from undertow.ir.operation import Operation
from undertow.ir.pytorch import operation_of
from undertow.ir.types import OpaqueType
from undertow.ir.values import Value, map_values, values_in


class Phase(Enum):
    """Which part of a training step a node belongs to, wherever in the step it runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Task(Enum):
    """What a node of a plan is for; the planner decides it."""

    FIRST = "first run"
    AGAIN = "second run"
    ENCODE = "encode"
    DECODE = "decode"
    READ_CODE = "read code"
    RECORD_STATE = "record the generator's state"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from in the user's code, and which node it was derived from."""

    module_path: str = ""
    file: str = ""
    line: int = 0
    derived_from: str = ""  # the printed name of the forward node's first output, for generated nodes

    @property
    def location(self) -> str:
        """`file:line`, the file without its folders."""
        return f"{self.file.rpartition('/')[2]}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        return "  ".join(part for part in (self.module_path, self.location) if part)


class InputKind(Enum):
    """What an input of a Program is to the user."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ARGUMENT = "argument"
    ATTRIBUTE = "attribute"  # a tensor that a module holds without having registered it
    CONSTANT = "constant"  # a tensor that the code finds elsewhere: in a closure, in a literal
    PREPARED = "prepared"  # weights in another form, made by the Program's preparation
    COTANGENT = "cotangent"  # the derivative of the user's loss by an output, given at backward time


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """An input of a Program and the path by which the user knows it."""

    value: Value
    kind: InputKind
    path: str
    is_leaf: bool = True  # False where the user computed it, and autograd goes on with its gradient


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation. Arguments are Values, Live things, constants, or tuples of them; an output nobody reads may be
    None. One of PyTorch's operations may be given for its record.
    """

    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Value | None, ...]
    origin: Origin
    phase: Phase = Phase.FORWARD
    task: Task = Task.FIRST
    # Every Value among the arguments, in order, repetitions included; every pass asks for it.
    inputs: tuple[Value, ...] = field(init=False, repr=False)
    named_outputs: tuple[Value, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        if type(self.operation) is not Operation:
            set_field(self, "operation", operation_of(self.operation))
        inputs = values_in(self.args)
        if inputs == self.args:  # usual, and one tuple less to keep
            inputs = self.args
        if self.kwargs:
            inputs += values_in(tuple(self.kwargs.values()))
        set_field(self, "inputs", inputs)
        has_unnamed = None in self.outputs
        named = tuple([value for value in self.outputs if value is not None]) if has_unnamed else self.outputs
        set_field(self, "named_outputs", named)

    @property
    def target(self) -> Any:
        """What rules and passes know the operation by: PyTorch's own, or the record."""
        return self.operation.key

    @property
    def name(self) -> str:
        """The operation's name: `convolution`, `add.Tensor`."""
        return self.operation.name

    @property
    def shared_input(self) -> Value | None:
        """The input in whose memory the outputs lie."""
        place = self.operation.shares
        return None if place is None or not self.inputs else self.inputs[place]

    def with_values(self, change: Callable[[Value], Value]) -> Node:
        """The node with every Value v among its arguments replaced by `change(v)`; itself where none changes."""
        new = {value: change(value) for value in self.inputs}
        if all(value is found for value, found in new.items()):
            return self
        kwargs = {name: map_values(item, new.__getitem__) for name, item in self.kwargs.items()}
        args = map_values(self.args, new.__getitem__)
        return Node(self.operation, args, kwargs, self.outputs, self.origin, self.phase, self.task)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """At the end of the forward pass, `value` is written into the user's tensor of `input`: a buffer's statistics."""

    input: Value
    value: Value


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """The cotangent of an input; `value` is None where the outputs do not depend on it."""

    input: Value
    value: Value | None

    @property
    def is_in_rows(self) -> bool:
        """Whether it is a sparse tensor: some rows of a table, how many is known only at run time."""
        return self.value is not None and isinstance(self.value.type, OpaqueType)


@dataclass(frozen=True, eq=False)
class Program:
    """A forward pass, after autodiff its backward pass, and in a whole training step what is done with the gradients.

    At the `boundary` the user's code takes the outputs and brings the cotangents; where there are no cotangents, all
    nodes come before it. In a whole training step `seed` is the cotangent of the loss, which a node makes.
    `differentiable` are the values through which eager PyTorch would carry a gradient. `unread` are arguments of which
    nothing is read: the user holds them during the step. `preparation` makes the prepared inputs from parameters and
    buffers; it runs when one of these has changed.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    updates: tuple[Update, ...] = ()
    differentiable: frozenset[Value] = frozenset()
    boundary: int = 0
    cotangents: tuple[Input, ...] = ()
    gradients: tuple[Gradient, ...] = field(default=())
    seed: Value | None = None
    unread: tuple[Input, ...] = ()
    preparation: Program | None = None

    @property
    def first_pass(self) -> tuple[Node, ...]:
        """What runs before the cotangents are there."""
        return self.nodes[: self.boundary]

    @property
    def second_pass(self) -> tuple[Node, ...]:
        """What runs after that; nothing where there are no cotangents."""
        return self.nodes[self.boundary :]

    @cached_property
    def makers(self) -> dict[Value, Node]:
        """The node that makes each value."""
        return {value: node for node in self.nodes for value in node.named_outputs}

    @cached_property
    def positions(self) -> dict[Node, int]:
        """Where each node stands."""
        return {node: position for position, node in enumerate(self.nodes)}

    @cached_property
    def ends(self) -> tuple[Value, ...]:
        """What is there when the step has run: outputs, new values of buffers, gradients."""
        ends = [*self.outputs, *(update.value for update in self.updates)]
        ends += [gradient.value for gradient in self.gradients if gradient.value is not None]
        return tuple(ends)

    @cached_property
    def readers(self) -> dict[Value, list[int]]:
        """For each value the positions of the nodes that read it; what is there at the end is read at -1."""
        readers: dict[Value, list[int]] = {}
        for position, node in enumerate(self.nodes):
            for value in dict.fromkeys(node.inputs):
                readers.setdefault(value, []).append(position)
        for value in self.ends:
            readers.setdefault(value, []).append(-1)
        return readers

    @cached_property
    def backward_start(self) -> int:
        """The position of the first node of the backward pass; the number of nodes where there is none.

        Where no cotangents come from outside, it is the node that makes the loss's cotangent. Parts of a derivative
        may have run before it.
        """
        if self.cotangents:
            return self.boundary
        if self.seed in self.makers:
            return self.positions[self.makers[self.seed]]
        runs = (
            position
            for position, node in enumerate(self.nodes)
            if node.phase is Phase.BACKWARD and node.task in (Task.FIRST, Task.READ_CODE)
        )
        return next(runs, len(self.nodes))

    def count(self, phase: Phase) -> int:
        """How many nodes belong to a phase."""
        return sum(node.phase is phase for node in self.nodes)

    def map_nodes(self, change: Callable[[Node], Iterable[Node]]) -> Program:
        """The Program with each node replaced by others, none or several; passes stay apart."""
        return self.with_pieces([tuple(change(node)) for node in self.nodes])

    def with_pieces(self, pieces: Sequence[Sequence[Node]]) -> Program:
        """The Program with each node replaced by the nodes of its piece, none or several; passes stay apart."""
        boundary = sum(len(piece) for piece in pieces[: self.boundary])
        return replace(self, nodes=tuple(node for piece in pieces for node in piece), boundary=boundary)

    def with_ends(self, change: Callable[[Value], Value]) -> Program:
        """The Program whose outputs, updates and gradients are `change(value)` of what they were."""
        return replace(
            self,
            outputs=tuple(map(change, self.outputs)),
            updates=tuple(replace(item, value=change(item.value)) for item in self.updates),
            gradients=tuple(
                item if item.value is None else replace(item, value=change(item.value)) for item in self.gradients
            ),
        )

    def __str__(self) -> str:
        from undertow.ir.printer import print_program

        return print_program(self)
