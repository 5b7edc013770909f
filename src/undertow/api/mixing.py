"""Which modules mix the examples of a batch: their results depend on how a batch is divided into shards.

In: a step and a batch. Out: a warning that names modules, before the first step of a job in shards. The recorded
forward pass runs for a few examples together, and for one half of them after the other. What an operation makes for an
example should not depend on the others. It runs on the same values both times, since what the whole has made is given
to the halves; so a module that mixes is found by itself, and rounding does not add up. Draws are given on in the same
way. Nothing is written: a recorded pass has no side effects, and generators are put back.

Results are compared where one dimension is twice as long for twice the examples. Such a dimension may have been joined
with others, so every place of the examples among them is tried. Two such dimensions are pairs of examples, which is
mixing as well. Sums and means over a batch are not seen in themselves, but where they come back to the examples. Not
compared: batch normalisation, whose statistics per shard are said in the docs; operations whose constants differ from
batch to batch; and models that cannot be recorded, or not in the same operations, for so few examples.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from undertow.api.batch_division import count_examples, take_examples
from undertow.ir import Node, Program, TensorType, Value
from undertow.ir.structure import tensors_in
from undertow.memory.tables import make_plan
from undertow.ops.interpret import generators_of, run_node
from undertow.ops.modes import below_autograd
from undertow.ops.own import bind
from undertow.passes.shards import is_batch_norm
from undertow.pipeline import Request, record
from undertow.record.capture import Captured

MOST_NAMED = 3
# Kernels round differently for another batch. What is mixed differs by about its own size.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
COARSE_TOLERANCE = 0.1  # of shorter types


def warn_of_mixing(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn of modules whose results for an example depend on the other examples."""
    found = find_mixing(request, args, kwargs)
    if found:
        named = ", ".join(found[:MOST_NAMED]) + (
            f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        )
        warnings.warn(
            f"examples of a batch are mixed by {named}: with shards they are mixed within a shard, and the result "
            f"depends on the number of shards",
            stacklevel=2,
        )


