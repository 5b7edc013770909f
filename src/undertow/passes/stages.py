"""One Program per stage: what a stage computes of a shard, and what it sends and receives.

In: the derived Program of a whole shard, before anything is done with its gradients, and where the stages begin among
its forward operations. Out: for each stage a Program of pieces, forward, backward, and where the schedule asks for it
the weights' half; and the values that cross from stage to stage.

The whole Program is derived first, so each operation and each sum of cotangents is the one of a single process. A
backward operation runs where the forward operation is that it was derived from. So a value that several stages read, a
skip connection or a tied weight, gets the cotangents of later stages first, in the order of the whole Program.

Views are made again by whoever reads them, and so is what follows cheaply from the Program's inputs. All else that a
stage reads and does not make is sent by the stage that makes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.utils.flop_counter import flop_registry

from undertow.alternatives.registry import find_parts
from undertow.errors import CaptureError
from undertow.ir import Gradient, Node, OpaqueType, Origin, Phase, Program, TensorType, Value
from undertow.ir.cleaning import remove_unused
from undertow.ir.types import contiguous_strides
from undertow.ops.interpret import generator_of, state_type_of
from undertow.ops.own import GENERATOR_STATE, RESTRIDE
from undertow.ops.shards import KEEP_RECORD, SHARDS
from undertow.ops.stages import FINISH_RECEIVE, FINISH_SEND, NO_LOSS, PAUSE, SET_STATE, STAGE_LINK, START_SEND
from undertow.passes.shards import SHARE_SEED
from undertow.passes.updates import seed_loss
from undertow.stages.schedules import Pass

CHEAP_RATIO = 4  # an operation on inputs of at most so many times its output's bytes is run again rather than sent


@dataclass(frozen=True, eq=False)
class Crossing:
    """A value that one stage makes and another reads; `number` is its route, the same for all shards."""

    number: int
    value: Value
    source: int
    target: int
    which: Pass  # of the pieces that send and receive it

    @property
    def num_bytes(self) -> int:
        """What is sent for each shard."""
        return self.value.tensor_type.num_elements * self.value.tensor_type.dtype.itemsize


@dataclass(frozen=True, eq=False)
class StagePart:
    """What one stage does with a shard. `program` still has its gradients: what is done with them comes after."""

    stage: int
    program: Program
    crossings: tuple[Crossing, ...]  # that begin or end here, in the order in which they are sent
    sent: tuple[Value, ...]  # transfers of cotangents that nobody has waited for yet

    def arriving(self, which: Pass) -> list[Crossing]:
        """What a piece reads of other stages."""
        return [item for item in self.crossings if item.target == self.stage and item.which is which]

    def leaving(self, which: Pass) -> list[Crossing]:
        """What a piece sends."""
        return [item for item in self.crossings if item.source == self.stage and item.which is which]


def divide(program: Program, starts: Sequence[int], in_halves: bool) -> tuple[StagePart, ...]:
    """The parts of the stages. `starts` are the positions of the first forward operations of stages 1, 2, ..."""
    division = _Division(seed_loss(program, SHARE_SEED), starts, in_halves)
    division.run()
    return division.parts()


def starts_in(program: Program, known: Program, starts: Sequence[int]) -> list[int]:
    """The same cut in the Program of a shard of another size, by where operations come from in the model's code.

    The size of a shard may decide on operations: a batch of one is not copied where others are.
    """
    if len(program.first_pass) == len(known.first_pass):
        return list(starts)
    found: list[int] = []
    for start in starts:
        node = known.first_pass[start]
        same = [place for place, item in enumerate(known.first_pass) if _is_alike(item, node)]
        places = [place for place, item in enumerate(program.first_pass) if _is_alike(item, node)]
        if not places:
            raise CaptureError(f"shards of other sizes have no {node.name} at {node.origin}, where a stage begins")
        found.append(places[min(same.index(start), len(places) - 1)])
    return found


def _is_alike(first: Node, second: Node) -> bool:
    return first.operation is second.operation and replace(first.origin, derived_from="") == replace(
        second.origin, derived_from=""
    )


def with_end(part: StagePart, program: Program) -> Program:
    """The Program with what ends it: a last pause, after which it waits for what it has sent."""
    waits = [Node(FINISH_SEND, (value, STAGE_LINK), {}, (), Origin(), Phase.BACKWARD) for value in part.sent]
    nodes = (*program.nodes, _pause(part.program.gradients, Phase.BACKWARD), *waits)
    return replace(program, nodes=nodes, boundary=len(nodes))


def assign_stages(program: Program, starts: Sequence[int]) -> dict[Node, int]:
    """The stage of each operation of a Program that makes the cotangent of its loss itself."""
    for node in program.nodes:
        if node.operation.is_guard:
            raise CaptureError(
                f"the model branches on a tensor's value ({node.origin}), and stages cannot agree on a branch that "
                f"only one of them sees; train it with data= alone, or let every call take one path"
            )
    found: dict[Node, int] = {}
    forward: dict[str, int] = {}
    for position, node in enumerate(program.first_pass):
        found[node] = bisect_right(starts, position)
        forward.update((value.name, found[node]) for value in node.named_outputs)
    backward: dict[Value, int] = {}
    loss = program.outputs[0]
    for node in program.second_pass:
        known = [backward[value] for value in node.inputs if value in backward]
        if program.seed in node.outputs:
            stage = found[program.makers[loss]]
        elif node.origin.derived_from in forward:
            stage = min(forward[node.origin.derived_from], *known) if known else forward[node.origin.derived_from]
        else:
            stage = min(known, default=found[program.makers[loss]])
        found[node] = stage
        backward.update(dict.fromkeys(node.named_outputs, stage))
    return found


@dataclass(eq=False)
class _Pieces:
    """The operations of a stage that come to be, and what is there."""

    nodes: dict[Pass, list[Node]] = field(default_factory=lambda: {which: [] for which in Pass})
    present: set[Value] = field(default_factory=set)
    gradients: list[Gradient] = field(default_factory=list)


class CheapOperations:
    """Operations that follow from the Program's inputs alone, and read little more than they make."""

    def __init__(self, program: Program) -> None:
        self._inputs = {item.value for item in program.inputs}
        self._makers = program.makers
        self._known: dict[Node, bool] = {}

    def is_cheap(self, node: Node) -> bool:
        """Whether a stage that needs what it makes runs it again."""
        if node not in self._known:
            operation = node.operation
            is_plain = not (operation.is_random or operation.must_run or operation.is_gather) and operation.can_repeat
            packet = None if operation.overload is None else operation.overload.overloadpacket
            is_plain = is_plain and operation.flops is None and packet not in flop_registry
            made = sum(value.type.num_bytes for value in node.named_outputs)
            read = sum(value.type.num_bytes for value in node.inputs)
            self._known[node] = (
                is_plain
                and not operation.chains(node)
                and read <= CHEAP_RATIO * made
                and all(value in self._inputs or self.is_cheap(self._makers[value]) for value in node.inputs)
                and all(isinstance(value.type, TensorType) for value in node.named_outputs)
            )
        return self._known[node]


