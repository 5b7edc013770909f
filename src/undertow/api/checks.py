"""Gradient checks: the derived backward pass against the definition of the derivative.

First the whole function is checked along random directions: central differences of the user's function, run eagerly,
against the inner product of gradient and direction. Where they disagree, each recorded operation is checked separately
on the values it had, and the wrong ones are named.

The tolerance is derived per direction. A central difference D(h) has a truncation error of about |D(2h) - D(h)| / 3
and a rounding error of 8 eps |f| / h (the series for special functions such as digamma are exact to some units in the
last place, not to one). The analytic side adds eps |g| |v|. A difference of more than eight times their sum is a
disagreement. The factor leaves room for the constants that these orders of magnitude hide.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from undertow.api.calls import check_argnums, check_arguments
from undertow.api.functional import Argnums
from undertow.autodiff.backward import differentiate
from undertow.errors import CallError, GradientCheckFailed
from undertow.ir import Input, InputKind, Node, Program, Value
from undertow.ir.structure import fill_slots, replace_tensors, tensors_in
from undertow.ops.interpret import generators_of, run_node
from undertow.ops.own import bind
from undertow.record.capture import capture
from undertow.record.lazy_modules import refuse_lazy
from undertow.report.columns import wrap
from undertow.runtime.code import compile_program
from undertow.runtime.direct import DirectRun

SAFETY = 8.0
ROUNDINGS = 8.0
TINY = torch.finfo(torch.float64).tiny
EPSILON = torch.finfo(torch.float64).eps
# Balances truncation against rounding for a function of order one (Press et al., Numerical Recipes, section 5.7).
STEP = EPSILON ** (1 / 3)


@dataclass(frozen=True)
class Disagreement:
    """One comparison in which the analytic and the numerical derivative differ."""

    what: str
    where: str
    analytic: float
    numerical: float
    tolerance: float

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return (
            f"{self.what}{place}: analytic {self.analytic:.9g}, numerical {self.numerical:.9g} +- {self.tolerance:.2g}"
        )


@dataclass(frozen=True)
class GradientCheck:
    """The outcome of a gradient check."""

    num_comparisons: int
    num_operations: int
    worst_ratio: float  # the largest disagreement, in units of its tolerance
    disagreements: tuple[Disagreement, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether every comparison agreed."""
        return not self.disagreements

    def to_dict(self) -> dict[str, Any]:
        """The outcome as plain data."""
        return {
            "ok": self.ok,
            "num_comparisons": self.num_comparisons,
            "num_operations": self.num_operations,
            "worst_ratio": self.worst_ratio,
            "disagreements": [vars(item) for item in self.disagreements],
        }

    def __str__(self) -> str:
        head = (
            f"{self.num_comparisons} comparisons over {self.num_operations} operations, "
            f"worst {self.worst_ratio:.3g} of its tolerance"
        )
        if self.ok:
            return wrap(f"gradients agree: {head}")
        return "\n".join([wrap(f"gradients disagree: {head}"), *(wrap(str(item), "  ") for item in self.disagreements)])


def check_gradients(
    model_or_function: torch.nn.Module | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    num_directions: int = 8,
    element_by_element: bool = False,
    seed: int = 0,
) -> GradientCheck:
    """Compare the derived gradients with finite differences in float64; raises GradientCheckFailed, naming operations.

    A model is copied and converted; neither it nor the arguments are changed.
    """
    check_arguments(args, kwargs)
    subject = _Subject(model_or_function, args, kwargs or {}, seed)
    directions = subject.unit_directions() if element_by_element else subject.random_directions(num_directions)
    found, worst, count = [], 0.0, 0
    for name, direction in directions:
        count += 1
        analytic = sum(float((subject.gradients[path] * part).sum()) for path, part in direction.items())
        size = sum(float((subject.gradients[path].abs() * part.abs()).sum()) for path, part in direction.items())
        numerical, tolerance = central_difference(partial(subject.evaluate, direction), size)
        if analytic != numerical:
            worst = max(worst, abs(analytic - numerical) / max(tolerance, TINY))
        # An infinite tolerance: the function is not finite near the arguments, and nothing was compared.
        if math.isinf(tolerance) or not abs(analytic - numerical) <= tolerance:
            found.append(Disagreement(name, "", analytic, numerical, tolerance))
    if found:
        found = subject.locate() + found
    result = GradientCheck(count, subject.num_operations, worst, tuple(found))
    if not result.ok:
        raise GradientCheckFailed(str(result), result)
    return result


def central_difference(evaluate: Callable[[float], float], size: float = 0.0) -> tuple[float, float]:
    """The derivative of `evaluate` at 0 and its tolerance; the step is halved until the estimate settles."""
    step, best = STEP, (0.0, float("inf"))
    for _ in range(6):
        near_up, near_down, far_up, far_down = (evaluate(h) for h in (step, -step, 2 * step, -2 * step))
        near, far = (near_up - near_down) / (2 * step), (far_up - far_down) / (4 * step)
        rounding = ROUNDINGS * EPSILON * max(abs(near_up), abs(near_down), abs(far_up), abs(far_down)) / step
        tolerance = SAFETY * (abs(far - near) / 3 + rounding + EPSILON * size)
        if tolerance < best[1]:
            best = (near, tolerance)
        step /= 8
        if tolerance <= 1e-6 * max(abs(near), size):
            break
    return best