def find_mixing(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The places that mix examples, as module and line."""
    half = 2 if count_examples(args, kwargs) >= 4 else 1  # batch normalisation refuses single examples
    if count_examples(args, kwargs) < 2:
        return []
    calls = [take_examples(args, kwargs, *span) for span in ((0, 2 * half), (0, half), (half, 2 * half))]
    try:
        with torch.enable_grad():
            whole, part = (record(request, *call) for call in calls[:2])
    except Exception:  # a model may refuse another batch in its own way, and then nothing is known
        return []
    nodes = whole.program.nodes
    if [node.name for node in nodes] != [node.name for node in part.program.nodes] or any(map(_has_effects, nodes)):
        return []
    budget_bytes = request.terms.budget_bytes
    if budget_bytes is not None and _most_bytes(whole.program) + 2 * _most_bytes(part.program) > budget_bytes:
        return []
    modules = dict(request.model.named_modules())
    runs = [
        _Run(captured, [tensor for _, tensor in tensors_in(call)], modules)
        for captured, call in zip((whole, part, part), calls, strict=True)
    ]
    generators = [bind(item, whole.live) for item in generators_of(nodes)]
    states = [generator.get_state() for generator in generators]
    try:
        with torch.random.fork_rng(), below_autograd():
            return list(dict.fromkeys(_Comparison(runs).find()))
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _has_effects(node: Node) -> bool:
    operation = node.operation
    return operation.runs_user_code or (operation.must_run and not operation.is_guard and not operation.is_random)


def _most_bytes(program: Program) -> int:
    """What running a forward pass takes, parameters and batch included."""
    return make_plan(program).peak_bytes


class Place(NamedTuple):
    """Where a tensor has its examples: a dim, and how many of something else come outside of them in it."""

    dim: int
    before: int


@dataclass(eq=False)
class _Run:
    """A recorded forward pass while it runs: its values, and which node reads each last."""

    captured: Captured
    tensors: list[torch.Tensor]
    modules: Mapping[str, torch.nn.Module]
    values: dict[Value, Any] = field(init=False)
    last_reads: dict[Value, int] = field(init=False)

    def __post_init__(self) -> None:
        inputs = self.captured.program.inputs
        self.values = {
            item.value: self.captured.tensor_behind(item, self.tensors, dict(self.modules)) for item in inputs
        }
        self.values = {
            value: item.detach() if isinstance(item, torch.Tensor) else item for value, item in self.values.items()
        }
        self.last_reads = {value: place for place, node in enumerate(self.nodes) for value in node.inputs}

    @property
    def nodes(self) -> Sequence[Node]:
        return self.captured.program.nodes

    def run(self, place: int) -> None:
        run_node(self.nodes[place], self.values, self.captured.live)

    def forget(self, place: int) -> None:
        """Free what nobody reads any more."""
        node = self.nodes[place]
        for value in (*node.inputs, *node.named_outputs):
            if self.last_reads.get(value, -1) <= place:
                self.values.pop(value, None)


class _Comparison:
    """The whole and its halves, run side by side."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self.whole, *self.halves = runs
        self.places: dict[Value, Place] = {}
        self.pairs: set[Value] = set()  # values of the whole that are about pairs of examples

    def find(self) -> Iterator[str]:
        """The nodes that mix examples."""
        for position, node in enumerate(self.whole.nodes):
            if not node.operation.is_guard:
                if self._run(position, node):
                    yield str(node.origin) or node.name
                for run in (self.whole, *self.halves):
                    run.forget(position)

    def _run(self, position: int, node: Node) -> bool:
        """Run a node for the whole and for the halves; whether it mixes examples."""
        self.whole.run(position)
        is_drawn = node.operation.is_random and node.operation.draws(node)
        has_no_meaning = node.operation.is_empty or _has_other_constants(node, self.halves[0].nodes[position])
        is_given = is_drawn or has_no_meaning or is_batch_norm(node)
        if is_drawn:
            for half in self.halves:
                half.values |= {
                    other: self.whole.values[value]
                    for value, other in zip(node.outputs, half.nodes[position].outputs, strict=True)
                    if value is not None and other is not None
                }
        else:
            for half in self.halves:
                half.run(position)
        is_mixed = False
        for number, value in enumerate(node.outputs):
            others = [half.nodes[position].outputs[number] for half in self.halves]
            if value is not None and others[0] is not None and isinstance(value.type, TensorType):
                is_mixed |= self._compare(node, value, others[0], is_given)
        return is_mixed and self.pairs.isdisjoint(node.inputs)

    def _compare(self, node: Node, value: Value, other: Value, is_given: bool) -> bool:
        """Whether an output differs; the halves then get theirs of the whole. They share one recorded Program."""
        dims = _doubled(value.tensor_type.shape, other.tensor_type.shape)
        if len(dims) != 1:
            self.pairs |= {value} if dims else set()
            return bool(dims)
        found = None if is_given else self._find_place(value, other, dims[0])
        is_number = value.tensor_type.dtype.is_floating_point
        if found is None and not is_given and not is_number:
            return False  # an index may differ by a rounding
        inputs = (item for item in node.inputs if item in self.places)
        before = (self.places[item] for item in inputs if item.tensor_type.shape == value.tensor_type.shape)
        place = self.places[value] = found or next(before, Place(dims[0], 1))
        if not node.operation.is_view and 0 not in other.tensor_type.strides:
            for half, part in zip(self.halves, _take_apart(self.whole.values[value], place), strict=True):
                kind = other.tensor_type
                made = torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device)
                half.values[other] = made.copy_(part)
        return found is None and not is_given

    def _find_place(self, value: Value, other: Value, dim: int) -> Place | None:
        """Where the examples are in the whole, if the halves have made the same of them."""
        made = [half.values[other] for half in self.halves]
        length = made[0].shape[dim]
        for before in (number for number in range(1, length + 1) if length % number == 0):
            parts = _take_apart(self.whole.values[value], place := Place(dim, before))
            if all(_are_near(part, item) for part, item in zip(parts, made, strict=True)):
                return place
        return None


def _doubled(whole: Sequence[int], half: Sequence[int]) -> list[int]:
    """The dims that are twice as long in the whole; none unless all others are equal."""
    if len(whole) != len(half) or any(long not in (short, 2 * short) for long, short in zip(whole, half, strict=True)):
        return []
    return [dim for dim, (long, short) in enumerate(zip(whole, half, strict=True)) if long == 2 * short != 0]


def _take_apart(tensor: torch.Tensor, place: Place) -> list[torch.Tensor]:
    """The two halves of the examples."""
    dim, before = place
    shape = list(tensor.shape)
    apart = tensor.reshape(*shape[:dim], before, 2, shape[dim] // (2 * before), *shape[dim + 1 :])
    shape[dim] //= 2
    return [apart.select(dim + 1, half).reshape(shape) for half in range(2)]


def _are_near(left: torch.Tensor, right: torch.Tensor) -> bool:
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    tolerance = TOLERANCE.get(left.dtype, COARSE_TOLERANCE)
    finite = left.isfinite()
    if not torch.equal(finite, right.isfinite()):
        return False
    largest = float(left[finite].abs().max()) if finite.any() else 0.0
    return float((left - right)[finite].abs().max()) <= tolerance * largest if largest else not right[finite].any()


def _has_other_constants(node: Node, other: Node) -> bool:
    """Whether a number among the arguments depends on the batch; sizes of views always do."""
    if node.operation.is_view:
        return False
    pairs = zip((*node.args, *node.kwargs.values()), (*other.args, *other.kwargs.values()), strict=False)
    return any(isinstance(left, int | float) and left != right for left, right in pairs)