class _Division:
    def __init__(self, program: Program, starts: Sequence[int], in_halves: bool) -> None:
        self.program, self.in_halves = program, in_halves
        self.stage_of = assign_stages(program, starts)
        self.stages = [_Pieces() for _ in range(len(starts) + 1)]
        self.inputs = {item.value for item in program.inputs}
        self.makers = dict(program.makers)
        self.packed: dict[Value, Value] = {}  # small parts of cotangents as they are sent
        self.is_forward = {value for node in program.first_pass for value in node.named_outputs}
        self.crossings: list[Crossing] = []
        self.cheap = CheapOperations(program)

    def run(self) -> None:
        """Give each operation to its stage, and find out what crosses."""
        record = next(node for node in self.program.nodes if node.operation is KEEP_RECORD)
        self.pass_states_on()
        for nodes, which in ((self.program.first_pass, Pass.FORWARD), (self.program.second_pass, Pass.BACKWARD)):
            for node in nodes:
                if node is not record:
                    self.add(self.stage_of[node], node, which)
        self.keep_records(record)
        for item in self.program.gradients:
            if item.value is not None:
                self.stages[self.home(item.value)].gradients.append(item)

    def home(self, value: Value) -> int:
        """The stage that makes a value; the first one has what the user gave."""
        return self.stage_of[self.makers[value]] if value in self.makers else 0

    def add(self, stage: int, node: Node, which: Pass) -> None:
        """An operation of a stage, after all that it reads."""
        for value in node.inputs:
            self.obtain(stage, value, which)
        pieces = self.stages[stage]
        pieces.nodes[which].append(node)
        pieces.present.update(node.named_outputs)

    def obtain(self, stage: int, value: Value, which: Pass) -> None:
        """See to it that a stage has a value: it is there, is made again, or is sent."""
        pieces = self.stages[stage]
        if value in self.inputs or value in pieces.present:
            return
        maker = self.makers[value]
        if self.stage_of[maker] == stage:
            raise CaptureError(f"stage {stage} reads {value} before it is made ({maker.origin})")
        if which is Pass.BACKWARD and self.is_part(stage, value, maker):
            self.send_packed(stage, value, maker)
            return
        if maker.operation.is_view or self.cheap.is_cheap(maker):
            self.add(stage, maker, which)
            return
        self.cross(stage, value, maker)

    def is_part(self, stage: int, value: Value, maker: Node) -> bool:
        """Whether a value is a small part of another cotangent, which the stage does not need for itself."""
        whole = maker.shared_input
        if not maker.operation.is_view or whole is None or whole in self.inputs | self.stages[stage].present:
            return False
        part = value.tensor_type
        return part.num_elements < whole.tensor_type.num_elements and part.num_elements > 0

    def send_packed(self, stage: int, value: Value, maker: Node) -> None:
        """Send a part of a value without the rest. It comes to lie as it lay there, because kernels look at strides."""
        kind, source = value.tensor_type, self.stage_of[maker]
        if value not in self.packed:
            row = replace(kind, strides=contiguous_strides(kind.shape))
            self.packed[value] = packed = Value(f"{value.name}_packed", row)
            node = Node(RESTRIDE, (value, row.strides), {}, (packed,), maker.origin, Phase.BACKWARD)
            self.makers[packed], self.stage_of[node] = node, source
            pieces = self.stages[source].nodes[Pass.BACKWARD]
            pieces.insert(pieces.index(maker) + 1, node)
        packed = self.packed[value]
        self.cross(stage, packed, self.makers[packed])
        self.add(
            stage, Node(RESTRIDE, (packed, kind.strides), {}, (value,), maker.origin, Phase.BACKWARD), Pass.BACKWARD
        )

    def cross(self, stage: int, value: Value, maker: Node) -> None:
        """Send a value."""
        pieces, source = self.stages[stage], self.stage_of[maker]
        if isinstance(value.type, OpaqueType) or not value.tensor_type.is_dense:
            raise CaptureError(f"{value} of type {value.type} ({maker.origin}) cannot be sent to another stage")
        how = Pass.FORWARD if value in self.is_forward and source < stage else Pass.BACKWARD
        self.crossings.append(Crossing(len(self.crossings), value, source, stage, how))
        pieces.present.add(value)

    def pass_states_on(self) -> None:
        """The state of a generator goes from each stage that draws to the next one that does."""
        drawing: dict[object, dict[int, Node]] = {}
        for node in self.program.first_pass:
            if node.operation.is_random:
                drawing.setdefault(generator_of(node), {}).setdefault(self.stage_of[node], node)
        for number, (generator, stages) in enumerate(drawing.items()):
            for source, target in zip(list(stages), list(stages)[1:], strict=False):
                state = Value(f"state_{number}_after_stage_{source}", state_type_of(stages[source]))
                read = Node(GENERATOR_STATE, (generator,), {}, (state,), stages[source].origin)
                self.stages[source].nodes[Pass.WEIGHT].append(read)  # moved to the end of the forward piece
                self.stages[target].nodes[Pass.FORWARD].append(
                    Node(SET_STATE, (generator, state), {}, (), stages[target].origin)
                )
                self.crossings.append(Crossing(len(self.crossings), state, source, target, Pass.FORWARD))

    def keep_records(self, record: Node) -> None:
        """Each stage keeps the record of its own buffers; one of them has the loss."""
        _, loss, found, buffers, *statistics = record.args
        owners: list[int] = []
        for items in found:
            places = [place for place, *_ in items if place is not None]
            owners.append(self.home(statistics[places[0] - 1]) if places else owners[-1] if owners else 0)
        for stage, pieces in enumerate(self.stages):
            kept: list[Value] = []
            own = []
            for items, owner in zip(found, owners, strict=True):
                if owner == stage:
                    own.append(tuple(_move(item, statistics, kept) for item in items))
            own_buffers = tuple(item for item, owner in zip(buffers, owners, strict=True) if owner == stage)
            value = loss
            if self.home(loss) != stage:
                value = Value(f"no_loss_{stage}", loss.type)
                pieces.nodes[Pass.FORWARD].append(Node(NO_LOSS, (), {}, (value,), Origin()))
            args = (SHARDS, value, tuple(own), own_buffers, *kept)
            states = pieces.nodes[Pass.WEIGHT]
            pieces.nodes[Pass.FORWARD] += [Node(KEEP_RECORD, args, {}, (), Origin()), *states]
            pieces.nodes[Pass.WEIGHT] = []

    def parts(self) -> tuple[StagePart, ...]:
        """The Programs, with what they send and receive."""
        return tuple(self.part(stage, pieces) for stage, pieces in enumerate(self.stages))

    def part(self, stage: int, pieces: _Pieces) -> StagePart:
        leaving = [item for item in self.crossings if item.source == stage]
        arriving = [item for item in self.crossings if item.target == stage]
        handles: dict[Pass, list[Value]] = {which: [] for which in Pass}
        forward = [*_receive(arriving, Pass.FORWARD)]
        forward += _with_sends(pieces.nodes[Pass.FORWARD], leaving, Pass.FORWARD, handles)
        pause = _pause(pieces.gradients, Phase.FORWARD)
        backward = [*_receive(arriving, Pass.BACKWARD)]
        backward += [
            Node(FINISH_SEND, (handle, STAGE_LINK), {}, (), Origin(), Phase.BACKWARD)
            for handle in handles[Pass.FORWARD]
        ]
        made = {value for node in pieces.nodes[Pass.FORWARD] for value in node.named_outputs}
        early = [item for item in leaving if item.which is Pass.BACKWARD and item.value in made]
        backward += [_send(item, handles) for item in early]
        later = [item for item in leaving if item not in early]
        backward += _with_sends(pieces.nodes[Pass.BACKWARD], later, Pass.BACKWARD, handles)
        nodes, boundary = [*forward, pause, *backward], len(forward) + 1
        if self.in_halves:
            first, second = halve(backward, pieces.gradients)
            middle = _pause(pieces.gradients, Phase.BACKWARD)
            nodes = [*forward, pause, *first, middle, *second]
            boundary = len(nodes) - len(second)
        made |= {value for node in nodes for value in node.named_outputs}
        own_loss = next(node.args[1] for node in nodes if node.operation is KEEP_RECORD)
        seed = self.program.seed if self.program.seed in made else None
        program = replace(
            self.program,
            nodes=tuple(nodes),
            boundary=boundary,
            outputs=(own_loss,),
            gradients=tuple(pieces.gradients),
            seed=seed,
            differentiable=frozenset(),
            unread=(),
        )
        sent = [node.args[1] for node in nodes if node.operation is START_SEND]
        leaving.sort(key=lambda item: sent.index(item.number))
        return StagePart(stage, remove_unused(program), (*leaving, *arriving), tuple(handles[Pass.BACKWARD]))


