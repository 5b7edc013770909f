"""`check_plan`: replays a Plan from its own tables and raises PlanError unless it is sound.

It shares no code with the planner, nor with the runtime: what is alive, what was overwritten and where bytes lie is
found here once more, from the nodes and the tables. A sound plan computes what its base Program computes, reads nothing
that was freed or overwritten, repeats random operations under the state they had, and holds at every moment the bytes
it says it holds, within its budget and without overlap.

Not checked: that an operation of Undertow's own (an encoding and its reader) computes what it promises; the tests of
`ops` do that. Here the code must come from the very value that it replaces. Nor what was measured or counted elsewhere:
times, workspace, the optimizer's state; inputs may lie in each other's memory, so of each kind the largest counts.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import Any

from undertow.errors import PlanError
from undertow.ir.plan import ARENA_GAPS, Plan
from undertow.ir.program import InputKind, Node, Value, values_in
from undertow.ir.types import OpaqueType

ALIGNMENT = 64  # bytes: where PyTorch's allocators begin a tensor at the latest, and kernels expect it


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
    if not 0 <= plan.lower_bound_ns <= sum(tables.duration_ns):
        raise PlanError(
            f"the bound of {plan.lower_bound_ns} ns is not between 0 and the step's {sum(tables.duration_ns)}"
        )
    _check_held(plan)
    _check_offsets(plan)


def _check_held(plan: Plan) -> None:
    largest: dict[InputKind, int] = {}
    for item in plan.program.inputs:
        largest[item.kind] = max(largest.get(item.kind, 0), item.value.type.num_bytes)
    held_bytes, least_bytes = sum(plan.held.values()), sum(largest.values())
    if min(plan.held.values(), default=0) < 0 or held_bytes < least_bytes:
        raise PlanError(f"{held_bytes} bytes are held throughout, and the inputs take at least {least_bytes}")


def _check_offsets(plan: Plan) -> None:
    """Each on a boundary, and none further out than all of them laid end to end."""
    places = _places(plan)
    whole = sum(-(-(end - first) // ALIGNMENT) * ALIGNMENT for first, end in places)
    for first, end in places:
        if first % ALIGNMENT or first < 0 or end > whole:
            raise PlanError(f"a storage lies at byte {first} of {whole}: not on a boundary of {ALIGNMENT}, or outside")


def _places(plan: Plan) -> list[tuple[int, int]]:
    """First byte and byte behind the last of everything in the arena."""
    pairs = zip(plan.tables.offsets, plan.tables.storage_bytes, strict=True)
    return [(first, first + size) for first, size in pairs if first is not None]


class _Replay:
    """What is present, valid and held while the nodes run one by one."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.program, self.tables = plan, plan.program, plan.tables
        self.present: set[int] = set()
        self.valid: dict[int, set[Value]] = {}  # values that a storage still holds
        # A custom Function's context may hold its arguments: whoever reads the context reads them.
        self.saved = {
            value: node.inputs
            for node in self.program.nodes
            for value in node.outputs
            if value is not None and isinstance(value.type, OpaqueType)
        }
        self.lost: dict[Value, str] = {}  # why a value can no longer be read
        self.placed: list[tuple[int, int, int]] = []  # first byte, byte behind the last, storage; sorted
        self.held_bytes = sum(plan.held.values())
        self.outside_bytes = self.held_bytes - plan.held.get(ARENA_GAPS, 0)
        self.arena_bytes = max((end for _, end in _places(plan)), default=0)
        self.inputs = {self.storage(item.value) for item in self.program.inputs}
        ends = [*self.program.outputs, *(item.value for item in self.program.updates)]
        ends += [item.value for item in self.program.gradients if item.value is not None]
        self.ends = {self.storage(value): value for value in ends}

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
            if position == self.program.num_forward_nodes:
                self._start_backward()
            self._run(position, node)
        if len(self.program.nodes) == self.program.num_forward_nodes:
            self._start_backward()
        for storage, value in self.ends.items():
            if storage not in self.present or value not in self.valid[storage]:
                raise PlanError(f"{value} is a result of the step and is not there at its end{self._why(value)}")
        leaked = self.present - self.inputs - self.ends.keys()
        if leaked:
            values = sorted(str(value) for value, storage in self.tables.storage.items() if storage in leaked)
            raise PlanError(f"{', '.join(values)}: never freed")

    def _start_backward(self) -> None:
        for value in self.program.outputs:
            self._check_readable(value, "the end of the forward pass")
        for item in self.program.cotangents:
            self._bear(item.value, "the cotangent")
        if self.program.cotangents:
            for update in self.program.updates:
                self._check_readable(update.value, "the end of the forward pass")
                self._overwrite(self.storage(update.input), f"the update by {update.value}", keep=set())

    def _run(self, position: int, node: Node) -> None:
        name = _describe(node, position)
        for value in node.inputs:
            self._check_readable(value, name)
            for saved in self.saved.get(value, ()):
                self._check_readable(saved, name)
        written = list(_written_arguments(node))
        outputs = [value for value in node.outputs if value is not None]
        for value in written:
            self._overwrite(self.storage(value), name, keep=set(outputs))
        sources = {self.storage(value) for value in node.inputs}
        for value in outputs:
            if self.storage(value) in sources:
                self._make_valid(value)
            else:
                self._bear(value, name)
        found = self.held_bytes + self.tables.workspace_bytes[position]
        if position == len(self.program.nodes) - 1 and not self.program.backward_nodes:
            cotangents = {self.storage(item.value) for item in self.program.cotangents}
            found += sum(self.tables.storage_bytes[storage] for storage in cotangents)  # no operation runs after them
        if found != self.plan.live_bytes[position]:
            raise PlanError(f"{name}: {found} bytes are held, the plan says {self.plan.live_bytes[position]}")
        if self.plan.budget_bytes is not None and found > self.plan.budget_bytes:
            raise PlanError(f"{name}: {found} bytes are held, {found - self.plan.budget_bytes} more than the budget")
        found += self.arena_bytes + self.outside_bytes - self.held_bytes
        if found > self.plan.peak_bytes:
            raise PlanError(f"{name}: {found} bytes are held with all of the arena, the peak is {self.plan.peak_bytes}")
        for storage in self.tables.frees[position]:
            self._free(storage, name)

    def _check_readable(self, value: Value, reader: str) -> None:
        storage = self.storage(value)
        if storage not in self.present or value not in self.valid.get(storage, ()):
            raise PlanError(f"{reader} reads {value}{self._why(value)}")

    def _why(self, value: Value) -> str:
        return f", {self.lost[value]}" if value in self.lost else " before it is assigned"

    def _make_valid(self, value: Value) -> None:
        self.valid.setdefault(self.storage(value), set()).add(value)

    def _bear(self, value: Value, maker: str) -> None:
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
                places = f"bytes {entry[0]} to {entry[1]} and {other[0]} to {other[1]}"
                raise PlanError(f"{value} overlaps {holder} in memory: {places}")
        insort(self.placed, entry)

    def _overwrite(self, storage: int, writer: str, keep: set[Value]) -> None:
        for value in self.valid.get(storage, set()) - keep:
            self.lost[value] = f"which {writer} overwrote"
        self.valid[storage] = self.valid.get(storage, set()) & keep

    def _free(self, storage: int, name: str) -> None:
        if storage in self.inputs:
            raise PlanError(f"{name}: frees storage {storage}, which is the user's")
        if storage not in self.present:
            raise PlanError(f"{name}: frees storage {storage}, which is not there")
        if storage in self.ends:
            raise PlanError(f"{name}: frees {self.ends[storage]}, which is a result of the step")
        for value in self.valid[storage]:
            self.lost[value] = f"which was freed after {name}"
        self.present.discard(storage)
        self.held_bytes -= self.tables.storage_bytes[storage]
        self.outside_bytes -= self.tables.storage_bytes[storage] if self.tables.offsets[storage] is None else 0
        self.placed = [entry for entry in self.placed if entry[2] != storage]


