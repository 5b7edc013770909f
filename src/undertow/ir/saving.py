"""Plans as files. In: a Plan. Out: text that another process reads back as the same Plan, and the other way round.

Everything is plain data: numbers, texts, lists. Values are numbered. Operations are named by their makers and
parameters, and found through the registry. Live things are named. Nothing is unpickled, and a file is not trusted: its
length and hash are compared first, its structure is checked as it is read, and its content by `check_program` and
`check_plan`. A process that runs a saved plan derives the step itself and compares. Times and workspaces are the
writer's measurements, which nobody else can check. Floating-point numbers are written in hexadecimal, so that they come
back bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from undertow.cache import write_whole
from undertow.errors import PlanError, ProgramError
from undertow.ir.check import check_program
from undertow.ir.check_plan import check_plan
from undertow.ir.cost import Cost, read_cost
from undertow.ir.fragment import Fragment
from undertow.ir.live import Live
from undertow.ir.operation import Operation, find_operation
from undertow.ir.plan import KeptValue, Outcome, Plan, Tables
from undertow.ir.program import Gradient, Input, InputKind, Node, Origin, Phase, Program, Task, Update
from undertow.ir.types import OpaqueType, TensorType, ValueType
from undertow.ir.values import Value

FORMAT = "undertow plan 1"
MAX_FILE_BYTES = 256 << 20  # a plan of 20,000 operations takes 10 MiB
MAX_BYTES = 1 << 50  # of one value; more was never planned, and sums stay exact

_FORMATS = {
    name: getattr(torch, name) for name in ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")
}
_ORIGIN = 4  # the index of the origin in a node's row
_PLAIN_TABLES = ("storage_bytes", "offsets", "frees", "workspace_bytes", "duration_ns")
_PLAIN = ("bases", "held", "live_bytes", "budget_bytes", "lower_bound_ns", "has_measured_costs", "notes")


@dataclass(frozen=True, eq=False)
class SavedPlan:
    """A file's plan as plain data, and the costs that it was made from. Only its hash was checked."""

    name: str
    data: Any

    def costs(self) -> dict[str, Cost]:
        """What the operations cost where the plan was made; kernels are chosen by it."""
        with self._malformed():
            return {_text(key): read_cost(cost) for key, cost in self.data["costs"].items()}

    def read(self, base: Program | None = None) -> Plan:
        """The checked plan; with `base`, the plan of that very Program, made of its values."""
        with self._malformed():
            plan = _Reader(self.data, base).plan()
            check_program(plan.base)
            check_program(plan.program)
            return check_plan(plan)

    def is_of(self, base: Program) -> bool:
        """Whether this is a plan of the Program: the same operations on the same values; origins are not compared."""
        with self._malformed():
            own = _Writer()
            written = _as_read({"base": own.program(base), "values": own.values, "operations": own.operations})
            theirs = {
                "base": self.data["plan"]["base"],
                "values": self.data["values"][: len(own.values)],
                "operations": self.data["operations"][: len(own.operations)],
            }
            return _without_origins(written) == _without_origins(theirs)

    @contextmanager
    def _malformed(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            reason = f"its data is malformed ({type(error).__name__}: {error})"
            raise PlanError(f"{self.name}: {reason}") from error
        except (ProgramError, PlanError) as error:
            raise PlanError(f"{self.name}: {error}") from error


def write_plan(plan: Plan, costs: Mapping[str, Cost], path: str | Path) -> None:
    """Write a plan to a file, and the costs it was made from."""
    write_whole(Path(path), pack_plan(plan, costs))


def pack_plan(plan: Plan, costs: Mapping[str, Cost]) -> bytes:
    """The content of such a file."""
    data = _Writer().plan(plan) | {"costs": costs}
    body = json.dumps(data, separators=(",", ":"), default=lambda cost: [cost.duration_ns, cost.workspace_bytes])
    return f"{FORMAT} sha256 {_hash(body)}\n{body}\n".encode()


def read_plan(path: str | Path) -> SavedPlan:
    """The plan in a file; raises PlanError where the file is damaged or holds no plan."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)  # a device or a growing file has another size than it says
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error}") from error
    return unpack_plan(content, str(path))


def unpack_plan(content: bytes, name: str) -> SavedPlan:
    """The plan in the content of a file; `name` is its name in errors."""
    if len(content) > MAX_FILE_BYTES:
        raise PlanError(f"{name} is larger than any plan: more than {MAX_FILE_BYTES} bytes")
    try:
        head, _, body = content.decode("utf-8").partition("\n")
    except UnicodeDecodeError as error:
        raise PlanError(f"{name} cannot be read: {error}") from error
    body = body.removesuffix("\n")
    if head != f"{FORMAT} sha256 {_hash(body)}":
        raise PlanError(f"{name} is not a whole file of the format {FORMAT!r}; save the plan again with this version")
    try:
        return SavedPlan(name, json.loads(body))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{name}: its data is malformed ({error})") from error


def write_node(node: Node) -> Any:
    """One node as plain data."""
    writer = _Writer()
    row = writer.node(node)
    return {"values": writer.values, "operations": writer.operations, "node": row}


def read_node(data: Any) -> Node:
    """The node that `write_node` wrote; raises PlanError or ProgramError where it is not known here."""
    reader = _Reader(data, None)
    return reader.node(data["node"])


def _as_read(data: Any) -> Any:
    return json.loads(json.dumps(data))


def _without_origins(data: Any) -> Any:
    """The data without the origins of nodes: file names differ from machine to machine."""
    program = data["base"]
    rows = [[*node[:_ORIGIN], *node[_ORIGIN + 1 :]] for node in program["nodes"]]
    return data | {"base": program | {"nodes": rows}}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Writer:
    """Numbers values and operations as it meets them."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.operations: list[Any] = []
        self._numbers: dict[Value, int] = {}
        self._operation_numbers: dict[Operation, int] = {}

    def plan(self, plan: Plan) -> Any:
        positions = plan.program.positions
        data = {
            "torch": torch.__version__,
            "base": self.program(plan.base),
            "program": self.program(plan.program),
            "repeats": [[self.value(left), self.value(right)] for left, right in plan.repeats.items()],
            "tables": {name: getattr(plan.tables, name) for name in _PLAIN_TABLES},
            "storage": [[self.value(value), storage] for value, storage in plan.tables.storage.items()],
            "kept": [
                [self.value(item.value), item.num_bytes, positions[item.made_by], item.asked_for_by]
                for item in plan.kept
            ],
            "without_rule": [positions[node] for node in plan.without_rule],
            "outcome": plan.outcome.name,
        }
        data |= {name: getattr(plan, name) for name in _PLAIN}
        return {"values": self.values, "operations": self.operations, "plan": data}

    @property
    def known(self) -> list[Value]:
        return list(self._numbers)

    def program(self, program: Program) -> Any:
        return {
            "inputs": [self._input(item) for item in program.inputs],
            "nodes": [self.node(node) for node in program.nodes],
            "outputs": list(map(self.value, program.outputs)),
            "updates": [[self.value(item.input), self.value(item.value)] for item in program.updates],
            "differentiable": sorted(map(self.value, sorted(program.differentiable, key=lambda value: value.name))),
            "boundary": program.boundary,
            "cotangents": [self._input(item) for item in program.cotangents],
            "gradients": [[self.value(item.input), self.value(item.value)] for item in program.gradients],
            "seed": self.value(program.seed),
            "unread": [self._input(item) for item in program.unread],
            "preparation": None if program.preparation is None else self.program(program.preparation),
        }

    def value(self, value: Value | None) -> int | None:
        if value is None:
            return None
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append([value.name, _write_type(value.type)])
        return self._numbers[value]

    def operation(self, operation: Operation) -> int:
        if operation not in self._operation_numbers:
            if not operation.maker:
                raise PlanError(f"{operation} is not registered, so that no other process could find it")
            written = [operation.maker, self.argument(operation.parameters)]
            self._operation_numbers[operation] = len(self.operations)
            self.operations.append(written)
        return self._operation_numbers[operation]

    def argument(self, item: Any) -> Any:
        if item is None or isinstance(item, bool | int | str):
            return item
        if isinstance(item, tuple | list):
            return [self.argument(part) for part in item]
        for name, (kind, write) in self._kinds().items():
            if isinstance(item, kind):
                return {name: write(item)}
        raise PlanError(f"{item!r} of type {type(item).__name__} cannot be part of a file")

    def _kinds(self) -> dict[str, tuple[type, Callable[[Any], Any]]]:
        return {
            "value": (Value, self.value),
            "live": (Live, lambda item: item.name),
            "float": (float, float.hex),
            "complex": (complex, lambda item: [item.real.hex(), item.imag.hex()]),
            "dtype": (torch.dtype, lambda item: str(item).removeprefix("torch.")),
            "device": (torch.device, str),
            "format": (torch.memory_format, lambda item: str(item).removeprefix("torch.")),
            "layout": (torch.layout, lambda item: str(item).removeprefix("torch.")),
            "operation": (Operation, self.operation),
            "fragment": (Fragment, self._fragment),
        }

    def _input(self, item: Input) -> Any:
        return [self.value(item.value), item.kind.name, item.path, item.is_leaf]

    def node(self, node: Node) -> Any:
        origin = node.origin
        return [
            self.operation(node.operation),
            self.argument(node.args),
            {name: self.argument(item) for name, item in node.kwargs.items()},
            list(map(self.value, node.outputs)),
            [origin.module_path, origin.file, origin.line, origin.derived_from],
            node.phase.name,
            node.task.name,
        ]

    def _fragment(self, fragment: Fragment) -> Any:
        reads = list(map(self.value, fragment.reads))
        return [reads, [self.node(node) for node in fragment.nodes], list(map(self.value, fragment.makes))]


class _Reader:
    """Makes values once, and operations through the registry."""

    def __init__(self, data: Any, base: Program | None) -> None:
        self.data = data.get("plan")
        self._base = base
        known = [] if base is None else _values_of(base)  # a file's first values are those of its base
        self.values = known + [Value(_text(name), _read_type(kind)) for name, kind in data["values"][len(known) :]]
        self.operations: list[Operation] = []
        for maker, parameters in data["operations"]:  # each comes after the operations that it is made from
            self.operations.append(find_operation(_text(maker), self._argument(parameters)))

    def plan(self) -> Plan:
        data, tables = self.data, self.data["tables"]
        base = self._program(data["base"]) if self._base is None else self._base
        program = self._program(data["program"])
        return Plan(
            program=program,
            base=base,
            bases=tuple(_numbers(row) for row in data["bases"]),
            repeats={self._value(left): self._value(right) for left, right in data["repeats"]},
            tables=Tables(
                storage={self._value(value): _number(storage) for value, storage in data["storage"]},
                storage_bytes=_numbers(tables["storage_bytes"]),
                offsets=tuple(None if first is None else _number(first) for first in tables["offsets"]),
                frees=tuple(_numbers(row) for row in tables["frees"]),
                workspace_bytes=_numbers(tables["workspace_bytes"]),
                duration_ns=_numbers(tables["duration_ns"]),
            ),
            kept=tuple(
                KeptValue(
                    self._value(value), _number(size), program.nodes[_number(position)], tuple(map(_text, askers))
                )
                for value, size, position, askers in data["kept"]
            ),
            without_rule=tuple(program.nodes[_number(position)] for position in data["without_rule"]),
            held={_text(name): _number(size) for name, size in data["held"].items()},
            live_bytes=_numbers(data["live_bytes"]),
            budget_bytes=None if data["budget_bytes"] is None else _number(data["budget_bytes"]),
            lower_bound_ns=_number(data["lower_bound_ns"]),
            outcome=Outcome[data["outcome"]],
            has_measured_costs=data["has_measured_costs"] is True,
            notes=tuple(map(_text, data["notes"])),
        )

    def _program(self, data: Any) -> Program:
        return Program(
            inputs=tuple(map(self._input, data["inputs"])),
            nodes=tuple(map(self.node, data["nodes"])),
            outputs=tuple(map(self._value, data["outputs"])),
            updates=tuple(Update(self._value(left), self._value(right)) for left, right in data["updates"]),
            differentiable=frozenset(map(self._value, data["differentiable"])),
            boundary=_number(data["boundary"]),
            cotangents=tuple(map(self._input, data["cotangents"])),
            gradients=tuple(
                Gradient(self._value(item), None if value is None else self._value(value))
                for item, value in data["gradients"]
            ),
            seed=None if data["seed"] is None else self._value(data["seed"]),
            unread=tuple(map(self._input, data["unread"])),
            preparation=None if data["preparation"] is None else self._program(data["preparation"]),
        )

    def _value(self, number: Any) -> Value:
        return self.values[_number(number)]

    def _input(self, data: Any) -> Input:
        value, kind, path, is_leaf = data
        return Input(self._value(value), InputKind[kind], _text(path), is_leaf is True)

    def node(self, data: Any) -> Node:
        operation, args, kwargs, outputs, (module_path, file, line, derived_from), phase, task = data
        return Node(
            self.operations[_number(operation)],
            self._argument(args),
            {_text(name): self._argument(item) for name, item in kwargs.items()},
            tuple(None if value is None else self._value(value) for value in outputs),
            Origin(_text(module_path), _text(file), _number(line), _text(derived_from)),
            Phase[phase],
            Task[task],
        )

    def _argument(self, item: Any) -> Any:
        if item is None or isinstance(item, bool | int | str):
            return item
        if isinstance(item, list):
            return tuple(map(self._argument, item))
        ((kind, content),) = item.items()
        return self._kinds()[kind](content)

    def _kinds(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "value": self._value,
            "live": lambda name: Live(_text(name)),
            "float": float.fromhex,
            "complex": lambda parts: complex(*map(float.fromhex, parts)),
            "dtype": _dtype,
            "device": _device,
            "format": _FORMATS.__getitem__,
            "layout": {"strided": torch.strided}.__getitem__,
            "operation": lambda number: self.operations[_number(number)],
            "fragment": self._fragment,
        }

    def _fragment(self, data: Any) -> Fragment:
        reads, nodes, makes = data
        return Fragment(tuple(map(self.node, nodes)), tuple(map(self._value, reads)), tuple(map(self._value, makes)))


def _values_of(program: Program) -> list[Value]:
    """The values of a Program in the order in which they are written."""
    writer = _Writer()
    writer.program(program)
    return writer.known


def _write_type(kind: ValueType) -> Any:
    if isinstance(kind, OpaqueType):
        return [kind.description, kind.num_bytes]
    return [str(kind.dtype).removeprefix("torch."), kind.shape, kind.strides, str(kind.device)]


def _read_type(data: Any) -> ValueType:
    if len(data) == 2:
        return OpaqueType(_text(data[0]), _number(data[1]))
    dtype, shape, strides, device = data
    kind = TensorType(_dtype(dtype), _numbers(shape), _numbers(strides), _device(device))
    if len(kind.shape) != len(kind.strides) or not kind.num_bytes <= MAX_BYTES:
        raise ValueError(f"{data} is not the type of a tensor")
    return kind


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, _text(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return found


def _device(name: Any) -> torch.device:
    try:
        return torch.device(_text(name))
    except RuntimeError as error:
        raise ValueError(f"{name!r} is not a device") from error


def _text(item: Any) -> str:
    if not isinstance(item, str):
        raise TypeError(f"{item!r} is not a text")
    return item


def _number(item: Any) -> int:
    """A count, which is not negative."""
    if type(item) is not int or item < 0:
        raise TypeError(f"{item!r} is not a count")
    return item


def _numbers(items: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(_number, items))


assert {field.name for field in fields(Tables)} == {*_PLAIN_TABLES, "storage"}
