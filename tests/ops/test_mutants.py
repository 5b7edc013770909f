"""Deliberate mistakes in rules, each of which `ut.check_gradients` has to find and name.

Every rule of the registry gets every mistake below, argument by argument, on the first of its samples where the mistake
shows. A mistake that changes nothing (the sign of a zero gradient, the axis of a symmetric one) does not count. The
wrong rule replaces the right one while a function that calls the operation is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import undertow as ut
from undertow.ir.pytorch import operation_of
from undertow.ir.schema import bind_arguments, schema_of
from undertow.rules import registry
from undertow.rules.registry import Call, Case, Op, Sampler, Vjp, registered_ops

aten = torch.ops.aten
EPS = torch.finfo(torch.float64).eps
MAX_ADDENDS = 12  # of a composed formula; a few have dozens, all alike
# The check cannot judge these: it disagrees with the right rule too, or there is no sample in float64.
UNCHECKABLE = {
    aten.hardsigmoid.default: "eager's kernel has 1/6 in float32",
    aten.normal.Tensor_Tensor: "draws change with the arguments, and eager's derivative is zero",
    aten.normal.Tensor_float: "the same",
    aten.normal.float_Tensor: "the same",
    aten.mkldnn_rnn_layer.default: "exists in float32 only",
    aten.celu_.default: "a record of the in-place form, tested with celu",
    aten.elu_.default: "a record of the in-place form, tested with elu",
}
WITH_RULES = [op for op in registered_ops() if op.vjps and op.target not in UNCHECKABLE]


def flip(ct: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    dims = [dim for dim, size in enumerate(ct.shape) if size > 1]
    return ct.flip(dims[0]) if dims else ct


def transpose(ct: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return ct.mT if ct.dim() > 1 and ct.shape[-1] == ct.shape[-2] else ct


def average(ct: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return ct * (leaf.numel() / ct.numel()) if ct.numel() else ct


def take_first(ct: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    while ct.dim() > leaf.dim():
        ct = ct[0]
    for dim, size in enumerate(leaf.shape):
        ct = ct.narrow(dim, 0, 1) if size == 1 else ct
    return ct


# Each changes the cotangent of one argument, which has the broadcast shape until autodiff sums it to the leaf's shape.
MISTAKES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "wrong sign": lambda ct, leaf: -ct,
    "missing term: all of it": lambda ct, leaf: torch.zeros_like(ct),
    "wrong axis: flipped": flip,
    "wrong axis: transposed": transpose,
    "missing broadcast reduction: mean for sum": average,
    "missing broadcast reduction: the first for the sum": take_first,
    "wrong scale": lambda ct, leaf: ct * 1.001,
    "off by a constant": lambda ct, leaf: ct + 1e-3,
}


def with_mistake(vjp: Vjp, change: Callable[[Call, dict[str, Any]], dict[str, Any]]) -> Vjp:
    """The rule with `change` applied to its cotangents."""
    return Vjp(
        vjp.name,
        joint=lambda call, *cts: change(call, vjp.cotangents(call, cts)),
        joint_arguments=vjp.arguments,
        is_composed=vjp.is_composed,
    )


def change_argument(
    name: str, mistake: Callable[..., torch.Tensor], call: Call, found: dict[str, Any]
) -> dict[str, Any]:
    """Make the mistake in the cotangent of one argument or, if it is a list, of its first tensor."""
    ct, leaf = found.get(name), getattr(call, name)
    if isinstance(ct, torch.Tensor):
        return found | {name: mistake(ct, leaf)}
    if isinstance(ct, tuple | list):
        first = next((index for index, item in enumerate(ct) if item is not None), None)
        return found | {name: [mistake(t, leaf[i]) if i == first else t for i, t in enumerate(ct)]}
    return found


def swap(left: str, right: str, call: Call, found: dict[str, Any]) -> dict[str, Any]:
    leaves = getattr(call, left), getattr(call, right)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves) or leaves[0].shape != leaves[1].shape:
        return found
    return found | {left: found.get(right), right: found.get(left)}


class WithoutAddend(TorchDispatchMode):
    """Runs sums, but returns only the first addend of sum number `index`."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.num_sums = index, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.rsub.Tensor) or not is_float(result):
            return result
        self.num_sums += 1
        if self.num_sums - 1 != self.index:
            return result
        first = -args[0] if func in (aten.rsub.Scalar, aten.rsub.Tensor) else args[0]
        return first.expand(result.shape).to(result.dtype)


