"""Every rule of the registry, on every sample, in every formulation.

A rule is compared with `torch.autograd` on the same call (bit for bit where it claims eager's bits), with central
differences, and with itself on FakeTensors. A new record needs no new test.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from exactness import skipping_what_eager_cannot
from operation_samples import OPS, PRECISIONS, map_tensors, rebuild, samples
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from undertow.ir.schema import bind_arguments
from undertow.rules.registry import Call, Case, Op, Vjp, find_op

aten = torch.ops.aten

EPS = torch.finfo(torch.float64).eps
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}

WITH_RULES = [op for op in OPS if op.vjps]
WITHOUT_GRADIENT = [op for op in OPS if not op.vjps]
FORMULATIONS = [pytest.param(op, vjp, id=f"{op.target}-{vjp.name}") for op in WITH_RULES for vjp in op.vjps]


def each(ops: list[Op]) -> list[Any]:
    return [pytest.param(op, id=str(op.target)) for op in ops]


def flatten(value: Any) -> list[torch.Tensor | None]:
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in flatten(item)]
    return [value if isinstance(value, torch.Tensor) else None]


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def move(leaf: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """`leaf + by` with the leaf's strides, unless elements share an address: there they could not differ."""
    leaf = rebuild(leaf.detach(), {})
    return leaf + by if 0 in leaf.stride() else leaf.add_(by)


def invoke(target: OpOverload, bound: dict[str, Any]) -> Any:
    """Call `target` with arguments by name, random draws starting from the same generator state every time."""
    arguments = target._schema.arguments
    args = [bound[argument.name] for argument in arguments if not argument.kwarg_only]
    kwargs = {argument.name: bound[argument.name] for argument in arguments if argument.kwarg_only}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return target(*args, **kwargs)


def write(view: OpOverload) -> Callable[[dict[str, Any]], torch.Tensor]:
    """How eager writes `src` into the part of `self` that `view` shows."""

    def run(bound: dict[str, Any]) -> torch.Tensor:
        base = bound["self"].clone()
        view(base, *(item for name, item in bound.items() if name not in ("self", "src"))).copy_(bound["src"])
        return base

    return run


# In Programs these stand for a write through a view, as in `x[:, 1] = y`, whose cotangents have other strides than the
# functional operations' cotangents. For `as_strided_scatter` torch 2.13 is even wrong: it returns the cotangent of the
# part instead of the rest.
WRITTEN_THROUGH = {
    aten.select_scatter.default: write(aten.select.int),
    aten.slice_scatter.default: write(aten.slice.Tensor),
    aten.diagonal_scatter.default: write(aten.diagonal.default),
    aten.as_strided_scatter.default: write(aten.as_strided.default),
}

# Relative errors of eager's own derivatives in float64, by order. The kernel of hardsigmoid has 1/6 in float32. The
# second derivative of binary cross entropy has e = 1e-12 added to x and to 1 - x, which are above 1/10 in the samples:
# its denominator x^2 (1 - x)^2 is off by 2 e (1/x + 1/(1 - x)) < 40 e.
EAGER_ERROR = {(aten.hardsigmoid.default, 1): 2.0**-24, (aten.binary_cross_entropy.default, 2): 40e-12}

# Eager treats the norm as constant when it differentiates a second time (torch 2.13; finite differences disagree).
WRONG_SECOND_DERIVATIVE = {aten._weight_norm_interface.default}