class _Comparison:
    """Whether what runs computes what the base Program computes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.program, self.base = plan, plan.program, plan.base
        self.makers = {
            value: (position, node)
            for position, node in enumerate(self.program.nodes)
            for value in node.outputs
            if value is not None
        }
        self.base_makers = {value: node for node in self.base.nodes for value in node.outputs if value is not None}

    def run(self) -> None:
        seen: set[int] = set()
        for position, (node, base) in enumerate(zip(self.program.nodes, self.plan.bases, strict=True)):
            if base < 0:
                continue
            if not base < len(self.base.nodes):
                raise PlanError(f"{_describe(node, position)} stands for operation {base}, which does not exist")
            self._check_node(position, node, self.base.nodes[base], is_again=base in seen)
            if not _is_code(node, self.base.nodes[base]):
                seen.add(base)
        self._check_effects()
        self._check_results()

    def original(self, value: Value) -> Value:
        return self.plan.repeats.get(value, value)

    def _check_node(self, position: int, node: Node, base: Node, is_again: bool) -> None:
        name = _describe(node, position)
        target, args = node.target, (node.args, tuple(node.kwargs.items()))
        replayed = getattr(target, "target", None) if str(target).endswith(".replayed") else None
        if replayed is not None:
            self._check_state(name, node, position)
            target, args = replayed, (node.args[1:], args[1])
        elif is_again and _is_random(base):
            raise PlanError(f"{name} draws random numbers again without the state it drew them with before")
        if _same_target(target, base.target):
            expected = (base.args, tuple(base.kwargs.items()))
            if not self._same(args, expected) and not self._is_without_statistics(node, base):
                raise PlanError(f"{name} has other arguments than {_describe(base, self.base.nodes.index(base))}")
        elif not self._is_without_statistics(node, base):
            self._check_code(name, node, base)
        for made, expected_value in zip(node.outputs, base.outputs, strict=False):
            if _same_target(target, base.target) and made is not None and self.original(made) is not expected_value:
                raise PlanError(f"{name} makes {made} where {base.name} makes {expected_value}")

    def _same(self, left: Any, right: Any) -> bool:
        if isinstance(left, Value):
            return self.original(left) is right
        if isinstance(left, tuple | list):
            return isinstance(right, tuple | list) and len(left) == len(right) and all(map(self._same, left, right))
        return left is right or left == right

    def _is_without_statistics(self, node: Node, base: Node) -> bool:
        """A second run of batch normalisation leaves the running statistics out, and their new values with them."""
        if not _is_norm(base) or node.args[3:5] != (None, None):
            return False
        return self._same((*node.args[:3], *node.args[5:]), (*base.args[:3], *base.args[5:]))

    def _check_state(self, name: str, node: Node, position: int) -> None:
        """The state must be that from right before the first run, with no other draw in between."""
        state = node.args[0]
        maker = self.makers.get(state) if isinstance(state, Value) else None
        if maker is None or str(maker[1].target) != "generator_state":
            raise PlanError(f"{name} is replayed with {state}, which is no recorded generator state")
        first = next(i for i, base in enumerate(self.plan.bases) if base == self.plan.bases[position])
        between = self.program.nodes[maker[0] + 1 : first]
        draws = [other for other in between if _is_random(other)]
        if maker[0] > first or draws:
            when = "after its first run" if maker[0] > first else f"before {draws[0].name} drew too"
            raise PlanError(f"{name} is replayed with the wrong state: {state} was recorded {when}")

    def _check_code(self, name: str, node: Node, base: Node) -> None:
        """An encoding reads a value that the base makes or reads; a reader or decoder reads a code of such a value."""
        if hasattr(node.target, "_schema"):
            raise PlanError(f"{name} stands for {base.name}, which is another operation")
        wanted = {*base.inputs, *(value for value in base.outputs if value is not None)}
        if str(node.target) == "batch_norm.again":
            wanted |= self._values_normalised(base)
        for value in node.inputs:
            if self.original(value) in wanted:
                continue
            maker = self.makers.get(value)
            sources = {self.original(source) for source in values_in(maker[1].args)} if maker is not None else set()
            if not sources or not sources <= wanted:
                raise PlanError(f"{name} stands for {base.name} and reads {value}, which is no code of its values")

    def _values_normalised(self, base: Node) -> set[Value]:
        """What the sum and the normalisation before `base` read and make: one pass may stand for all three."""
        nodes = [base]
        for node in nodes:
            if not _is_norm(node):
                before = [self.base_makers[value] for value in node.inputs if value in self.base_makers]
                nodes += [other for other in before if _is_norm(other) or str(other.target) == "aten.add.Tensor"]
        return {value for node in nodes for value in (*node.inputs, *node.outputs) if value is not None}

    def _check_effects(self) -> None:
        """Random draws, guards, and records of a generator's state run once, in the base's order."""
        effects = [index for index, node in enumerate(self.base.nodes) if _has_effect(node)]
        found = [
            base
            for node, base in zip(self.program.nodes, self.plan.bases, strict=True)
            if base >= 0
            and _has_effect(self.base.nodes[base])
            and not str(node.target).endswith(".replayed")
            and not _is_code(node, self.base.nodes[base])
        ]
        for index, expected in enumerate(effects):
            if index >= len(found) or found[index] != expected:
                node = self.base.nodes[expected]
                raise PlanError(
                    f"{_describe(node, expected)} draws, checks or records a state out of its order, or does not run"
                )
        if len(found) > len(effects):
            raise PlanError(f"{_describe(self.base.nodes[found[-1]], found[-1])} runs twice, and has an effect")
        for index, node in enumerate(self.base.nodes):
            count = sum(base == index for base in self.plan.bases) if _is_update(node) else 1
            if count != 1:
                raise PlanError(f"{_describe(node, index)} updates a parameter and runs {count} times")
        ends = {item.value for item in self.program.gradients if item.value is not None}
        finals = {self.original(value) for value in ends}
        for position, node in enumerate(self.program.nodes):
            value = node.args[0] if str(node.target) == "deliver_gradient" else None
            if value is not None and value not in ends and self.original(value) in finals:
                raise PlanError(f"{_describe(node, position)} hands over {value}, which is made again later: both stay")

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


def _written_arguments(node: Node) -> Iterator[Value]:
    """The arguments that an operation overwrites: by its schema, or as one of Undertow's own says."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        for argument, given in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from values_in(given)
    yield from getattr(node.target, "overwrites", lambda node: ())(node)