def without_addend(vjp: Vjp, index: int) -> Vjp:
    def joint(call: Call, *cts: Any) -> dict[str, Any]:
        with WithoutAddend(index):
            return vjp.cotangents(call, cts)

    return Vjp(vjp.name, joint=joint, joint_arguments=vjp.arguments, is_composed=vjp.is_composed)


def flatten(value: Any) -> list[torch.Tensor | None]:
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in flatten(item)]
    return [value if isinstance(value, torch.Tensor) else None]


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, change) for item in value)
    return change(value) if isinstance(value, torch.Tensor) else value


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class Sample:
    """One sample of an operation, as a function of the arguments that have a formula."""

    def __init__(self, op: Op, case: Case) -> None:
        self.op = op
        self.bound = bind_arguments(op.target, case.args, case.kwargs)
        self.names = [n for n in op.exact_vjp.arguments if any(map(is_float, flatten(self.bound[n])))]
        self.args = tuple(self.bound[name] for name in self.names)
        self.outputs = flatten(self.run(*self.args))
        with torch.enable_grad():
            tracked = flatten(self.run(*(map_tensors(arg, track) for arg in self.args)))
        self.differentiable = [i for i, out in enumerate(tracked) if out is not None and out.requires_grad]
        values = [self.bound[argument.name] for argument in op.target._schema.arguments]
        self.call = Call(op.target, values, {}, self.outputs, set(self.names))
        generator = torch.Generator().manual_seed(1)
        self.cts = [
            torch.randn(out.shape, generator=generator, dtype=torch.float64) if i in self.differentiable else None
            for i, out in enumerate(self.outputs)
        ]

    def run(self, *args: Any) -> Any:
        bound = self.bound | dict(zip(self.names, args, strict=True))
        bound |= {name: bound[name].clone() for name in schema_of(self.op.target).mutated if bound[name] is not None}
        arguments = self.op.target._schema.arguments
        return self.op.target(
            *(bound[argument.name] for argument in arguments if not argument.kwarg_only),
            **{argument.name: bound[argument.name] for argument in arguments if argument.kwarg_only},
        )

    def function(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """The operation's differentiable outputs."""
        outputs = flatten(self.run(*args))
        return tuple(outputs[index] for index in self.differentiable)

    def check(self) -> str:
        """The message of `ut.check_gradients`, empty if it finds no fault."""
        try:
            ut.check_gradients(self.function, self.args, num_directions=2)
        except ut.GradientCheckFailed as error:
            return str(error)
        return ""

    def cotangents(self, vjp: Vjp) -> dict[str, Any]:
        return vjp.cotangents(self.call, self.cts)

    @cached_property
    def exact(self) -> dict[str, Any]:
        return self.cotangents(self.op.exact_vjp)

    @cached_property
    def composed(self) -> dict[str, Any]:
        return self.cotangents(self.op.composed_vjp)

    def gradients(self, found: dict[str, Any]) -> list[torch.Tensor]:
        """The cotangents that a rule made, summed to the shapes of the leaves."""
        gradients = []
        for name in self.names:
            tensors = flatten(self.bound[name])
            cts = flatten(found.get(name)) if found.get(name) is not None else [None] * len(tensors)
            for tensor, ct in zip(tensors, cts, strict=True):
                if is_float(tensor):
                    gradients.append(torch.zeros_like(tensor) if ct is None else ct.sum_to_size(tensor.shape))
        return gradients

    def differ(self, found: dict[str, Any], right: dict[str, Any]) -> bool:
        """Whether a mistake changed any gradient by more than rounding, which is well below 64 ulp."""
        changed, gradients = self.gradients(found), self.gradients(right)
        sizes = [
            float(tensor.abs().max()) for tensor in (*gradients, *self.cts) if tensor is not None and tensor.numel()
        ]
        return any(bool(((c - g).abs() > 64 * EPS * max(sizes)).any()) for c, g in zip(changed, gradients, strict=True))


def track(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).requires_grad_() if is_float(tensor) else tensor


@dataclass(frozen=True)
class Mutant:
    sample: Sample
    mistake: str
    vjp: Vjp

    def __str__(self) -> str:
        return f"{self.sample.op.target}: {self.mistake}"

    def check(self) -> str:
        """What the check says about the wrong rule."""
        op = self.sample.op
        with patch.dict(registry._REGISTRY, {op.target: replace(op, vjps=(self.vjp,))}):
            return self.sample.check()


def samples_of(op: Op) -> list[Sample]:
    """The smooth samples; for random operations, whose draws are no function of the arguments, all samples.

    The check draws its cotangents from a generator with seed 0. With the same seed a sample could equal them, and an
    antisymmetric product of the two would be zero.
    """
    cases = op.samples(Sampler(seed=1))
    smooth = [case for case in cases if case.is_smooth]
    return [Sample(op, case) for case in smooth or (cases if schema_of(op.target).is_random else [])]


def mutants_of(op: Op) -> Iterator[Mutant]:
    """Each mistake on the first sample where it shows. A mistake that never shows makes no mutant."""
    samples, exact, composed = samples_of(op), op.exact_vjp, op.composed_vjp
    changes = {
        f"{mistake} ({name})": partial(change_argument, name, change)
        for name in exact.arguments
        for mistake, change in MISTAKES.items()
    }
    changes |= {f"swapped arguments ({a}, {b})": partial(swap, a, b) for a, b in combinations(exact.arguments, 2)}
    for mistake, change in changes.items():
        for sample in samples:
            if sample.differ(change(sample.call, sample.exact), sample.exact):
                yield Mutant(sample, mistake, with_mistake(exact, change))
                break
    for index in range(MAX_ADDENDS if composed else 0):
        mutant = without_addend(composed, index)
        for sample in samples:
            if sample.differ(sample.cotangents(mutant), sample.composed):
                yield Mutant(sample, f"missing term: addend ({index})", mutant)
                break


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    return [mutant for op in WITH_RULES for mutant in mutants_of(op)]


@pytest.fixture(scope="module", params=[5, pytest.param(1, marks=pytest.mark.exhaustive)], ids=lambda every: f"{every}")
def some(request: pytest.FixtureRequest, mutants: list[Mutant]) -> list[Mutant]:
    """Each mutant whose number is a multiple of the parameter."""
    return mutants[:: request.param]


@pytest.fixture(scope="module")
def false_alarms(some: list[Mutant]) -> dict[Sample, str]:
    """The samples on which the check rejects the right rule."""
    alarms = {}
    for sample in dict.fromkeys(mutant.sample for mutant in some):
        try:
            complaint = sample.check()
        except Exception as error:
            complaint = f"{type(error).__name__}: {error}"
        if complaint:
            alarms[sample] = complaint
    return alarms


@pytest.fixture(scope="module")
def outcomes(some: list[Mutant], false_alarms: dict[Sample, str]) -> list[tuple[Mutant, str]]:
    """What the check says about each mutant, empty if it finds no fault."""
    return [(mutant, mutant.check()) for mutant in some if mutant.sample not in false_alarms]


def test_every_rule_and_every_mistake_has_mutants(mutants: list[Mutant]) -> None:
    covered = {mutant.sample.op.target for mutant in mutants}
    assert [str(op.target) for op in WITH_RULES if op.target not in covered] == []
    counts = Counter(mutant.mistake.partition(" (")[0] for mutant in mutants)
    assert counts.keys() == MISTAKES.keys() | {"swapped arguments", "missing term: addend"}
    assert min(counts.values()) >= 20, counts


def test_right_rules_pass(false_alarms: dict[Sample, str]) -> None:
    report = "\n".join(f"{sample.op.target}: {complaint}" for sample, complaint in false_alarms.items())
    assert not report, report


def test_at_least_95_percent_of_the_mistakes_are_found(outcomes: list[tuple[Mutant, str]]) -> None:
    survivors = [str(mutant) for mutant, message in outcomes if not message]
    report = "\n".join([f"{len(survivors)} of {len(outcomes)} mistakes were not found", *survivors])
    print(report)
    assert len(survivors) <= 0.05 * len(outcomes), report


def test_found_mistakes_are_named(outcomes: list[tuple[Mutant, str]]) -> None:
    unnamed = []
    for mutant, message in outcomes:
        name = operation_of(mutant.sample.op.target).name.partition(".")[0]
        if message and f"the derivative of {name}" not in message:
            unnamed.append(f"{mutant}: {message}")
    assert not unnamed, "\n".join(unnamed)
