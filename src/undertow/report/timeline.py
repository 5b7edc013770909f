"""What is in memory during each operation of a Plan, and why.

In: a Plan. Out: a Timeline. A storage, views included, lives from the operation that makes it to the one after which it
is freed, as the Plan's tables say. The sum of storages, held bytes and workspace is `Plan.live_bytes`. Positions are
indices into `plan.nodes`.

A storage has one role for its whole life, even where an operation later writes something else over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from undertow.errors import PlanError
from undertow.ir import InputKind, Node, Plan, Task, Value
from undertow.report.inspection import Site


class Role(Enum):
    """What a storage is there for."""

    PARAMETER = "parameters"
    BUFFER = "buffers"
    BATCH = "batch"
    CONSTANT = "constants"
    PREPARED = "prepared weights"
    KEPT = "kept activations"
    CODE = "codes and states"
    RECOMPUTED = "recomputed values"
    GRADIENT = "gradients"
    OUTPUT = "outputs"
    TEMPORARY = "temporaries"


INPUT_ROLES = {
    InputKind.PARAMETER: Role.PARAMETER,
    InputKind.BUFFER: Role.BUFFER,
    InputKind.ARGUMENT: Role.BATCH,
    InputKind.ATTRIBUTE: Role.CONSTANT,
    InputKind.CONSTANT: Role.CONSTANT,
    InputKind.PREPARED: Role.PREPARED,
}


@dataclass(frozen=True, eq=False)
class Life:
    """A storage: `writers` and `readers` are positions, views left out; `content` is the value last written there."""

    number: int
    root: Value
    content: Value
    num_bytes: int
    first: int  # -1 for inputs
    last: int
    is_freed: bool  # whether it is freed before the step ends
    writers: tuple[int, ...]
    readers: tuple[int, ...]

    @property
    def num_nodes_alive(self) -> int:
        """Operations during which it is alive."""
        return self.last - self.first + 1


class Timeline:
    """The lives of a Plan's storages, and the tasks of its operations."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.nodes = plan.nodes
        self.boundary = plan.program.backward_start
        self.lives = _find_lives(plan, self.boundary)
        self.makers: dict[str, Node] = {}
        for node in self.nodes:
            for value in node.named_outputs:
                self.makers.setdefault(value.name, node)
        storage = plan.tables.storage
        self.inputs = {storage[item.value]: item for item in plan.program.inputs}
        paths = {item.value: item.path for item in plan.program.inputs}
        self.gradient_of = {
            storage[item.value]: paths[item.input] for item in plan.program.gradients if item.value is not None
        }

    def original(self, value: Value) -> Value:
        """The value of the Program before planning that this one repeats, or itself."""
        return self.plan.repeats.get(value, value)

    def life_of(self, value: Value) -> Life:
        """The storage that a value lies in."""
        return self.lives[self.plan.tables.storage[value]]

    def content_before(self, life: Life, end: int) -> Value:
        """What lies in a storage when the operation at `end` begins."""
        written = [position for position in life.writers if position < end]
        values = self.nodes[written[-1]].named_outputs if written else ()
        return next((value for value in values if self.life_of(value) is life), life.root)

    def is_source(self, life: Life) -> bool:
        """Whether the backward pass reads a storage only to run something again."""
        return {self.nodes[position].task for position in life.readers if position >= self.boundary} == {Task.AGAIN}

    def asker(self, position: int) -> Node:
        """The operation of the forward pass whose derivative the operation at `position` computes, or the latter."""
        node = self.nodes[position]
        # An operation that reads a code is derived from what it replaces; an encoding names the value it encodes.
        return self.makers.get(node.origin.derived_from, node)

    def duration_us(self, position: int) -> float:
        """The predicted time of one operation."""
        return self.plan.tables.duration_ns[position] / 1e3

    @cached_property
    def roles(self) -> dict[int, Role]:
        """The role of every storage, by its number."""
        program = self.plan.program
        storage = self.plan.tables.storage
        outputs = {storage[value] for value in (*program.outputs, *(update.value for update in program.updates))}
        roles = {number: INPUT_ROLES[item.kind] for number, item in self.inputs.items()}
        for life in self.lives:
            if life.number not in roles:
                roles[life.number] = self._role(life, life.number in self.gradient_of, life.number in outputs)
        return roles

    def _role(self, life: Life, is_gradient: bool, is_output: bool) -> Role:
        task = self.nodes[life.writers[0]].task if life.writers else Task.FIRST
        if is_gradient:
            return Role.GRADIENT
        if task in (Task.ENCODE, Task.RECORD_STATE):
            return Role.CODE
        if task in (Task.AGAIN, Task.DECODE):
            return Role.RECOMPUTED
        if life.first < self.boundary and any(position >= self.boundary for position in life.readers):
            return Role.KEPT
        return Role.OUTPUT if is_output else Role.TEMPORARY


def short_name(node: Node) -> str:
    """`add` for `add_.Tensor`: the overload, and whether it is in-place, do not matter to a reader."""
    name = node.name.partition(".")[0].rstrip("_")
    return name if node.operation.repeats is None else f"{name} replayed"


def site_of(node: Node) -> Site:
    """The operation and where it is in the user's code."""
    return Site(short_name(node), node.origin.module_path, node.origin.location)


def describe(site: Site) -> str:
    """`relu (features.1)`."""
    where = site.layer or site.location
    return f"{site.operation} ({where})" if where else site.operation


def is_written_over(node: Node) -> bool:
    """Whether the operation writes its result over its first argument."""
    return node.operation.writes_over


def _find_lives(plan: Plan, boundary: int) -> tuple[Life, ...]:
    storage, sizes = plan.tables.storage, plan.tables.storage_bytes
    end = len(plan.nodes)
    first, last = [-1] * len(sizes), [end - 1] * len(sizes)
    roots: list[Value | None] = [None] * len(sizes)
    contents: list[Value | None] = [None] * len(sizes)
    writers: list[list[int]] = [[] for _ in sizes]
    readers: list[list[int]] = [[] for _ in sizes]
    for item in (*plan.program.inputs, *plan.program.cotangents):
        roots[storage[item.value]] = contents[storage[item.value]] = item.value
    for item in plan.program.cotangents:
        first[storage[item.value]] = min(boundary, end - 1)
    for position, node in enumerate(plan.nodes):
        is_view_only = node.operation.is_view
        for value in () if is_view_only else node.inputs:
            readers[storage[value]].append(position)
        for value in node.named_outputs:
            number = storage[value]
            if roots[number] is None:
                roots[number], first[number] = value, position
            if not is_view_only:
                contents[number] = value
                writers[number].append(position)
    freed = {number: position for position, numbers in enumerate(plan.tables.frees) for number in numbers}
    return tuple(
        Life(
            number=number,
            root=root or _missing(number),
            content=contents[number] or root or _missing(number),
            num_bytes=sizes[number],
            first=first[number],
            last=freed.get(number, last[number]),
            is_freed=number in freed,
            writers=tuple(dict.fromkeys(writers[number])),
            readers=tuple(dict.fromkeys(readers[number])),
        )
        for number, root in enumerate(roots)
    )


def _missing(number: int) -> Value:
    raise PlanError(f"storage {number} of the plan's tables is made by no operation and is no input")
