"""`fuse`: neighbouring elementwise operations, sums and norms become one operation each, for a GPU.

In: a derived Program. Out: one whose nodes are products, convolutions, draws and groups. So the planner decides about
passes over memory that exist, and not about values that fusion never makes.

Two fusible nodes may join when no product is on a path between them. Each node has a level: the most products on any
path to it. No path leads from a level to a lower one, and a path through a product leads to a higher one. So joining
connected nodes of one level makes no cycle. The two passes are grouped separately. A group of the backward pass
computes again, inside itself, what follows elementwise from the values that `find_kept` keeps. Where a product or
convolution needs such a value, a group of its own makes it before the first reader. In both passes the same is done
with what follows elementwise from the Program's inputs alone, such as a weight in another precision.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from undertow.fast.groups import fused, is_free, is_fusible
from undertow.ir import Node, Program, Value, map_values
from undertow.ir.cleaning import remove_unused
from undertow.ir.fragment import Fragment
from undertow.ir.pytorch import operation_of
from undertow.passes.alignment import align_products
from undertow.passes.expansion import expand
from undertow.passes.keeping import find_kept


def fuse(program: Program) -> Program:
    """The Program in groups; they are not compiled yet."""
    return remove_unused(_Fuser(remove_unused(expand(align_products(program)))).run())


@dataclass(eq=False)
class _Piece:
    """What becomes one node: nodes that join, or one node that does not. `order` is its position in the Program."""

    members: tuple[Node, ...]
    order: float
    is_group: bool
    nodes: tuple[Node, ...] = ()  # of a group: the members, the views between them, and what is computed again
    reads: tuple[Value, ...] = ()  # from outside; instead of a view, the value that it views
    makes: dict[Value, Value] = field(default_factory=dict)  # what others read of it, and under which name


class _Fuser:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.maker, self.position = program.makers, program.positions
        self.ends = dict.fromkeys(program.ends)
        self.cheap = self._find_cheap()
        in_demand = self._read_by_products(program.first_pass) & self._read_by_products(program.second_pass)
        self.kept = in_demand | find_kept(program, self._passed_on(program.first_pass), in_demand)

    def run(self) -> Program:
        forward = _Pass(self, self.program.first_pass, is_backward=False).build()
        backward = _Pass(self, self.program.second_pass, is_backward=True).build()
        return replace(self.program, nodes=(*forward, *backward), boundary=len(forward))

    def is_forward(self, value: Value) -> bool:
        return value in self.maker and self.position[self.maker[value]] < self.program.boundary

    def behind_views(self, value: Value) -> Value:
        while value in self.maker and self.maker[value].operation.is_view:
            value = self.maker[value].inputs[0]
        return value

    def _find_cheap(self) -> set[Value]:
        """What follows elementwise from inputs, or in the backward pass from the forward pass, and is no result."""
        final = {self.behind_views(value) for value in self.ends}
        given = {item.value for item in self.program.inputs}
        found: set[Value] = set()
        for position, node in enumerate(self.program.nodes):
            if position == self.program.boundary:
                given.update(value for before in self.program.first_pass for value in before.named_outputs)
            is_derived = is_free(node) and all(value in given or value in found for value in node.inputs)
            if is_derived and final.isdisjoint(node.named_outputs):
                found.update(node.named_outputs)
        return found

    def levels(self, nodes: Iterable[Node]) -> dict[Node, int]:
        """The most products, convolutions and draws on a path to each node, within one pass."""
        level: dict[Node, int] = {}
        after: dict[Value, int] = {}  # the least level that a reader of the value has
        for node in nodes:
            level[node] = max((after.get(value, 0) for value in node.inputs), default=0)
            is_crossed = not is_fusible(node.operation) and not node.operation.is_view
            after.update(dict.fromkeys(node.named_outputs, level[node] + is_crossed))
        return level

    def _read_by_products(self, nodes: Sequence[Node]) -> set[Value]:
        """What nodes that do not join others read; instead of a view, the value that it views."""
        single = (node for node in nodes if not is_fusible(node.operation) and not node.operation.is_view)
        found = {self.behind_views(value) for node in single for value in node.inputs}
        return {value for value in found if self.is_forward(value)} - self.cheap

    def _passed_on(self, nodes: Sequence[Node]) -> set[Value]:
        """Values that a fusible node of another level reads."""
        level = self.levels(nodes)
        found: set[Value] = set()
        for node in nodes:
            if is_fusible(node.operation):
                sources = (self.behind_views(value) for value in node.inputs)
                found.update(
                    value for value in sources if value in self.maker and level[self.maker[value]] != level[node]
                )
        return found - self.cheap


class _Pass:
    """One pass: its pieces, what they read of each other, and the nodes they become."""

    def __init__(self, fuser: _Fuser, nodes: Sequence[Node], is_backward: bool) -> None:
        self.fuser, self.nodes, self.is_backward = fuser, nodes, is_backward
        self.pieces = self._join()
        self.again: dict[Value, Value] = {}  # what is made a second time for products, under its new name
        self.views: dict[Value, Value] = {}

    def build(self) -> list[Node]:
        owner = {value: piece for piece in self.pieces for node in piece.members for value in node.named_outputs}
        for piece in list(self.pieces):
            self._find_reads(piece)
        for piece in self.pieces:
            for value in piece.reads:
                if value in owner:
                    owner[value].makes[value] = value
        for value in self.fuser.ends:
            source = self.fuser.behind_views(value)
            if source in owner:
                owner[source].makes[source] = source
        if not self.is_backward:
            for value, piece in owner.items():  # in order: the least memory of a step must not depend on addresses
                if value in self.fuser.kept:
                    piece.makes[value] = value
        return [node for piece in self._sort() for node in self._emit(piece)]

    def _join(self) -> list[_Piece]:
        """Groups of connected fusible nodes of one level, and every other node alone; views are left out."""
        level = self.fuser.levels(self.nodes)
        leader: dict[Node, Node] = {}

        def find(node: Node) -> Node:
            while leader[node] is not node:
                leader[node] = leader[leader[node]]
                node = leader[node]
            return node

        readers: dict[tuple[Value, int], Node] = {}  # of what products make: to be read once by all of a level
        own = set(self.nodes)
        for node in self.nodes:
            if is_fusible(node.operation) and self.fuser.cheap.isdisjoint(node.named_outputs):
                leader[node] = node
                for value in map(self.fuser.behind_views, node.inputs):
                    before = self.fuser.maker.get(value)
                    if before in leader and level[before] == level[node]:
                        leader[find(node)] = find(before)
                    elif before in own and before not in leader and value not in self.fuser.cheap:
                        leader[find(node)] = find(readers.setdefault((value, level[node]), node))
        members: dict[Node, list[Node]] = {}
        for node in leader:
            members.setdefault(find(node), []).append(node)
        position = self.fuser.position
        pieces = [_Piece(tuple(group), position[group[-1]], is_group=True) for group in members.values()]
        single = (node for node in self.nodes if not is_fusible(node.operation) and not node.operation.is_view)
        return pieces + [_Piece((node,), position[node], is_group=False) for node in single]

    def _find_reads(self, piece: _Piece) -> None:
        if piece.is_group:
            wanted = [value for node in piece.members for value in node.named_outputs]
            piece.nodes, piece.reads = self._slice(wanted, set(piece.members))
            return
        sources = [self.fuser.behind_views(value) for node in piece.members for value in node.inputs]
        for value in sources:
            if self._is_lost(value):
                self._make_again(value, piece.order)
        piece.reads = tuple(dict.fromkeys(self.again.get(value, value) for value in sources))

    def _is_lost(self, value: Value) -> bool:
        """Whether the forward pass made the value and did not keep it, or no node makes it at all."""
        if value in self.fuser.cheap:
            return True
        return self.is_backward and self.fuser.is_forward(value) and value not in self.fuser.kept

    def _slice(self, wanted: Iterable[Value], members: set[Node]) -> tuple[tuple[Node, ...], tuple[Value, ...]]:
        """The members, views and lost values that `wanted` follows from, in order, and what they read from outside."""
        nodes: set[Node] = set()
        reads: dict[Value, None] = {}
        waiting = list(wanted)
        while waiting:
            value = waiting.pop()
            node = self.fuser.maker.get(value)
            if node is not None and (node in members or node.operation.is_view or self._is_lost(value)):
                if node not in nodes:
                    nodes.add(node)
                    waiting += node.inputs
            else:
                reads[value] = None
        ordered = tuple(sorted(nodes, key=self.fuser.position.__getitem__))
        return ordered, tuple(sorted(reads, key=lambda value: value.name))

    def _make_again(self, value: Value, order: float) -> None:
        if value in self.again:
            return
        self.again[value] = Value(f"{value.name}_again", value.type) if self.is_backward else value
        piece = _Piece((), order, is_group=True, makes={value: self.again[value]})
        piece.nodes, piece.reads = self._slice([value], set())
        self.pieces.append(piece)

    def _sort(self) -> list[_Piece]:
        """Each piece after the pieces it reads from, and draws in order; otherwise in the Program's order."""
        pieces = sorted(self.pieces, key=lambda piece: piece.order)
        made_by = {name: place for place, piece in enumerate(pieces) for name in piece.makes.values()}
        waits = [
            {made_by[value] for value in piece.reads if value in made_by} - {place}
            for place, piece in enumerate(pieces)
        ]
        effects = [
            place for place, piece in enumerate(pieces) if any(node.operation.must_run for node in piece.members)
        ]
        for before, after in zip(effects, effects[1:], strict=False):
            waits[after].add(before)
        followers: list[list[int]] = [[] for _ in pieces]
        for place, needs in enumerate(waits):
            for need in needs:
                followers[need].append(place)
        ready = [place for place, needs in enumerate(waits) if not needs]
        heapq.heapify(ready)
        ordered: list[_Piece] = []
        while ready:
            place = heapq.heappop(ready)
            ordered.append(pieces[place])
            for follower in followers[place]:
                waits[follower].discard(place)
                if not waits[follower]:
                    heapq.heappush(ready, follower)
        assert len(ordered) == len(pieces), "joining made a cycle"
        return _delay_repeats(ordered)

    def _emit(self, piece: _Piece) -> list[Node]:
        """The piece as a node, after the views that it reads and before the views of its results that are outputs."""
        nodes: list[Node] = []
        if piece.is_group:
            if not piece.makes:
                return []
            nodes.append(_join_nodes(piece))
        else:
            (node,) = piece.members
            read: Callable[[Value], Value] = lambda value: self._view(value, nodes)  # noqa: E731
            seen = node.with_values(read)
            nodes.append(seen)
        made = set(piece.makes) if piece.is_group else set(piece.members[0].named_outputs)
        for value in self.fuser.ends:
            if value not in made and self.fuser.behind_views(value) in made:
                self._view(value, nodes)
        return nodes

    def _view(self, value: Value, nodes: list[Node]) -> Value:
        """The value as this pass reads it; the views that lead to it are added to `nodes` where they are new."""
        node = self.fuser.maker.get(value)
        if node is None or not node.operation.is_view:
            return self.again.get(value, value)
        if value in self.views:
            return self.views[value]
        args = map_values(node.args, lambda item: self._view(item, nodes))
        is_second = self.is_backward and self.fuser.is_forward(value)
        renamed = {item: Value(f"{item.name}_seen", item.type) if is_second else item for item in node.named_outputs}
        self.views.update(renamed)
        nodes.append(
            replace(node, args=args, outputs=tuple(None if item is None else renamed[item] for item in node.outputs))
        )
        return self.views[value]


def _join_nodes(piece: _Piece) -> Node:
    """One node for a group; a single operation stays as it is."""
    if len(piece.nodes) == 1:
        (node,) = piece.nodes
        if node.target is torch.ops.prims.convert_element_type.default:  # Inductor's name for a cast
            node = replace(
                node,
                operation=operation_of(torch.ops.aten._to_copy.default),
                args=node.args[:1],
                kwargs={"dtype": node.args[1]},
            )
        return replace(node, outputs=tuple(piece.makes.get(value) if value else None for value in node.outputs))
    fragment = Fragment(piece.nodes, piece.reads, tuple(piece.makes))
    last = piece.nodes[-1]
    return Node(fused(fragment), piece.reads, {}, tuple(piece.makes.values()), last.origin, last.phase)


def _delay_repeats(pieces: Sequence[_Piece]) -> list[_Piece]:
    """The pieces in order, but those that only make something again come right before its first reader."""
    waiting = {name: piece for piece in pieces if not piece.members for name in piece.makes.values()}
    ordered: list[_Piece] = []
    for piece in pieces:
        if piece.members:
            ordered += [waiting.pop(value) for value in piece.reads if value in waiting]
            ordered.append(piece)
    return ordered