def signature(target: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


def is_implemented(output: torch.Tensor | None) -> bool:
    return output is None or output.grad_fn is None or not output.grad_fn.name().endswith("NotImplemented")


def run_eager(target: OpOverload, bound: dict[str, Any]) -> list[torch.Tensor | None]:
    """The outputs, with their autograd graph."""
    if target in WRITTEN_THROUGH:
        return flatten(WRITTEN_THROUGH[target](bound))
    with skipping_what_eager_cannot():
        outputs = flatten(invoke(target, bound))
    packet = getattr(aten, target._schema.name.removeprefix("aten::").removesuffix("_functional") + "_", None)
    if all(map(is_implemented, outputs)) or packet is None:
        return outputs
    # Eager knows only the derivative of the in-place operation; a Program has the functional one.
    overloads = [getattr(packet, name) for name in packet.overloads()]
    in_place = next(overload for overload in overloads if signature(overload) == signature(target))
    first = target._schema.arguments[0].name
    return flatten(invoke(in_place, bound | {first: bound[first].clone()}))


class Example:
    """One sample in one precision, run by eager with the arguments `wanted` requiring gradients."""

    def __init__(self, op: Op, case: Case, precision: str, wanted: tuple[str, ...]) -> None:
        self.op, self.wanted = op, wanted
        dtypes = PRECISIONS[precision]
        self.bound = bind_arguments(op.target, case.args, case.kwargs)
        self.bound = {name: map_tensors(item, lambda t: rebuild(t, dtypes)) for name, item in self.bound.items()}
        self.plain = {name: map_tensors(item, torch.Tensor.detach) for name, item in self.bound.items()}
        for name in wanted:
            for tensor in filter(is_float, flatten(self.bound[name])):
                tensor.requires_grad_()
        self.outputs = run_eager(op.target, self.bound)
        self.leaves = [t for name in wanted for t in flatten(self.bound[name]) if is_float(t)]
        self.differentiable = [
            i for i, out in enumerate(self.outputs) if out is not None and out.requires_grad and is_implemented(out)
        ]

    def cotangents(self, layout: str, chosen: tuple[int, ...], seed: int = 1) -> list[torch.Tensor | None]:
        """A cotangent for each chosen output, None for the others."""
        generator = torch.Generator().manual_seed(seed)
        return [
            arrange(output, layout, generator) if index in chosen else None for index, output in enumerate(self.outputs)
        ]

    def expected(self, cts: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Autograd's gradients of the leaves."""
        reached = [(out, ct) for out, ct in zip(self.outputs, cts, strict=True) if ct is not None]
        outs, cts = zip(*reached, strict=True)
        return list(torch.autograd.grad(outs, self.leaves, cts, allow_unused=True, retain_graph=True))

    def found(self, vjp: Vjp, cts: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The rule's gradients of the leaves, summed and cast as autograd's engine does."""
        return self.pick(vjp.cotangents(self.call(), cts))

    def pick(self, by_name: dict[str, Any]) -> list[torch.Tensor | None]:
        """The cotangents of the leaves, taken from the cotangents of the arguments."""
        grads = []
        for name in self.wanted:
            tensors = flatten(self.bound[name])
            parts = flatten(by_name.get(name))
            parts += [None] * (len(tensors) - len(parts))
            grads += [conform(ct, leaf) for ct, leaf in zip(parts, tensors, strict=True) if is_float(leaf)]
        return grads

    def call(self) -> Call:
        arguments = [self.plain[argument.name] for argument in self.op.target._schema.arguments]
        outputs = [None if output is None else output.detach() for output in self.outputs]
        return Call(self.op.target, arguments, {}, outputs, set(self.wanted))


def arrange(like: torch.Tensor, layout: str, generator: torch.Generator) -> torch.Tensor:
    """A random cotangent of the shape and dtype of `like`, in one of several layouts."""
    if layout == "expanded":
        return torch.randn((), generator=generator, dtype=torch.float64).to(like.dtype).expand(like.shape)
    ct = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)
    if layout == "reversed":
        order = tuple(reversed(range(ct.dim())))
        return ct.permute(order).contiguous().permute(order)
    return torch.empty_like(like).copy_(ct).detach()


def conform(ct: torch.Tensor | None, leaf: torch.Tensor) -> torch.Tensor | None:
    """What autograd's engine does to a cotangent before it passes it on: sum the broadcast dims, then cast."""
    if ct is None:
        return None
    if ct.shape != leaf.shape:
        leading = ct.dim() - leaf.dim()
        stretched = [i + leading for i, size in enumerate(leaf.shape) if size == 1 and ct.shape[i + leading] != 1]
        ct = ct.sum([*range(leading), *stretched], keepdim=True).view(leaf.shape)
    return ct if ct.dtype == leaf.dtype else ct.to(leaf.dtype)


def differentiable_arguments(op: Op, case: Case) -> tuple[str, ...]:
    bound = bind_arguments(op.target, case.args, case.kwargs)
    return tuple(name for name in op.exact_vjp.arguments if any(is_float(t) for t in flatten(bound[name])))


def examples(op: Op, precision: str) -> Iterator[tuple[Case, Example]]:
    """Every sample, with all arguments wanted together and each one alone."""
    for case in samples(op):
        names = differentiable_arguments(op, case)
        for wanted in {names: None} | {(name,): None for name in names}:
            yield case, Example(op, case, precision, wanted)


def choices(example: Example) -> list[tuple[int, ...]]:
    """All differentiable outputs together and, if there are several, each one alone."""
    indices = tuple(example.differentiable)
    return list({indices: None} | {(index,): None for index in indices})


def assert_same_bits(found: torch.Tensor | None, expected: torch.Tensor | None, where: Callable[[], str]) -> None:
    if expected is None or found is None:
        assert (found is None) == (expected is None), f"{where()}: {found} instead of {expected}"
        return
    if expected._is_zerotensor():
        assert not found.any(), f"{where()}: not zero"
        return
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where()
    is_nan = expected.isnan()
    bits = [t.masked_fill(is_nan & t.isnan(), 0).contiguous().view(BITS[t.dtype]) for t in (found, expected)]
    assert torch.equal(*bits), (
        f"{where()}: {found} instead of {expected}, strides {found.stride()} and {expected.stride()}"
    )
    strides = [[s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (found, expected)]
    assert found.numel() == 0 or strides[0] == strides[1], f"{where()}: strides {strides[0]} instead of {strides[1]}"


@contextmanager
def skipping_without_kernel(precision: str) -> Iterator[None]:
    """Skip where PyTorch itself has no kernel in bfloat16."""
    try:
        yield
    except RuntimeError as error:
        if precision != "bfloat16" or "BFloat16" not in str(error):
            raise
        pytest.skip(f"eager has no kernel: {error}")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("op", each(WITH_RULES))
def test_first_formulation_has_the_bits_of_eager(op: Op, precision: str) -> None:
    with skipping_without_kernel(precision):
        for (case, example), layout in itertools.product(examples(op, precision), ("like", "expanded", "reversed")):
            assert example.differentiable, f"{case}: eager's output carries no gradient"
            for chosen in choices(example):
                cts = example.cotangents(layout, chosen)

                def where(case=case, example=example, chosen=chosen, layout=layout) -> str:
                    return f"{case}, wanted {example.wanted}, outputs {chosen}, {layout} cotangent"

                for found, expected in zip(example.found(op.exact_vjp, cts), example.expected(cts), strict=True):
                    assert_same_bits(found, expected, where)


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().nan_to_num(0, 0, 0).abs().max()) if tensor.numel() else 0.0


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, rounded: list[torch.Tensor], eager_error: float, where: str
) -> None:
    """Compare up to rounding, whose size is found from the same computations in lower precision.

    Rounding errors are proportional to the unit roundoff. The tolerance is 8 times the larger error seen in `rounded`,
    scaled, because the error of a few elements may be smaller by luck, and 8 covers 3 bits of luck. It also has 8 ulp
    for results that happened to be exact in lower precision.
    """
    unit, rounded_unit = (torch.finfo(t.dtype).eps for t in (expected, rounded[0]))
    errors = [largest(r.double() - expected) for r in rounded]
    tolerance = 8 * max(errors) * unit / rounded_unit
    tolerance += (8 * unit + eager_error) * largest(expected)
    torch.testing.assert_close(
        found, expected, rtol=0, atol=tolerance, equal_nan=True, msg=lambda message: f"{where}: {message}"
    )


@pytest.mark.parametrize(("op", "vjp"), FORMULATIONS)
def test_every_formulation_agrees_with_autograd(op: Op, vjp: Vjp) -> None:
    for (case, exact), (_, rough) in zip(examples(op, "float64"), examples(op, "float32"), strict=True):
        for chosen in choices(exact):
            cts = exact.cotangents("like", chosen)
            low = [None if ct is None else ct.to(out.dtype) for ct, out in zip(cts, rough.outputs, strict=True)]
            grads = exact.found(vjp, cts), exact.expected(cts), rough.found(vjp, low), rough.expected(low)
            for found, expected, *rounded in zip(*grads, strict=True):
                if expected is None:
                    assert found is None or not found.any(), f"{case}: {found} where autograd has no gradient"
                else:
                    assert_close(found, expected, rounded, EAGER_ERROR.get((op.target, 1), 0), str(case))


@pytest.mark.parametrize(("op", "vjp"), FORMULATIONS)
def test_every_formulation_agrees_with_finite_differences(op: Op, vjp: Vjp) -> None:
    """Central differences D(h) and D(h/2) along a random direction, extrapolated to R = (4 D(h/2) - D(h)) / 3.

    Tolerance: |D(h) - D(h/2)| bounds the truncation error of R, which is of higher order. Rounding is added: an output
    is off by a few ulp per term that was summed into it, an input by half an ulp, both divided by h/2.
    """
    h = 2.0**-10
    for case in filter(lambda case: case.is_smooth, samples(op)):
        example = Example(op, case, "float64", differentiable_arguments(op, case))
        cts = example.cotangents("like", tuple(example.differentiable))
        grads = example.found(vjp, cts)
        generator = torch.Generator().manual_seed(2)
        directions = [torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype) * 2 - 1 for leaf in example.leaves]

        def value(step: float, example=example, cts=cts, directions=directions) -> float:
            moved = iter([move(leaf, step * d) for leaf, d in zip(example.leaves, directions, strict=True)])
            bound = dict(example.plain)
            for name in example.wanted:
                bound[name] = map_tensors(bound[name], lambda t: next(moved) if is_float(t) else t)
            outputs = flatten(invoke(op.target, bound))
            return sum(float((ct * out).sum()) for ct, out in zip(cts, outputs, strict=True) if ct is not None)

        coarse, fine = ((value(step) - value(-step)) / (2 * step) for step in (h, h / 2))
        slope = sum(float((g * d).sum()) for g, d in zip(grads, directions, strict=True) if g is not None)
        num_terms = 4 + max(leaf.numel() for leaf in example.leaves)
        sizes = [
            float((ct * out).detach().abs().sum())
            for ct, out in zip(cts, example.outputs, strict=True)
            if ct is not None
        ]
        sizes += [
            float((g * x).detach().abs().sum()) for g, x in zip(grads, example.leaves, strict=True) if g is not None
        ]
        tolerance = abs(coarse - fine) + num_terms * EPS * sum(sizes) / (h / 2)
        tolerance += EAGER_ERROR.get((op.target, 1), 0) * sum(sizes)
        assert abs(slope - (4 * fine - coarse) / 3) <= tolerance, f"{case}: {slope} instead of {fine}, +- {tolerance}"


def second_order(example: Example, vjp: Vjp | None, cts: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """The derivatives of the gradients along a random direction, by arguments and cotangents.

    PyTorch differentiates either the formulas of `vjp` or, without one, its own backward pass.
    """
    pairs = [(out, ct.requires_grad_()) for out, ct in zip(example.outputs, cts, strict=True) if ct is not None]
    if vjp is None:
        outs, present = zip(*pairs, strict=True)
        grads = torch.autograd.grad(outs, example.leaves, present, create_graph=True, allow_unused=True)
    else:
        arguments = [example.bound[argument.name] for argument in example.op.target._schema.arguments]
        call = Call(example.op.target, arguments, {}, example.outputs, set(example.wanted))
        grads = example.pick(vjp.cotangents(call, cts))
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in example.leaves]
    moving = [(g, d.to(g.dtype)) for g, d in zip(grads, directions, strict=True) if g is not None and g.requires_grad]
    variables = [*example.leaves, *(ct for _, ct in pairs)]
    if not moving:
        return [torch.zeros_like(variable) for variable in variables]
    outs, weights = zip(*moving, strict=True)
    return list(
        torch.autograd.grad(outs, variables, weights, allow_unused=True, materialize_grads=True, retain_graph=True)
    )


@pytest.mark.parametrize("op", each(WITH_RULES))
def test_second_derivative_of_the_composed_form_agrees_with_autograd(op: Op) -> None:
    if op.target in WRITTEN_THROUGH:
        pytest.skip("PyTorch cannot differentiate the functional form of a write through a view twice")
    if op.target in WRONG_SECOND_DERIVATIVE:
        pytest.skip("PyTorch's second derivative is wrong")
    for case in filter(lambda case: case.is_smooth, samples(op)):
        names = differentiable_arguments(op, case)
        exact, rough = (Example(op, case, precision, names) for precision in ("float64", "float32"))
        runs = [(example, example.cotangents("like", tuple(example.differentiable))) for example in (exact, rough)]
        try:
            expected = [second_order(example, None, cts) for example, cts in runs]
        except RuntimeError as error:
            pytest.skip(f"PyTorch has no second derivative: {error}")
        found = [second_order(example, op.composed_vjp, cts) for example, cts in runs]
        for exactly, *others in zip(found[0], expected[0], found[1], expected[1], strict=True):
            assert_close(exactly, others[0], others[1:], EAGER_ERROR.get((op.target, 2), 0), str(case))


@pytest.mark.parametrize(("op", "vjp"), FORMULATIONS)
def test_formulas_run_without_data(op: Op, vjp: Vjp) -> None:
    """On FakeTensors a formula gives the shapes, strides and dtypes that it gives on tensors."""
    for _, example in examples(op, "float32"):
        cts = example.cotangents("like", tuple(example.differentiable))
        call = example.call()
        by_name = vjp.cotangents(call, cts)
        real = [t for name in example.wanted for t in flatten(by_name.get(name))]
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            fake = lambda t: mode.from_tensor(t, static_shapes=True)  # noqa: E731
            arguments = {name: map_tensors(item, fake) for name, item in example.plain.items()}
            outputs = map_tensors(call.outs, fake)
            by_name = vjp.cotangents(
                Call(op.target, [], arguments, outputs, set(example.wanted)), map_tensors(cts, fake)
            )
            fakes = [t for name in example.wanted for t in flatten(by_name.get(name))]
        for found, expected in zip(fakes, real, strict=True):
            assert (found is None) == (expected is None)
            if found is not None and all(isinstance(size, int) for size in found.shape):
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert expected.numel() == 0 or found.stride() == expected.stride()


class Operations(TorchDispatchMode):
    """Collects the operations run under it that a gradient could flow through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[OpOverload] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(map(is_float, flatten(args))) and any(map(is_float, flatten(result))):
            self.seen.add(func)
        return result


@pytest.mark.parametrize("op", each(WITH_RULES))
def test_composed_form_can_be_differentiated_again(op: Op) -> None:
    assert op.composed_vjp is not None, "no composed form"
    for case, example in examples(op, "float64"):
        cts, call = example.cotangents("like", tuple(example.differentiable)), example.call()
        with Operations() as operations:
            op.composed_vjp.cotangents(call, cts)
        for target in operations.seen:
            record = find_op(target)
            assert record is not None, f"{case}: {target} has no record"
            assert not record.vjps or record.composed_vjp is not None, f"{case}: {target} has no composed form"


@pytest.mark.parametrize("op", each(OPS))
def test_every_record_has_samples_that_run(op: Op) -> None:
    assert samples(op)
    if op.vjps:
        reached = {name for case in samples(op) for name in differentiable_arguments(op, case)}
        assert reached == set(op.exact_vjp.arguments), "an argument with a formula that no sample differentiates"
        assert all(set(vjp.arguments) == set(op.exact_vjp.arguments) for vjp in op.vjps)


@pytest.mark.parametrize("op", each(OPS))
def test_no_argument_that_eager_differentiates_is_missing(op: Op) -> None:
    covered = op.exact_vjp.arguments if op.vjps else ()
    for case in samples(op):
        bound = bind_arguments(op.target, case.args, case.kwargs)
        for name in bound:
            if name in covered or not any(map(is_float, flatten(bound[name]))):
                continue
            try:
                example = Example(op, case, "float64", (name,))
            except RuntimeError as error:
                assert re.search("is not differentiable with respect to|is not implemented", str(error)), error
                continue
            assert not example.differentiable, f"{case}: eager differentiates with respect to {name}"