def _pause(gradients: Sequence[Gradient], phase: Phase) -> Node:
    return Node(PAUSE, tuple(item.input.name for item in gradients), {}, (), Origin(), phase)


def _move(item: tuple[object, ...], statistics: Sequence[Value], kept: list[Value]) -> tuple[object, ...]:
    """What was found for a buffer, with its place in the stage's own record."""
    place, *rest = item
    if place is None:
        return item
    assert isinstance(place, int)
    kept.append(statistics[place - 1])
    return len(kept), *rest


def _receive(arriving: Sequence[Crossing], which: Pass) -> list[Node]:
    phase = Phase.FORWARD if which is Pass.FORWARD else Phase.BACKWARD
    return [
        Node(FINISH_RECEIVE, (STAGE_LINK, item.number), {}, (item.value,), Origin(f"stage {item.source}"), phase)
        for item in arriving
        if item.which is which
    ]


def _send(item: Crossing, handles: Mapping[Pass, list[Value]]) -> Node:
    handle = Value(f"sending_{item.number}", OpaqueType("transfer"))
    handles[item.which].append(handle)
    phase = Phase.FORWARD if item.which is Pass.FORWARD else Phase.BACKWARD
    args = (STAGE_LINK, item.number, item.source, item.target, item.value)
    return Node(START_SEND, args, {}, (handle,), Origin(f"stage {item.target}"), phase)