def _same_target(left: Any, right: Any) -> bool:
    """The same operation; writing over an argument instead of beside it computes the same."""
    if left is right or left == right:
        return True
    if _is_in_place(left, right):
        return True
    if str(right).endswith(".functional"):
        return getattr(right, "target", None) is left
    return str(left).replace("_.", ".", 1) == str(right)


def _is_in_place(left: Any, right: Any) -> bool:
    """Whether `left` writes what `right` computes over its first argument; overloads of the two may differ in name."""
    if not (hasattr(left, "_schema") and hasattr(right, "_schema")):
        return False
    names, arguments = zip(*map(_name_and_arguments, (left, right)), strict=True)
    return names[0] == names[1] + "_" and arguments[0] == arguments[1]


def _name_and_arguments(target: Any) -> tuple[str, list[tuple[str, str]]]:
    return target._schema.name, [(argument.name, str(argument.type)) for argument in target._schema.arguments]


# Attention that draws only where something is dropped out, which by default nothing is.
_DRAWING_BY_DROPOUT = {
    f"aten._scaled_dot_product_{kind}.default"
    for kind in (
        "flash_attention",
        "efficient_attention",
        "efficient_attention_backward",
        "cudnn_attention",
        "cudnn_attention_backward",
    )
}


def _is_random(node: Node) -> bool:
    target: Any = getattr(node.target, "target", node.target)
    tags = getattr(target, "tags", ())
    if not any(str(tag).endswith("nondeterministic_seeded") for tag in tags):
        return False
    if str(target) in _DRAWING_BY_DROPOUT:
        places = [argument.name for argument in target._schema.arguments]
        given = {**dict(zip(places, node.args, strict=False)), **node.kwargs}
        return bool(given.get("dropout_p"))
    return True


def _has_effect(node: Node) -> bool:
    return _is_random(node) or str(node.target).startswith("guard") or str(node.target) == "generator_state"


def _is_update(node: Node) -> bool:
    return hasattr(node.target, "overwrites")


def _is_norm(node: Node) -> bool:
    return str(node.target).removeprefix("aten.").startswith(("native_batch_norm.", "batch_norm.fused"))


def _is_code(node: Node, base: Node) -> bool:
    """Whether the node encodes a value of the base rather than computing it."""
    made = {value for value in node.outputs if value is not None}
    return (
        bool(made)
        and made.isdisjoint(value for value in base.outputs if value is not None)
        and (
            set(values_in(node.args)) & {*base.inputs, *(value for value in base.outputs if value is not None)} != set()
        )
        and not _same_target(node.target, base.target)
    )


def _describe(node: Node, position: int) -> str:
    place = f" ({node.origin})" if str(node.origin) else ""
    return f"operation {position}, {node.name}{place},"
