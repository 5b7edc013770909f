"""The Program: a training step as an immutable, typed, single-assignment list of operations.

A Program comes out of capture as a forward pass; autodiff returns a longer one that also holds the backward pass. It
is pure data: what an operation computes is known to its `target`, what its derivative is to the operation registry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from undertow.ir.types import TensorType, ValueType


class Operation(Protocol):
    """What a node runs: an ATen operation, or one of Undertow's own with the same calling convention."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


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


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One result, assigned once. Values are compared by identity; `name` is unique within a Program."""

    name: str
    type: ValueType

    @property
    def tensor_type(self) -> TensorType:
        """The type of a value that is known to be a tensor."""
        assert isinstance(self.type, TensorType)
        return self.type

    def __str__(self) -> str:
        return f"%{self.name}"

    __repr__ = __str__


class InputKind(Enum):
    """What an input of a Program is to the user."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ARGUMENT = "argument"
    ATTRIBUTE = "attribute"  # a tensor that a module holds without having registered it
    CONSTANT = "constant"  # a tensor the code reaches by itself: a closure, a literal
    PREPARED = "prepared"  # weights in another form, made by the Program's preparation
    COTANGENT = "cotangent"  # the derivative of the user's loss by an output, given at backward time


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """An input of a Program and the path by which the user knows it."""

    value: Value
    kind: InputKind
    path: str


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation. Arguments are Values, constants, or tuples of them; an output nobody reads may be None."""

    target: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Value | None, ...]
    origin: Origin
    # Every Value among the arguments, in order, repetitions included; every pass asks for it.
    inputs: tuple[Value, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(values_in((self.args, tuple(self.kwargs.values())))))

    @property
    def kept_outputs(self) -> tuple[Value, ...]:
        """The outputs that have a name."""
        return tuple(value for value in self.outputs if value is not None)

    @property
    def name(self) -> str:
        """The operation's short name: `convolution`, `add.Tensor`."""
        return operation_name(self.target)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """At the end of the forward pass the user's tensor behind `input` takes `value`: a buffer's statistics."""

    input: Value
    value: Value


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """The cotangent of an input; `value` is None where the outputs do not depend on it."""

    input: Value
    value: Value | None


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A forward pass, and after autodiff its backward pass behind it.

    `differentiable` are the values through which eager PyTorch would carry a gradient. `preparation` makes the prepared
    inputs from parameters and buffers; it runs when one of these has changed.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    updates: tuple[Update, ...] = ()
    differentiable: frozenset[Value] = frozenset()
    num_forward_nodes: int = 0
    cotangents: tuple[Input, ...] = ()
    gradients: tuple[Gradient, ...] = field(default=())
    preparation: Program | None = None

    @property
    def forward_nodes(self) -> tuple[Node, ...]:
        """The nodes of the forward pass."""
        return self.nodes[: self.num_forward_nodes]

    @property
    def backward_nodes(self) -> tuple[Node, ...]:
        """The nodes of the backward pass; empty before autodiff."""
        return self.nodes[self.num_forward_nodes :]

    def with_pieces(self, pieces: Sequence[Sequence[Node]]) -> Program:
        """The Program with each node replaced by those of its piece, none or several; passes stay apart."""
        num_forward = sum(len(piece) for piece in pieces[: self.num_forward_nodes])
        return replace(self, nodes=tuple(node for piece in pieces for node in piece), num_forward_nodes=num_forward)

    def __str__(self) -> str:
        from undertow.ir.printer import print_program

        return print_program(self)


def values_in(arguments: Any) -> Iterator[Value]:
    """The Values in nested tuples."""
    if isinstance(arguments, Value):
        yield arguments
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from values_in(argument)


def map_values(arguments: Any, replace: Any) -> Any:
    """`arguments` with every Value v replaced by `replace(v)`, tuples kept."""
    if isinstance(arguments, Value):
        return replace(arguments)
    if isinstance(arguments, tuple | list):
        return tuple(map_values(argument, replace) for argument in arguments)
    return arguments


def operation_name(target: Operation) -> str:
    """`aten.add.Tensor` as `add.Tensor`, `aten.relu.default` as `relu`; Undertow's own by their name."""
    text = str(target).removeprefix("aten.")
    return text.removesuffix(".default")