def _with_sends(
    nodes: Sequence[Node], leaving: Sequence[Crossing], which: Pass, handles: Mapping[Pass, list[Value]]
) -> list[Node]:
    """The operations of a piece, each followed by the sends of what it makes."""
    wanted: dict[Value, list[Crossing]] = {}
    for item in leaving:
        if item.which is which:
            wanted.setdefault(item.value, []).append(item)
    found: list[Node] = []
    for node in nodes:
        found.append(node)
        found += [_send(item, handles) for value in node.named_outputs for item in wanted.get(value, ())]
    return found


def halve(nodes: Sequence[Node], gradients: Sequence[Gradient]) -> tuple[list[Node], list[Node]]:
    """What other stages and other layers wait for, and the derivatives of parameters.

    An operation belongs to the second half if it leads to nothing but the gradients of one forward operation.
    """
    nodes = [part for node in nodes for part in _in_parts(node)]
    makers = {value: node for node in nodes for value in node.named_outputs}
    leads_to: dict[Node, set[str]] = {node: set() for node in nodes}
    for item in gradients:
        if item.value in makers:
            maker = makers[item.value]
            leads_to[maker].add(maker.origin.derived_from or item.input.name)
    for node in reversed(nodes):
        if node.operation.must_run:
            leads_to[node].add("other stages")
        for value in node.inputs:
            if value in makers:
                leads_to[makers[value]] |= leads_to[node]
    second = [node for node in nodes if len(leads_to[node]) == 1 and "other stages" not in leads_to[node]]
    later = set(second)
    return [node for node in nodes if node not in later], second


def _in_parts(node: Node) -> list[Node]:
    """A backward convolution as two operations, where they have the same bits."""
    found = list(find_parts(node))
    if not found:
        return [node]
    made = {value for part in found for value in part.named_outputs}
    return found if made == set(node.named_outputs) else [node]
