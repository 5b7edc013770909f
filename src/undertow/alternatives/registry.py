"""Other ways to the same bits, for the planner to choose from.

In: a derived Program. Out: Alternatives. Each is one node that may run in addition to, or instead of, a node of the
Program: it runs a random operation again under the recorded state, encodes a value, decodes it, reads a code instead of
the value, or makes a part of the outputs from fewer inputs.

The file of each family of operations registers what is possible: `register_code` for an operation that can read a code
of its argument, `register_codec` for an output that can be encoded and decoded, `register_second_run` and
`register_parts`. Boolean values need no record: NumPy packs any mask to one bit per element. Only dense CPU tensors
have codes so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from undertow.ir import Node, Operation, Program, TensorType, Value
from undertow.ir.schema import bind_arguments
from undertow.kernels.bits import num_packed_bytes, pack_mask, pack_signs, unpack_mask
from undertow.kernels.compiler import HAS_NUMBA
from undertow.memory.lifetimes import is_dense
from undertow.ops.own import GENERATOR_STATE_BYTES, register_kernel, replayed


class Role(Enum):
    """What an alternative is good for."""

    SECOND_RUN = "second run"
    ENCODE = "encode"
    DECODE = "decode"
    READ = "read code"
    PART = "part"


@dataclass(frozen=True, eq=False)
class Alternative:
    """`node` runs instead of, or in addition to, the Program's node at `position`.

    Its arguments and outputs are values of the Program, except `code` and `state`. `covers` are further nodes whose
    work it does, the last first; each feeds a node listed before it. With `is_instead`, the planner does not run the
    Program's own node a second time.
    """

    role: Role
    position: int
    node: Node
    covers: tuple[Node, ...] = ()
    is_instead: bool = False
    code: Value | None = None
    state: Value | None = None


@dataclass(frozen=True)
class Code:
    """A node needs only a code of one of its arguments, `value_of(node)`.

    `readers(node, code)` are nodes that read the code instead and make all of the same outputs or some of them.
    """

    value_of: Callable[[Node], Value | None]
    code_type: Callable[[TensorType], TensorType]
    encode: Operation
    readers: Callable[[Node, Value], Iterable[Node]]


@dataclass(frozen=True)
class Codec:
    """An output in fewer bytes: `encode(value)` and `decode(code)` as (operation, further arguments)."""

    code_type: TensorType
    encode: tuple[Operation, tuple[Any, ...]]
    decode: tuple[Operation, tuple[Any, ...]]


_CODES: dict[Any, Code] = {}
_CODECS: dict[Any, dict[int, Callable[[dict[str, Any], TensorType], Codec | None]]] = {}
# The Program's node that makes a value: a second run may do the work of several.
Makers = Mapping[Value, Node]


@dataclass(frozen=True, eq=False)
class SecondRun:
    """A node to run a second time; `covers` and `is_instead` as in an Alternative."""

    node: Node
    covers: tuple[Node, ...] = ()
    is_instead: bool = False


_SECOND_RUNS: dict[Any, list[Callable[[Node, Makers], Iterable[SecondRun]]]] = {}
_PARTS: dict[Any, Callable[[Node], Iterable[Node]]] = {}


def register_code(reader: Any, code: Code) -> None:
    """`reader` can read a code of one of its arguments. Ignored where loops are not compiled."""
    if HAS_NUMBA:
        _CODES[reader] = code


def register_codec(maker: Any, output: int, codec: Callable[[dict[str, Any], TensorType], Codec | None]) -> None:
    """Output number `output` of `maker` has a code; `codec` sees the call's arguments and the output's type.

    Where loops are not compiled, encoding would take longer than the step.
    """
    if HAS_NUMBA:
        _CODECS.setdefault(maker, {})[output] = codec


def register_second_run(target: Any, second_runs: Callable[[Node, Makers], Iterable[SecondRun]]) -> None:
    """A second run of `target` within a step may be another node."""
    _SECOND_RUNS.setdefault(target, []).append(second_runs)


def register_parts(target: Any, parts: Callable[[Node], Iterable[Node]]) -> None:
    """Each of `parts` makes some outputs of a `target` on the CPU; together they make all of them."""
    _PARTS[target] = parts


def find_parts(node: Node) -> Iterable[Node]:
    """The nodes that make the outputs of `node` part by part, with the same bits; none where it cannot be parted."""
    return _PARTS[node.target](node) if node.target in _PARTS else ()


def find_alternatives(program: Program) -> list[Alternative]:
    """Every alternative for the nodes of `program`, in their order."""
    found: list[Alternative] = []
    for position, node in enumerate(program.nodes):
        if node.shared_input is not None:
            continue
        found += _second_runs(position, node, program.makers)
        found += _codecs(position, node)
        if node.target in _CODES:
            found += _code_readers(position, node)
        found += [Alternative(Role.PART, position, part) for part in find_parts(node)]
    return found


def _second_runs(position: int, node: Node, makers: Makers) -> Iterator[Alternative]:
    if node.operation.draws(node):
        device = next(value.tensor_type.device for value in (*node.outputs, *node.inputs) if value is not None)
        state = Value(f"state_{position}", _bytes_type(GENERATOR_STATE_BYTES))
        again = replace(node, operation=replayed(node.operation, device), args=(state, *node.args))
        yield Alternative(Role.SECOND_RUN, position, again, state=state)
    elif node.operation.is_random:
        yield Alternative(Role.SECOND_RUN, position, replace(node))
    for part in node.operation.second_runs(node):
        yield Alternative(Role.SECOND_RUN, position, part)
    for second_runs in _SECOND_RUNS.get(node.target, ()):
        for run in second_runs(node, makers):
            yield Alternative(Role.SECOND_RUN, position, run.node, run.covers, run.is_instead)


def packed_type(tensor_type: TensorType) -> TensorType:
    """The type of one bit per element of a tensor."""
    return _bytes_type(num_packed_bytes(tensor_type.num_elements))


def _bytes_type(num_bytes: int) -> TensorType:
    return TensorType(torch.uint8, (num_bytes,), (1,), torch.device("cpu"))


PACK_SIGNS = register_kernel("pack_signs", pack_signs, writes_into=True)
PACK_MASK = register_kernel("pack_mask", pack_mask, writes_into=True)
UNPACK_MASK = register_kernel("unpack_mask", unpack_mask, writes_into=True)


def _codecs(position: int, node: Node) -> Iterator[Alternative]:
    codecs = _CODECS.get(node.target, {})
    for index, value in enumerate(node.outputs):
        if value is None or not isinstance(value.type, TensorType) or value.type.device.type != "cpu":
            continue
        tensor_type = value.type
        codec = (
            codecs[index](bind_arguments(node.target, node.args, node.kwargs), tensor_type) if index in codecs else None
        )
        if codec is None and tensor_type.dtype is torch.bool and is_dense(value):
            codec = Codec(
                packed_type(tensor_type), (PACK_MASK, ()), (UNPACK_MASK, (tensor_type.shape, tensor_type.strides))
            )
        if codec is None or codec.code_type.num_bytes >= tensor_type.num_bytes:
            continue
        code = Value(f"{value.name}_code", codec.code_type)
        origin = replace(node.origin, derived_from=value.name)
        encode, encode_args = codec.encode
        decode, decode_args = codec.decode
        encoder = Node(encode, (value, *encode_args), {}, (code,), origin, node.phase)
        decoder = Node(decode, (code, *decode_args), {}, (value,), origin, node.phase)
        yield Alternative(Role.ENCODE, position, encoder, code=code)
        yield Alternative(Role.DECODE, position, decoder, code=code)


def _code_readers(position: int, node: Node) -> Iterator[Alternative]:
    record = _CODES[node.target]
    value = record.value_of(node)
    if value is None:
        return
    tensor_type = value.tensor_type
    if (
        tensor_type.device.type != "cpu"
        or not is_dense(value)
        or tensor_type.dtype not in (torch.float32, torch.float64)
    ):
        return
    code = Value(f"{value.name}_code_{position}", record.code_type(tensor_type))
    readers = list(record.readers(node, code))
    if readers:
        origin = replace(node.origin, derived_from=value.name)
        encoder = Node(record.encode, (value,), {}, (code,), origin, node.phase)
        yield Alternative(Role.ENCODE, position, encoder, code=code)
    for reader in readers:
        yield Alternative(Role.READ, position, reader, code=code)
