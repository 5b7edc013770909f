"""Which values share a storage, when each storage is last read, and which values the forward pass keeps.

A view belongs to the storage that it lies in.
"""

from __future__ import annotations

from dataclasses import dataclass

from undertow.ir import KeptValue, Node, OpaqueType, Program, TensorType, Value

FOREVER = 1 << 60


@dataclass(frozen=True)
class Lifetimes:
    """`root` maps a value to the value whose memory it lies in; `last_use` gives the last reading node of a root."""

    root: dict[Value, Value]
    born: dict[Value, int]  # node index of a root; -1 for inputs
    last_use: dict[Value, int]
    owned: frozenset[Value]  # roots made by an operation that always returns new memory
    borrowed: dict[Value, tuple[Value, ...]]  # what is in use as long as a context or handle is

    def read_by(self, node: Node) -> list[Value]:
        """The values whose memory a node reads, also through a context or handle."""
        found = list(node.inputs)
        return found + [value for handle in node.inputs for value in self.borrowed.get(handle, ())]

    def is_dead_after(self, value: Value, index: int) -> bool:
        """Whether nothing reads the memory of `value` after node `index`."""
        return self.last_use[self.root[value]] <= index


def find_lifetimes(program: Program) -> Lifetimes:
    """Which values of a Program share a storage, and when it is last read. Outputs, updates and gradients stay."""
    root: dict[Value, Value] = {}
    born: dict[Value, int] = {}
    last_use: dict[Value, int] = {}
    owned: set[Value] = set()
    borrowed: dict[Value, tuple[Value, ...]] = {}
    for item in program.inputs:
        root[item.value], born[item.value], last_use[item.value] = item.value, -1, FOREVER
    for item in program.cotangents:
        start = program.boundary
        root[item.value], born[item.value], last_use[item.value] = item.value, start, start
    for index, node in enumerate(program.nodes):
        for value in node.inputs:
            for read in (value, *borrowed.get(value, ())):
                last_use[root[read]] = max(last_use[root[read]], index)
        for value in node.named_outputs:
            if node.operation.borrows and isinstance(value.type, OpaqueType):
                borrowed[value] = node.inputs
            source = node.shared_input
            if source is not None:
                root[value] = root[source]
            else:
                root[value], born[value], last_use[value] = value, index, index
                if node.operation.is_fresh:
                    owned.add(value)
    for value in program.ends:
        last_use[root[value]] = FOREVER
    return Lifetimes(root, born, last_use, frozenset(owned), borrowed)


def is_dense(value: Value) -> bool:
    """Whether each element of the value has memory of its own and no gaps lie between."""
    return isinstance(value.type, TensorType) and value.type.is_dense


def kept_values(program: Program, lifetimes: Lifetimes) -> tuple[KeptValue, ...]:
    """The values of the forward pass that the backward pass reads, each storage once, without the Program's inputs."""
    start = program.backward_start
    makers = {value: node for node in program.nodes[:start] for value in node.named_outputs}
    names = {value.name: node for value, node in makers.items()}
    askers: dict[Value, dict[str, None]] = {}
    for node in program.nodes[start:]:
        asker = names.get(node.origin.derived_from)
        for value in node.inputs:
            root = lifetimes.root[value]
            if root in makers and value in makers:
                askers.setdefault(root, {})[asker.name if asker is not None else node.name] = None
    return tuple(KeptValue(root, root.type.num_bytes, makers[root], tuple(found)) for root, found in askers.items())
