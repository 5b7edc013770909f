"""`check_plan`: replays a Plan from its own tables and raises PlanError unless it is sound.

It shares no code with the planner or the runtime. It works out for itself, from the nodes and the tables, what is
alive, what was overwritten and where bytes lie. A sound plan computes what its base Program computes. It reads nothing
that was freed or overwritten, and repeats random operations under the state they had. At every moment it holds exactly
the bytes that it states, within its budget and without overlap.

Not checked is whether an operation of Undertow's own (an encoding and its reader) computes what it promises: the tests
of `ops` do that. Here a code must come from the value that it replaces, and no more. Not checked either is what was
measured or counted elsewhere: times, workspace, the optimizer's state. Inputs may share memory, so only the largest
input of each kind is counted.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from undertow.errors import PlanError
from undertow.ir.operation import COMPUTING, REVERSIBLE, Operation
from undertow.ir.plan import ARENA_GAPS, Plan
from undertow.ir.program import InputKind, Node, Task
from undertow.ir.pytorch import in_place_of
from undertow.ir.types import OpaqueType
from undertow.ir.values import Value

ALIGNMENT = 64  # bytes: PyTorch's allocators begin tensors at a multiple of this, and kernels expect it


def check_plan(plan: Plan) -> Plan:
    """`plan` itself, if it is sound."""
    _check_tables(plan)
    _Comparison(plan).run()
    _Replay(plan).run()
    return plan


def _check_tables(plan: Plan) -> None:
    tables, count = plan.tables, len(plan.program.nodes)
    lengths = {
        "bases": len(plan.bases),
        "live_bytes": len(plan.live_bytes),
        "frees": len(tables.frees),
        "workspace_bytes": len(tables.workspace_bytes),
        "duration_ns": len(tables.duration_ns),
    }
    for name, length in lengths.items():
        if length != count:
            raise PlanError(f"{name} has {length} entries for {count} operations")
    if len(tables.offsets) != len(tables.storage_bytes):
        raise PlanError(f"{len(tables.offsets)} offsets for {len(tables.storage_bytes)} storages")
    for value, storage in tables.storage.items():
        if not 0 <= storage < len(tables.storage_bytes):
            raise PlanError(f"{value} lies in storage {storage}, which does not exist")
        if value.type.num_bytes > tables.storage_bytes[storage]:
            raise PlanError(f"{value} has {value.type.num_bytes} bytes, its storage {tables.storage_bytes[storage]}")
    if min((*tables.workspace_bytes, *tables.duration_ns, *tables.storage_bytes), default=0) < 0:
        raise PlanError("a size or a time is negative")
    _check_times(plan)
    _check_held(plan)
    _check_offsets(plan)


def _check_times(plan: Plan) -> None:
    """Lanes do one thing at a time, computing keeps the order of the plan, and nobody reads what has not arrived.

    So the step takes no less than its longest lane; the bound is no more than the step.
    """
    times = plan.times
    ends: dict[str, int] = {}
    for start, end, position in sorted(zip(times.starts_ns, times.ends_ns, range(len(plan.nodes)), strict=True)):
        node = plan.nodes[position]
        if end - start != plan.tables.duration_ns[position] or times.lanes[position] != node.operation.lane:
            raise PlanError(f"{_Place(node, position)} has another time or lane than its cost says")
        if start < ends.get(node.operation.lane, start):
            raise PlanError(f"{_Place(node, position)} starts before its lane is free")
        ends[node.operation.lane] = end
    sent = [position for position, node in enumerate(plan.nodes) if node.operation.lane != COMPUTING]
    arrives = {value: times.ends_ns[position] for position in sent for value in plan.nodes[position].named_outputs}
    now = 0
    for position, node in enumerate(plan.nodes):
        waits = [arrives[value] for value in node.inputs if value in arrives]
        if times.starts_ns[position] < max((now, *waits)):
            raise PlanError(f"{_Place(node, position)} starts before what it waits for")
        now = times.ends_ns[position] if node.operation.lane == COMPUTING else now
    if now != times.step_ns or not 0 <= plan.lower_bound_ns <= times.step_ns:
        raise PlanError(f"the bound of {plan.lower_bound_ns} ns is not between 0 and the step's {now}")


def _check_held(plan: Plan) -> None:
    largest: dict[InputKind, int] = {}
    for item in (*plan.program.inputs, *plan.program.unread):
        largest[item.kind] = max(largest.get(item.kind, 0), item.value.type.num_bytes)
    held_bytes, least_bytes = sum(plan.held.values()), sum(largest.values())
    if min(plan.held.values(), default=0) < 0 or held_bytes < least_bytes:
        raise PlanError(f"{held_bytes} bytes are held throughout, and the inputs take at least {least_bytes}")


def _check_offsets(plan: Plan) -> None:
    """Each offset is on a boundary, and no storage ends beyond the size of all of them laid end to end."""
    spans = _spans(plan)
    whole = sum(-(-(end - first) // ALIGNMENT) * ALIGNMENT for first, end in spans)
    for first, end in spans:
        if first % ALIGNMENT or first < 0 or end > whole:
            raise PlanError(f"a storage lies at byte {first} of {whole}: not on a boundary of {ALIGNMENT}, or outside")


def _spans(plan: Plan) -> list[tuple[int, int]]:
    """The first byte of each storage in the arena, and the byte after its last."""
    pairs = zip(plan.tables.offsets, plan.tables.storage_bytes, strict=True)
    return [(first, first + size) for first, size in pairs if first is not None]


class _Replay:
    """What is present, valid and held while the nodes run one by one."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.program, self.tables = plan, plan.program, plan.tables
        self.present: set[int] = set()
        self.valid: dict[int, set[Value]] = {}  # values that a storage still holds
        # What was borrowed (a custom Function's context may hold its arguments): a node that reads the handle reads it.
        self.borrowed = {
            value: node.inputs
            for node in self.program.nodes
            for value in node.named_outputs
            if node.operation.borrows and isinstance(value.type, OpaqueType)
        }
        self.lost: dict[Value, tuple[str, str | _Place]] = {}  # why a value can no longer be read, and by whom
        self.placed: list[tuple[int, int, int]] = []  # first byte, byte after the last, storage; sorted
        self.held_bytes = sum(plan.held.values())
        self.outside_bytes = self.held_bytes - plan.held.get(ARENA_GAPS, 0)
        self.arena_bytes = max((end for _, end in _spans(plan)), default=0)
        self.peak_bytes = plan.peak_bytes
        self.inputs = {self.storage(item.value) for item in self.program.inputs}
        self.ends = {self.storage(value): value for value in self.program.ends}

    def storage(self, value: Value) -> int:
        if value not in self.tables.storage:
            raise PlanError(f"{value} has no storage in the tables")
        return self.tables.storage[value]

    def run(self) -> None:
        for item in self.program.inputs:
            if self.tables.offsets[self.storage(item.value)] is not None:
                raise PlanError(f"{item.value} is the user's, and lies in the step's arena")
            self._make_valid(item.value)
            self.present.add(self.storage(item.value))
        for position, node in enumerate(self.program.nodes):
            if position == self.program.boundary:
                self._start_backward()
            self._run(position, node)
        if len(self.program.nodes) == self.program.boundary:
            self._start_backward()
        for storage, value in self.ends.items():
            if storage not in self.present or value not in self.valid[storage]:
                raise PlanError(f"{value} is a result of the step and is not there at its end{self._why(value)}")
        leaked = self.present - self.inputs - self.ends.keys()
        if not self.program.second_pass:  # no operation comes after the cotangents: they end with the step
            leaked -= {self.storage(item.value) for item in self.program.cotangents}
        if leaked:
            values = sorted(str(value) for value, storage in self.tables.storage.items() if storage in leaked)
            raise PlanError(f"{', '.join(values)}: never freed")

    def _start_backward(self) -> None:
        for value in self.program.outputs:
            self._check_readable(value, "the end of the forward pass")
        for item in self.program.cotangents:
            self._allocate(item.value, "the cotangent")
        if self.program.cotangents:
            for update in self.program.updates:
                self._check_readable(update.value, "the end of the forward pass")
                self._overwrite(self.storage(update.input), f"the update by {update.value}", keep=set())

    def _run(self, position: int, node: Node) -> None:
        name = _Place(node, position)
        for value in node.inputs:
            self._check_readable(value, name)
            for borrowed in self.borrowed.get(value, ()):
                self._check_readable(borrowed, name)
        for value in node.operation.writes(node):
            self._overwrite(self.storage(value), name, keep=set(node.named_outputs))
        sources = {self.storage(value) for value in node.inputs}
        for value in node.named_outputs:
            if self.storage(value) in sources:
                self._make_valid(value)
            else:
                self._allocate(value, name)
        found = self.held_bytes + self.tables.workspace_bytes[position]
        if position == len(self.program.nodes) - 1 and not self.program.second_pass:
            cotangents = {self.storage(item.value) for item in self.program.cotangents}
            found += sum(self.tables.storage_bytes[storage] for storage in cotangents)  # no operation runs after them
        if found != self.plan.live_bytes[position]:
            raise PlanError(f"{name}: {found} bytes are held, the plan says {self.plan.live_bytes[position]}")
        if self.plan.budget_bytes is not None and found > self.plan.budget_bytes:
            raise PlanError(f"{name}: {found} bytes are held, {found - self.plan.budget_bytes} more than the budget")
        found += self.arena_bytes + self.outside_bytes - self.held_bytes
        if found > self.peak_bytes:
            raise PlanError(f"{name}: {found} bytes are held with all of the arena, the peak is {self.peak_bytes}")
        for storage in self.tables.frees[position]:
            self._free(storage, name)

    def _check_readable(self, value: Value, reader: str | _Place) -> None:
        storage = self.storage(value)
        if storage not in self.present or value not in self.valid.get(storage, ()):
            raise PlanError(f"{reader} reads {value}{self._why(value)}")

    def _why(self, value: Value) -> str:
        what, who = self.lost.get(value, ("", ""))
        return f", {what.format(who)}" if what else " before it is assigned"

    def _make_valid(self, value: Value) -> None:
        self.valid.setdefault(self.storage(value), set()).add(value)

    def _allocate(self, value: Value, maker: str | _Place) -> None:
        storage = self.storage(value)
        if storage in self.present:
            others = ", ".join(map(str, sorted(self.valid[storage], key=str)))
            raise PlanError(f"{maker} makes {value} in storage {storage}, which still holds {others}")
        self.present.add(storage)
        self.valid[storage] = {value}
        self.held_bytes += self.tables.storage_bytes[storage]
        self._place(storage, value)

    def _place(self, storage: int, value: Value) -> None:
        first = self.tables.offsets[storage]
        if first is None:
            self.outside_bytes += self.tables.storage_bytes[storage]
            return
        if storage in self.ends:
            raise PlanError(f"{value} is a result of the step, which outlives it, and lies in its arena")
        if self.tables.storage_bytes[storage] == 0:
            return
        entry = (first, first + self.tables.storage_bytes[storage], storage)
        position = bisect_right(self.placed, entry)
        for other in self.placed[max(position - 1, 0) : position + 1]:
            if other[0] < entry[1] and entry[0] < other[1]:
                holder = ", ".join(map(str, sorted(self.valid[other[2]], key=str)))
                spans = f"bytes {entry[0]} to {entry[1]} and {other[0]} to {other[1]}"
                raise PlanError(f"{value} overlaps {holder} in memory: {spans}")
        insort(self.placed, entry)

    def _overwrite(self, storage: int, writer: str | _Place, keep: set[Value]) -> None:
        for value in self.valid.get(storage, set()) - keep:
            self.lost[value] = "which {} overwrote", writer
        self.valid[storage] = self.valid.get(storage, set()) & keep

    def _free(self, storage: int, name: _Place) -> None:
        if storage in self.inputs:
            raise PlanError(f"{name}: frees storage {storage}, which is the user's")
        if storage not in self.present:
            raise PlanError(f"{name}: frees storage {storage}, which is not there")
        if storage in self.ends:
            raise PlanError(f"{name}: frees {self.ends[storage]}, which is a result of the step")
        for value in self.valid[storage]:
            self.lost[value] = "which was freed after {}", name
        self.present.discard(storage)
        self.held_bytes -= self.tables.storage_bytes[storage]
        if self.tables.offsets[storage] is None:
            self.outside_bytes -= self.tables.storage_bytes[storage]
        else:
            self.placed = [entry for entry in self.placed if entry[2] != storage]


