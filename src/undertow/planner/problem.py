"""A Program as a planning problem: storages instead of values, kinds of runs instead of nodes.

In: a derived Program, other ways to compute some of its values, and what every run costs. Out: an Instance for the
search, and for each of its kinds the node that it stands for, so that a schedule can be turned into a Program again.

Views are folded into the storage they lie in: they cost nothing, and a schedule makes them again where they are read.
Inputs are held and count in `fixed_bytes`. An input that the step overwrites is a value of no size that the overwriting
kind destroys, so that nothing is computed again from it afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from undertow.alternatives.registry import Alternative, Role
from undertow.ir import Node, Program, Value
from undertow.ir.cost import Cost
from undertow.ir.operation import COMPUTING, REVERSIBLE
from undertow.memory.lifetimes import find_lifetimes, is_dense
from undertow.memory.reuse import in_place_operation
from undertow.ops.own import GENERATOR_STATE_BYTES
from undertow.planner.instance import Instance, make_instance

EFFECT = "effect"  # the name of a storage of no size begins with it: that something in a chain was started
BOUNDARY = -1  # between the passes: the user's code takes the outputs and brings the cotangents


@dataclass(frozen=True)
class Kind:
    """What a run does: `node` of the Program, or an alternative to it; the boundary has neither."""

    node: int
    alternative: Alternative | None = None


@dataclass(frozen=True)
class Problem:
    """The Instance and what its numbers stand for."""

    program: Program
    instance: Instance
    kinds: tuple[Kind, ...]
    storages: tuple[str, ...]
    # The Instance counts the generator's state with every draw. The rebuilt Program records the state only if the draw
    # is repeated. So a peak of the Instance may lie above the plan's peak by this much.
    overcounted_bytes: int
    # Kinds that are sent, with the link and for how long they occupy it. Computing goes on meanwhile, so those that run
    # once have a duration of 0 in the Instance.
    sent: Mapping[int, tuple[str, int]] = field(default_factory=dict)


def make_problem(
    program: Program, alternatives: Sequence[Alternative], cost_of: Callable[[Node], Cost], fixed_bytes: int
) -> Problem:
    """The planning problem of `program`; `fixed_bytes` is what is held throughout the step."""
    return _Builder(program, cost_of).build(alternatives, fixed_bytes)


class _Builder:
    def __init__(self, program: Program, cost_of: Callable[[Node], Cost]) -> None:
        self.program = program
        self.cost_of = cost_of
        self.lifetimes = find_lifetimes(program)
        self.inputs = {item.value for item in program.inputs}
        self.overwritten = _overwritten_inputs(program)
        self.delivered = {
            self.lifetimes.root[node.args[node.operation.hands_over]]
            for node in program.nodes
            if node.operation.hands_over is not None
        }
        self.last_of_chain: dict[str, int] = {}  # the token of the last node so far
        self.crossed: list[int] = []  # the token of a boundary whose cotangents nothing reads: it must run too
        self.index: dict[Value | str, int] = {}
        self.sizes: list[int] = []
        self.kinds: list[Kind] = []
        self.rows: list[tuple[list[int], list[int], list[int], Cost, bool, tuple[int, int]]] = []

    def build(self, alternatives: Sequence[Alternative], fixed_bytes: int) -> Problem:
        self.never_repeated = {item.position for item in alternatives if item.is_instead}
        made_otherwise = {self.lifetimes.root.get(value) for item in alternatives for value in item.node.named_outputs}
        self.handed_over = self.delivered & self._read_once() & made_otherwise
        self.made_once = self.delivered - self.handed_over
        initial = [self._value(value, 0) for value in self.overwritten]
        order: list[int] = []
        for position, node in enumerate(self.program.nodes):
            if position == self.program.boundary and self.program.cotangents:
                order.append(self._add_boundary())
            if node.shared_input is None:
                order.append(self._add_node(position, node))
        if not self.program.second_pass and (self.program.cotangents or not self.rows):  # a schedule has a run
            order.append(self._add_boundary())
        for alternative in alternatives:
            if not self._is_bound(alternative.node.named_outputs):
                self._add_alternative(alternative)
        targets = {self._at_the_end(value) for value in self.program.ends} - {None}
        targets.update(self.crossed)
        targets.update(self.last_of_chain.values())
        reads, writes, destroys, costs, repeats, reuse = zip(*self.rows, strict=True)
        lanes = [self._link_of(kind) for kind in self.kinds]
        instance = make_instance(
            self.sizes,
            # What is sent once goes on beside computing. What may be sent again has its price, or it always would be.
            [
                0 if lane and not can_repeat else cost.duration_ns
                for lane, cost, can_repeat in zip(lanes, costs, repeats, strict=True)
            ],
            reads,
            writes,
            workspace_bytes=[cost.workspace_bytes for cost in costs],
            destroys=destroys,
            can_repeat=repeats,
            reuse=reuse,
            order=order,
            initial=initial,
            targets=sorted(target for target in targets if target is not None),
            fixed_bytes=fixed_bytes,
        )
        has_draws = any(node.operation.is_random for node in self.program.nodes)
        overcounted_bytes = GENERATOR_STATE_BYTES if has_draws else 0
        sent = {
            place: (lane, cost.duration_ns) for place, (lane, cost) in enumerate(zip(lanes, costs, strict=True)) if lane
        }
        storages = tuple(map(str, self.index))
        return Problem(self.program, instance, tuple(self.kinds), storages, overcounted_bytes, sent)

    def _link_of(self, kind: Kind) -> str:
        """The link that a kind occupies; empty where it computes."""
        if kind.node == BOUNDARY or kind.alternative is not None:
            return ""
        lane = self.program.nodes[kind.node].operation.lane
        return "" if lane == COMPUTING else lane

    def _value(self, key: Value | str, num_bytes: int) -> int:
        if key not in self.index:
            self.index[key] = len(self.sizes)
            self.sizes.append(num_bytes)
        return self.index[key]

    def _storage(self, value: Value) -> int | None:
        """The number of the storage a value lies in; None for an input that nothing overwrites."""
        root = self.lifetimes.root[value]
        if root in self.inputs:
            return self.index.get(root)
        return self._value(root, root.type.allocated_bytes)

    def _storages(self, values: Sequence[Value]) -> list[int]:
        found = (self._storage(value) for value in values)
        return list(dict.fromkeys(item for item in found if item is not None))

    def _add_node(self, position: int, node: Node) -> int:
        operation = node.operation
        reads, writes = self._storages(self.lifetimes.read_by(node)), self._storages(node.named_outputs)
        chains = operation.chains(node)
        if chains:
            before = self._before(chains)
            token = self._value(f"{EFFECT} {position}", 0)
            writes.append(token)
            reads += [item for item in before if item not in reads]
            self.last_of_chain.update(dict.fromkeys(chains, token))
        if operation.is_random:
            writes.append(self._value(f"state {position}", GENERATOR_STATE_BYTES))
        destroys = [self.index[value] for value in operation.writes(node) if value in self.index]
        reuse = self._reuse(node)
        given = None if operation.hands_over is None else node.args[operation.hands_over]
        if given is not None and (root := self.lifetimes.root[given]) in self.handed_over:
            # The parameter has it from now on: its memory stays alive to the end, even if something is made again.
            source, delivered = self.index[root], self._value(f"delivered {root.name}", root.type.allocated_bytes)
            destroys, reuse = [source], (source, delivered)
            writes.append(delivered)
        can_repeat = not chains and not destroys and operation.can_repeat and position not in self.never_repeated
        can_repeat = can_repeat and not self._is_bound(node.named_outputs)
        return self._add(Kind(position), (reads, writes, destroys, self.cost_of(node), can_repeat, reuse))

    def _before(self, chains: tuple[str, ...]) -> list[int]:
        """Tokens of what must have run: the last of each chain, and draws and guards before what cannot be undone."""
        last = (self.last_of_chain.get(chain) for chain in (*chains, REVERSIBLE))
        return list(dict.fromkeys(token for token in last if token is not None))

    def _add_boundary(self) -> int:
        program = self.program
        reads = self._storages([*program.outputs, *(update.value for update in program.updates)])
        reads += [token for token in self.last_of_chain.values() if token not in reads]
        destroys = [self.index[update.input] for update in program.updates if update.input in self.index]
        reads += [item for item in destroys if item not in reads]
        writes = self._storages([item.value for item in program.cotangents])
        read = {value for node in program.second_pass for value in node.inputs}
        read.update(item.value for item in program.gradients if item.value is not None)
        if read.isdisjoint(item.value for item in program.cotangents):
            self.crossed = [self._value("boundary", 0)]
            writes += self.crossed
        return self._add(Kind(BOUNDARY), (reads, writes, destroys, Cost(0, 0), False, (-1, -1)))

    def _add_alternative(self, alternative: Alternative) -> None:
        node = alternative.node
        reads, writes = self._storages_of_alternative(alternative)
        self._add(Kind(alternative.position, alternative), (reads, writes, [], self.cost_of(node), True, (-1, -1)))

    def _read_once(self) -> set[Value]:
        """Storages with one reader, not counting views."""
        count: Counter[Value] = Counter()
        for node in self.program.nodes:
            if node.shared_input is None:
                count.update({self.lifetimes.root[value] for value in self.lifetimes.read_by(node)})
        count.update(self.lifetimes.root[value] for value in self.program.outputs)
        return {root for root, number in count.items() if number == 1}

    def _at_the_end(self, value: Value) -> int | None:
        root = self.lifetimes.root[value]
        return self.index[f"delivered {root.name}"] if root in self.handed_over else self._storage(value)

    def _is_bound(self, values: Sequence[Value]) -> bool:
        """Whether these are made only once: a gradient stays with its parameter. Handing over may ensure this too."""
        return any(self.lifetimes.root.get(value) in self.made_once for value in values)

    def _storages_of_alternative(self, alternative: Alternative) -> tuple[list[int], list[int]]:
        """What its node reads and writes: values of the Program, codes, and a recorded generator state."""
        reads, writes = [], []
        for value in alternative.node.inputs:
            if value is alternative.state:
                reads.append(self._value(f"state {alternative.position}", GENERATOR_STATE_BYTES))
            elif value is alternative.code:
                reads.append(self._value(value, value.type.num_bytes))
            else:
                reads += self._storages([value])
        for value in alternative.node.named_outputs:
            if value is alternative.code:
                writes.append(self._value(value, value.type.num_bytes))
            else:
                writes += self._storages([value])
        return list(dict.fromkeys(reads)), list(dict.fromkeys(writes))

    def _reuse(self, node: Node) -> tuple[int, int]:
        """The storages of argument and result of an operation that can write over its argument when that dies."""
        if in_place_operation(node) is None:
            return (-1, -1)
        root = self.lifetimes.root[node.args[0]]
        if root not in self.lifetimes.owned or not is_dense(root):
            return (-1, -1)
        if sum(self.lifetimes.root[value] is root for value in node.inputs) > 1:
            return (-1, -1)
        source, result = self._storage(node.args[0]), self._storage(node.named_outputs[0])
        return (-1, -1) if source is None or result is None else (source, result)

    def _add(self, kind: Kind, row: tuple[list[int], list[int], list[int], Cost, bool, tuple[int, int]]) -> int:
        self.kinds.append(kind)
        self.rows.append(row)
        return len(self.kinds) - 1


def _overwritten_inputs(program: Program) -> list[Value]:
    """Inputs that are overwritten before the step ends; where both passes are one function, updates come last."""
    found = [value for node in program.nodes for value in node.operation.writes(node)]
    if program.cotangents:
        found += [update.input for update in program.updates]
    return list(dict.fromkeys(found))


__all__ = ["BOUNDARY", "EFFECT", "Kind", "Problem", "Role", "make_problem"]
