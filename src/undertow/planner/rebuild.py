"""A schedule as a Program again: second runs, codes and recorded generator states become nodes like any other.

In: a Problem and a schedule of its kinds. Out: the Program that runs it, and for every new value the value of the
original Program that it repeats. The first run of a node writes the original values. A second run makes new ones,
and what is read afterwards is read from those. A view is made where it is first read, once for each version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from undertow.alternatives.registry import Role
from undertow.ir import Node, Program, Task, Value
from undertow.ir.program import Gradient, Update
from undertow.ops.interpret import generator_of
from undertow.ops.own import GENERATOR_STATE
from undertow.planner.problem import BOUNDARY, Kind, Problem

_TASKS = {Role.ENCODE: Task.ENCODE, Role.DECODE: Task.DECODE, Role.READ: Task.READ_CODE}


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """`repeats` maps each new value to the one it repeats; `bases` has for each node the nodes whose work it does."""

    program: Program
    repeats: dict[Value, Value]
    bases: tuple[tuple[int, ...], ...]


def rebuild(problem: Problem, schedule: Sequence[int]) -> Rebuilt:
    """The Program that runs `schedule`."""
    return _Rebuilder(problem).run([problem.kinds[index] for index in schedule])


class _Rebuilder:
    def __init__(self, problem: Problem) -> None:
        self.base = problem.program
        self.makers = {
            value: (position, node)
            for position, node in enumerate(self.base.nodes)
            for value in node.named_outputs
            if node.shared_input is not None
        }
        self.current: dict[Value, Value] = {}
        self.views: dict[int, tuple[tuple[Value, ...], tuple[Value | None, ...]]] = {}
        self.num_versions: dict[Value, int] = {}
        self.repeats: dict[Value, Value] = {}
        self.delivered: dict[Value, Value] = {}  # what a parameter was given, even if it is made again later
        self.nodes: list[Node] = []
        self.bases: list[tuple[int, ...]] = []

    def run(self, kinds: Sequence[Kind]) -> Rebuilt:
        replayed = {
            kind.node: kind.alternative.state
            for kind in kinds
            if kind.alternative is not None and kind.alternative.state is not None
        }
        outputs: tuple[Value, ...] = ()
        updates: tuple[Update, ...] = ()
        boundary = 0
        for kind in kinds:
            if kind.node == BOUNDARY:
                outputs, updates = self._outputs(), self._updates()
                boundary = len(self.nodes)
            elif kind.alternative is not None:
                covered = (self.base.positions[node] for node in kind.alternative.covers)
                self._emit(kind.alternative.node, (kind.node, *covered), _TASKS.get(kind.alternative.role))
            else:
                node = self.base.nodes[kind.node]
                state = replayed.get(kind.node)
                if state is not None:
                    record = Node(GENERATOR_STATE, (generator_of(node),), {}, (state,), node.origin, node.phase)
                    self._emit(record, (), Task.RECORD_STATE)
                self._emit(node, (kind.node,))
        gradients = tuple(
            Gradient(
                item.input, None if item.value is None else self.delivered.get(item.value) or self._resolve(item.value)
            )
            for item in self.base.gradients
        )
        if not self.base.cotangents:
            outputs, updates, boundary = self._outputs(), self._updates(), len(self.nodes)
        program = replace(
            self.base,
            nodes=tuple(self.nodes),
            outputs=outputs,
            updates=updates,
            gradients=gradients,
            boundary=boundary,
        )
        return Rebuilt(program, self.repeats, tuple(self.bases))

    def _outputs(self) -> tuple[Value, ...]:
        return tuple(self._resolve(value) for value in self.base.outputs)

    def _updates(self) -> tuple[Update, ...]:
        return tuple(Update(item.input, self._resolve(item.value)) for item in self.base.updates)

    def _resolve(self, value: Value) -> Value:
        """The current version of a value; a view is made again if what it looks at was made again."""
        if value not in self.makers:
            return self.current.get(value, value)
        position, node = self.makers[value]
        inputs = tuple(self._resolve(item) for item in node.inputs)
        known = self.views.get(position)
        if known is None or known[0] != inputs:
            outputs = self._append(node, (position,), inputs)
            self.views[position] = known = (inputs, outputs)
        found = known[1][node.outputs.index(value)]
        assert found is not None
        return found

    def _emit(self, node: Node, bases: tuple[int, ...], task: Task | None = None) -> None:
        inputs = tuple(self._resolve(value) for value in node.inputs)
        if node.operation.hands_over is not None:
            given = node.args[node.operation.hands_over]
            self.delivered[given] = inputs[node.inputs.index(given)]
        outputs = self._append(node, bases, inputs, task)
        for value, version in zip(node.outputs, outputs, strict=True):
            if value is not None and version is not None:
                self.current[value] = version

    def _append(
        self, node: Node, bases: tuple[int, ...], inputs: tuple[Value, ...], task: Task | None = None
    ) -> tuple[Value | None, ...]:
        """Add a node. Without a task of its own, it runs for the first time or makes something again."""
        resolved = dict(zip(node.inputs, inputs, strict=True))
        is_again = any(value in self.num_versions for value in node.named_outputs)
        outputs = tuple(None if value is None else self._version(value) for value in node.outputs)
        task = task or (Task.AGAIN if is_again else node.task)
        self.nodes.append(replace(node.with_values(resolved.__getitem__), outputs=outputs, task=task))
        self.bases.append(bases)
        return outputs

    def _version(self, value: Value) -> Value:
        count = self.num_versions[value] = self.num_versions.get(value, 0) + 1
        if count == 1:
            return value
        version = Value(f"{value.name}_again{'' if count == 2 else count}", value.type)
        self.repeats[version] = value
        return version