class _Comparison:
    """Whether what runs computes what the base Program computes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.program, self.base = plan, plan.program, plan.base
        self.makers = self.program.makers

    def run(self) -> None:
        seen: set[int] = set()
        for position, (node, bases) in enumerate(zip(self.program.nodes, self.plan.bases, strict=True)):
            if not all(0 <= base < len(self.base.nodes) for base in bases):
                raise PlanError(f"{_Place(node, position)} stands for operations {bases}, which do not exist")
            if bases:
                self._check_node(position, node, [self.base.nodes[base] for base in bases], bases[0] in seen)
                seen.add(bases[0])
            elif node.task is not Task.RECORD_STATE or node.operation.chains(node) != (REVERSIBLE,):
                raise PlanError(f"{_Place(node, position)} stands for no operation of the Program before planning")
        self._check_effects()
        self._check_results()

    def original(self, value: Value) -> Value:
        return self.plan.repeats.get(value, value)

    def _check_node(self, position: int, node: Node, covered: list[Node], is_again: bool) -> None:
        name, base = _Place(node, position), covered[0]
        operation, args = node.operation, (node.args, tuple(node.kwargs.items()))
        if operation.repeats is not None:
            self._check_state(name, node, position)
            operation, args = operation.repeats, (node.args[1:], args[1])
        is_same = computes_as(operation, base.operation)
        if is_same and is_again and node.operation.repeats is None and base.operation.draws(base):
            raise PlanError(f"{name} draws random numbers again without the state it drew them with before")
        if is_same:
            expected = (base.args, tuple(base.kwargs.items()))
            if not self._same(args, expected) and not self._leaves_out(node, base):
                raise PlanError(f"{name} has other arguments than {_Place(base, self.base.positions[base])}")
        elif not self._leaves_out(node, base):
            self._check_code(name, node, covered)
        for made, expected_value in zip(node.outputs, base.outputs, strict=False):
            if is_same and made is not None and self.original(made) is not expected_value:
                raise PlanError(f"{name} makes {made} where {base.name} makes {expected_value}")

    def _same(self, left: Any, right: Any) -> bool:
        if left is right and not self.plan.repeats:
            return True
        if isinstance(left, Value):
            return self.original(left) is right
        if isinstance(left, tuple | list):
            return isinstance(right, tuple | list) and len(left) == len(right) and all(map(self._same, left, right))
        return left is right or left == right

    def _leaves_out(self, node: Node, base: Node) -> bool:
        """Whether the node repeats the base without the arguments that only its first run updates."""
        dropped = base.operation.droppable
        if not dropped or len(node.args) != len(base.args) or any(node.args[place] is not None for place in dropped):
            return False
        if not computes_as(node.operation, base.operation):
            return False
        rest = [place for place in range(len(base.args)) if place not in dropped]
        return self._same([node.args[place] for place in rest], [base.args[place] for place in rest])

    def _check_state(self, name: _Place, node: Node, position: int) -> None:
        """The state must have been recorded before the first run, with no other draw in between."""
        state = node.args[0]
        maker = self.makers.get(state) if isinstance(state, Value) else None
        if maker is None or maker.task is not Task.RECORD_STATE:
            raise PlanError(f"{name} is replayed with {state}, which is not a recorded generator state")
        recorded = self.program.positions[maker]
        first = self.plan.bases.index(self.plan.bases[position])
        draws = [other for other in self.program.nodes[recorded + 1 : first] if other.operation.draws(other)]
        if recorded > first or draws:
            when = "after its first run" if recorded > first else f"before {draws[0].name} drew too"
            raise PlanError(f"{name} is replayed with the wrong state: {state} was recorded {when}")

    def _check_code(self, name: _Place, node: Node, covered: list[Node]) -> None:
        """An encoding reads a value that the base makes or reads; a reader or decoder reads a code of such a value.

        A node that does the work of several nodes reads what they read; each of these feeds a later one of them.
        """
        if node.operation.overload is not None:
            raise PlanError(f"{name} stands for {covered[0].name}, which is another operation")
        for place, other in enumerate(covered[1:], start=1):
            read = {value for after in covered[:place] for value in after.inputs}
            if read.isdisjoint(other.named_outputs):
                raise PlanError(f"{name} stands for {other.name} too, which {covered[0].name} does not follow from")
        wanted = {value for base in covered for value in (*base.inputs, *base.named_outputs)}
        for value in node.inputs:
            if self.original(value) in wanted:
                continue
            maker = self.makers.get(value)
            sources = {self.original(source) for source in maker.inputs} if maker is not None else set()
            if not sources or not sources <= wanted:
                raise PlanError(
                    f"{name} stands for {covered[0].name} and reads {value}, which is not a code of its values"
                )

    def _check_effects(self) -> None:
        """What is in a chain (draws and guards, the uses of a gradient) runs once, in the base's order."""
        chains: dict[str, list[int]] = {}
        for index, node in enumerate(self.base.nodes):
            for chain in node.operation.chains(node):
                chains.setdefault(chain, []).append(index)
        found: dict[str, list[int]] = {chain: [] for chain in chains}
        for node, bases in zip(self.program.nodes, self.plan.bases, strict=True):
            base = self.base.nodes[bases[0]] if bases else None
            if base is None or self._has_no_effect(node, base):
                continue
            for chain in base.operation.chains(base):
                found[chain].append(bases[0])
        for chain, expected in chains.items():
            self._check_chain(chain, expected, found[chain])
        self._check_handed_over()

    def _has_no_effect(self, node: Node, base: Node) -> bool:
        """Whether it is a code, a repeat under a recorded state, or a repeat of a kernel that draws nothing here."""
        if node.operation.repeats is not None or not computes_as(node.operation, base.operation):
            return True
        return node.task is Task.AGAIN and base.operation.is_random and not base.operation.draws(base)

    def _check_chain(self, chain: str, expected: list[int], found: list[int]) -> None:
        for place, index in enumerate(expected):
            if place >= len(found) or found[place] != index:
                name = _Place(self.base.nodes[index], index)
                raise PlanError(f"{name} runs out of the order of {chain}, or does not run")
        if len(found) > len(expected):
            raise PlanError(f"{_Place(self.base.nodes[found[-1]], found[-1])} runs twice, and is bound by {chain}")

    def _check_handed_over(self) -> None:
        ends = {item.value for item in self.program.gradients if item.value is not None}
        finals = {self.original(value) for value in ends}
        for position, node in enumerate(self.program.nodes):
            place = node.operation.hands_over
            value = None if place is None else node.args[place]
            if value is not None and value not in ends and self.original(value) in finals:
                raise PlanError(f"{_Place(node, position)} hands over {value}, which is made again later: both stay")

    def _check_results(self) -> None:
        pairs: list[tuple[str, Sequence[Value | None], Sequence[Value | None]]] = [
            ("output", self.program.outputs, self.base.outputs),
            ("update", [item.value for item in self.program.updates], [item.value for item in self.base.updates]),
            ("gradient", [item.value for item in self.program.gradients], [item.value for item in self.base.gradients]),
        ]
        for what, found, expected in pairs:
            originals = [None if value is None else self.original(value) for value in found]
            if originals != list(expected):
                wrong = next((pair for pair in zip(found, expected, strict=False) if pair[0] is not pair[1]), ("", ""))
                raise PlanError(f"{what}s differ from the base Program's: {wrong[0]} instead of {wrong[1]}")


def computes_as(operation: Operation, base: Operation) -> bool:
    """Whether two operations compute the same: writing over an argument, or into new memory, changes no result."""
    return operation in (base, base.functional_of, in_place_of(base))


@dataclass(frozen=True, slots=True)
class _Place:
    """A node and its position, as errors name it."""

    node: Node
    position: int

    def __str__(self) -> str:
        place = f" ({self.node.origin})" if str(self.node.origin) else ""
        return f"operation {self.position}, {self.node.name}{place},"
