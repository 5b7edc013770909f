"""Other ways to the same bits, for the planner to choose from.

In: a derived Program. Out: Alternatives, each one node that may run beside or instead of a node of the Program:
a second run of a random operation under the recorded state, a smaller code of a value, the value decoded again, an
operation that reads the code instead of the value, or one that makes a part of the outputs from fewer inputs.

What is possible for an operation is said in its family's file by `register_code` (an operation that can read a code of
its argument), `register_codec` (an output that can be encoded and decoded), `register_second_run` and `register_parts`.
Boolean values need no record: any mask can be held at one bit per element, by NumPy. Only dense CPU tensors have codes
so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from undertow.ir import Node, Program, TensorType, Value
from undertow.kernels.bits import num_packed_bytes, pack_mask, pack_signs, unpack_mask
from undertow.kernels.compiler import HAS_NUMBA
from undertow.ops.fused import Group, fused
from undertow.ops.lifetimes import is_dense, shared_argument
from undertow.ops.own import GENERATOR_STATE_BYTES, OwnOperation, Replayed, draws, is_random
from undertow.ops.registry import bind_arguments


class Role(Enum):
    """What an alternative is good for."""

    SECOND_RUN = "second run"
    ENCODE = "encode"
    DECODE = "decode"
    READ = "read code"
    PART = "part"


@dataclass(frozen=True, eq=False)
class Alternative:
    """`node` runs in place of, or besides, the Program's node at `position`.

    Its arguments and outputs are the Program's values, except `code` and `state`, which are its own.
    """

    role: Role
    position: int
    node: Node
    code: Value | None = None
    state: Value | None = None


@dataclass(frozen=True)
class Code:
    """Of one of its arguments, `value_of(node)`, a node needs only a code.

    `readers(node, code)` are nodes that take the code instead, and make the same outputs or some of them.
    """

    value_of: Callable[[Node], Value | None]
    code_type: Callable[[TensorType], TensorType]
    encode: OwnOperation
    readers: Callable[[Node, Value], Iterable[Node]]


@dataclass(frozen=True)
class Codec:
    """An output in fewer bytes: `encode(value)` and `decode(code)` as (operation, further arguments)."""

    code_type: TensorType
    encode: tuple[OwnOperation, tuple[Any, ...]]
    decode: tuple[OwnOperation, tuple[Any, ...]]


_CODES: dict[Any, Code] = {}
_CODECS: dict[Any, dict[int, Callable[[dict[str, Any], TensorType], Codec | None]]] = {}
# The Program's node that makes a value: a second run may do the work of several.
Makers = Mapping[Value, Node]
_SECOND_RUNS: dict[Any, list[Callable[[Node, Makers], Iterable[Node]]]] = {}
_PARTS: dict[Any, Callable[[Node], Iterable[Node]]] = {}


def register_code(reader: Any, code: Code) -> None:
    """`reader` can work from a code of one of its arguments, where its loops are compiled."""
    if HAS_NUMBA:
        _CODES[reader] = code


def register_codec(maker: Any, output: int, codec: Callable[[dict[str, Any], TensorType], Codec | None]) -> None:
    """Output number `output` of `maker` has a code; `codec` sees the call's arguments and the output's type.

    Where loops are not compiled, encoding would take longer than the step.
    """
    if HAS_NUMBA:
        _CODECS.setdefault(maker, {})[output] = codec


def register_second_run(target: Any, second_runs: Callable[[Node, Makers], Iterable[Node]]) -> None:
    """`target`, run again within a step, may run as another node."""
    _SECOND_RUNS.setdefault(target, []).append(second_runs)


def register_parts(target: Any, parts: Callable[[Node], Iterable[Node]]) -> None:
    """Each of `parts` makes some of the outputs of a `target` on the CPU; all of them together make all."""
    _PARTS[target] = parts


def find_alternatives(program: Program) -> list[Alternative]:
    """Every alternative for the nodes of `program`, in their order."""
    found: list[Alternative] = []
    makers = {value: node for node in program.nodes for value in node.kept_outputs}
    for position, node in enumerate(program.nodes):
        if shared_argument(node.target, node.inputs) is not None:
            continue
        found += _second_runs(position, node, makers)
        found += _codecs(position, node)
        if node.target in _CODES:
            found += _readings(position, node)
        if node.target in _PARTS:
            found += [Alternative(Role.PART, position, part) for part in _PARTS[node.target](node)]
    return found


def _second_runs(position: int, node: Node, makers: Makers) -> Iterator[Alternative]:
    if draws(node):
        device = next(value.tensor_type.device for value in (*node.outputs, *node.inputs) if value is not None)
        state = Value(f"state_{position}", _bytes_type(GENERATOR_STATE_BYTES))
        target = Replayed(node.target, device)
        yield Alternative(
            Role.SECOND_RUN, position, replace(node, target=target, args=(state, *node.args)), state=state
        )
    elif is_random(node.target):
        yield Alternative(Role.SECOND_RUN, position, replace(node))
    if isinstance(group := getattr(node.target, "run", None), Group):
        values = {**dict(zip(group.reads, node.args, strict=True)), **dict(zip(group.makes, node.outputs, strict=True))}
        for part in group.parts():
            args, outputs = (tuple(values[value] for value in side) for side in (part.reads, part.makes))
            yield Alternative(Role.SECOND_RUN, position, replace(node, target=fused(part), args=args, outputs=outputs))
    for second_runs in _SECOND_RUNS.get(node.target, ()):
        for again in second_runs(node, makers):
            yield Alternative(Role.SECOND_RUN, position, again)


def packed_type(kind: TensorType) -> TensorType:
    """The type of one bit per element of a tensor."""
    return _bytes_type(num_packed_bytes(kind.num_elements))


def _bytes_type(num_bytes: int) -> TensorType:
    return TensorType(torch.uint8, (num_bytes,), (1,), torch.device("cpu"))


PACK_SIGNS = OwnOperation("pack_signs", pack_signs, writes_into=True)
PACK_MASK = OwnOperation("pack_mask", pack_mask, writes_into=True)
UNPACK_MASK = OwnOperation("unpack_mask", unpack_mask, writes_into=True)


def _codecs(position: int, node: Node) -> Iterator[Alternative]:
    target: Any = node.target
    codecs = _CODECS.get(target, {})
    for index, value in enumerate(node.outputs):
        if value is None or not isinstance(value.type, TensorType) or value.type.device.type != "cpu":
            continue
        kind = value.type
        codec = codecs[index](bind_arguments(target, node.args, node.kwargs), kind) if index in codecs else None
        if codec is None and kind.dtype is torch.bool and is_dense(value):
            codec = Codec(packed_type(kind), (PACK_MASK, ()), (UNPACK_MASK, (kind.shape, kind.strides)))
        if codec is None or codec.code_type.num_bytes >= kind.num_bytes:
            continue
        code = Value(f"{value.name}_code", codec.code_type)
        origin = replace(node.origin, derived_from=value.name)
        encode, encode_args = codec.encode
        decode, decode_args = codec.decode
        yield Alternative(Role.ENCODE, position, Node(encode, (value, *encode_args), {}, (code,), origin), code=code)
        yield Alternative(Role.DECODE, position, Node(decode, (code, *decode_args), {}, (value,), origin), code=code)


def _readings(position: int, node: Node) -> Iterator[Alternative]:
    record = _CODES[node.target]
    value = record.value_of(node)
    if value is None:
        return
    kind = value.tensor_type
    if kind.device.type != "cpu" or not is_dense(value) or kind.dtype not in (torch.float32, torch.float64):
        return
    code = Value(f"{value.name}_code_{position}", record.code_type(kind))
    readers = list(record.readers(node, code))
    if readers:
        origin = replace(node.origin, derived_from=value.name)
        yield Alternative(Role.ENCODE, position, Node(record.encode, (value,), {}, (code,), origin), code=code)
    for reader in readers:
        yield Alternative(Role.READ, position, reader, code=code)