def numerical_gradient(
    function: Callable[..., torch.Tensor], args: tuple[Any, ...], argnums: Argnums = 0, *, is_central: bool = True
) -> Any:
    """The derivative of a scalar function by its definition, element by element.

    2d evaluations for d elements when central, d + 1 otherwise. The result has the structure of `ut.grad`'s.
    """
    check_arguments(args, None)
    positions = check_argnums(argnums, args)
    step = STEP if is_central else EPSILON**0.5
    results = []
    with torch.no_grad():
        start = _scalar(function(*args))
        for position in positions:
            found = []
            for _, tensor in tensors_in(args[position]):
                slope = torch.empty(tensor.numel(), dtype=torch.float64)
                for index in range(tensor.numel()):
                    ahead = _evaluate_moved(function, args, tensor, index, step)
                    behind = _evaluate_moved(function, args, tensor, index, -step) if is_central else start
                    slope[index] = (ahead - behind) / (2 * step if is_central else step)
                found.append(slope.reshape(tensor.shape).to(tensor.dtype))
            results.append(replace_tensors(args[position], _take_from(found)))
    return results[0] if isinstance(argnums, int) else tuple(results)


def _take_from(items: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    numbers = iter(items)
    return lambda tensor: next(numbers)


def _evaluate_moved(function: Any, args: Any, moved: torch.Tensor, index: int, step: float) -> float:
    if moved.dtype != torch.float64:
        raise CallError(f"numerical_gradient needs float64 arguments, got {moved.dtype}: convert with .double()")
    other = moved.clone(memory_format=torch.contiguous_format)
    other.view(-1)[index] += step
    return _scalar(function(*replace_tensors(args, lambda tensor: other if tensor is moved else tensor)))


def _scalar(result: Any) -> float:
    if isinstance(result, torch.Tensor) and result.numel() != 1:
        raise CallError(f"the function must return a scalar, got a tensor of shape {tuple(result.shape)}; sum it")
    return float(result)


class _Subject:
    """A model or function in float64, its recorded gradient, and its eager evaluation along a direction."""

    def __init__(self, subject: Any, args: Any, kwargs: Any, seed: int) -> None:
        # Not the user's own seed: directions equal to the inputs would hide mistakes in antisymmetric derivatives.
        self.generator = torch.Generator().manual_seed(0x5EED0000 + seed)
        self.args, self.kwargs = replace_tensors((args, kwargs), _to_float64)
        if isinstance(subject, torch.nn.Module):
            refuse_lazy(dict(subject.named_modules()))
        self.module = copy.deepcopy(subject).double() if isinstance(subject, torch.nn.Module) else None
        self.modules = dict(self.module.named_modules()) if self.module is not None else {}
        self.function = self.module.forward if self.module is not None else subject
        self.captured = capture(self.function, self.args, self.kwargs, self.module)
        program = self.captured.program
        self.num_operations = len(program.nodes)
        self.tensors = [tensor for _, tensor in tensors_in((self.args, self.kwargs))]
        self.bound = [self._bind(item) for item in program.inputs]
        self.wanted = [
            item
            for item in program.inputs
            if item.value in program.differentiable and item.kind is not InputKind.CONSTANT
        ]
        if not self.wanted:
            raise CallError("there is nothing to check: no parameter or argument in floating point carries a gradient")
        self.generators = [bind(item, self.captured.live) for item in generators_of(program.first_pass)]
        self.states = [generator.get_state() for generator in self.generators]
        self.weights = [self._normal(tensor) for tensor in self._float_outputs(self._evaluate_output({}))]
        self.gradients = self._analytic()

    def evaluate(self, direction: dict[str, torch.Tensor], step: float) -> float:
        """The weighted sum of the outputs with the inputs moved by `step` along `direction`, run eagerly."""
        outputs = self._float_outputs(self._evaluate_output({path: step * part for path, part in direction.items()}))
        return sum(
            float((output.detach() * weight).sum()) for output, weight in zip(outputs, self.weights, strict=True)
        )

    def random_directions(self, count: int) -> list[tuple[str, dict[str, torch.Tensor]]]:
        """Directions over all inputs together, of unit length."""
        directions = []
        for index in range(count):
            parts = {item.path: self._normal(self._bind(item)) for item in self.wanted}
            length = sum(float(part.square().sum()) for part in parts.values()) ** 0.5
            directions.append((f"direction {index}", {path: part / length for path, part in parts.items()}))
        return directions

    def unit_directions(self) -> list[tuple[str, dict[str, torch.Tensor]]]:
        """One direction per element of every input."""
        directions = []
        for item in self.wanted:
            tensor = self._bind(item)
            for index in range(tensor.numel()):
                unit = torch.zeros(tensor.numel(), dtype=torch.float64)
                unit[index] = 1
                directions.append((f"{item.path}[{index}]", {item.path: unit.reshape(tensor.shape)}))
        return directions

    def locate(self) -> list[Disagreement]:
        """The operations whose own derivative is wrong, on the values they have in this program."""
        program = self.captured.program
        environment: dict[Value, Any] = dict(zip((item.value for item in program.inputs), self.bound, strict=True))
        found: dict[str, Disagreement] = {}
        self._restore_generators()
        with torch.no_grad():
            for node in program.first_pass:
                states = [generator.get_state() for generator in self.generators] if node.operation.is_random else []
                run_node(node, environment, self.captured.live)
                inputs = [value for value in dict.fromkeys(node.inputs) if value in program.differentiable]
                if (
                    inputs
                    and not node.operation.is_guard
                    and any(value in program.differentiable for value in node.outputs)
                ):
                    found_here = self._check_node(node, inputs, environment, states)
                    if found_here is not None:
                        found.setdefault(str(found_here.what) + found_here.where, found_here)
        self._restore_generators()
        return list(found.values())

    def _check_node(self, node: Node, inputs: list[Value], environment: dict[Value, Any], states: Any) -> Any:
        program = Program(
            inputs=tuple(Input(value, InputKind.ARGUMENT, value.name) for value in dict.fromkeys(node.inputs)),
            nodes=(node,),
            outputs=tuple(v for v in node.outputs if v is not None and v in self.captured.program.differentiable),
            differentiable=frozenset(
                value for value in (*node.inputs, *node.outputs) if value in self.captured.program.differentiable
            ),
            boundary=1,
        )
        given = [environment[item.value] for item in program.inputs]
        joint = differentiate(program, program.outputs, inputs)
        self._set_generators(states)
        run = DirectRun(joint, compile_program(joint, self.captured.live), given)
        weights = [self._normal(output) for output in run.outputs]
        gradients = run.backward(weights[: len(joint.cotangents)])
        moved = {value: self._normal(environment[value]) for value in inputs}
        analytic = sum(float((gradients[value] * part).sum()) for value, part in moved.items() if value in gradients)
        size = sum(float((gradients[value] * part).abs().sum()) for value, part in moved.items() if value in gradients)

        def evaluate(step: float) -> float:
            local = dict(environment)
            local.update({value: environment[value] + step * part for value, part in moved.items()})
            self._set_generators(states)
            run_node(node, local, self.captured.live)
            outputs = [local[value] for value in program.outputs]
            return sum(float((output * weight).sum()) for output, weight in zip(outputs, weights, strict=True))

        numerical, tolerance = central_difference(evaluate, size)
        if abs(analytic - numerical) <= tolerance:
            return None
        return Disagreement(f"the derivative of {node.name} is wrong", str(node.origin), analytic, numerical, tolerance)

    def _analytic(self) -> dict[str, torch.Tensor]:
        program = self.captured.program
        outputs = [value for value in program.outputs if value in program.differentiable]
        joint = differentiate(program, outputs, [item.value for item in self.wanted])
        self._restore_generators()
        with torch.no_grad():
            pure = replace(joint, updates=())
            run = DirectRun(pure, compile_program(pure, self.captured.live), self.bound)
            result = fill_slots(self.captured.skeleton, run.outputs)
            weight_of = {
                id(output): weight for output, weight in zip(self._float_outputs(result), self.weights, strict=True)
            }
            by_name = dict(zip((value.name for value in program.outputs), run.outputs, strict=True))
            gradients = run.backward([weight_of[id(by_name[item.path])] for item in joint.cotangents])
        self._restore_generators()
        return {item.path: gradients.get(item.value, torch.zeros_like(self._bind(item))) for item in self.wanted}

    def _evaluate_output(self, moves: dict[str, torch.Tensor]) -> Any:
        self._restore_generators()
        moved = {
            id(self._bind(item)): self._bind(item) + moves[item.path] for item in self.wanted if item.path in moves
        }
        args, kwargs = replace_tensors((self.args, self.kwargs), lambda tensor: moved.get(id(tensor), tensor))
        with torch.no_grad():
            if self.module is None:
                result = self.function(*args, **kwargs)
            else:
                state = {
                    name: moved.get(id(tensor), tensor)
                    for name, tensor in self.module.named_parameters(remove_duplicate=False)
                }
                state |= {name: tensor.clone() for name, tensor in self.module.named_buffers(remove_duplicate=False)}
                result = torch.func.functional_call(self.module, state, args, kwargs)
        self._restore_generators()
        return result

    def _float_outputs(self, result: Any) -> list[torch.Tensor]:
        unique = {id(tensor): tensor for _, tensor in tensors_in(result) if tensor.is_floating_point()}
        return list(unique.values())

    def _bind(self, item: Input) -> torch.Tensor:
        return self.captured.tensor_behind(item, self.tensors, self.modules)

    def _normal(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=self.generator, dtype=torch.float64).to(tensor.device)

    def _restore_generators(self) -> None:
        self._set_generators(self.states)

    def _set_generators(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=False):
            generator.set_state(state)


def _to_float64(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(torch.float64, copy=True).requires_grad_(True)
