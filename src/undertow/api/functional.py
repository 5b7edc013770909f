"""Derivatives of tensor functions: grad, value_and_grad, vjp, hvp, hessian.

As in JAX, a function's arguments may be nested tuples, lists and dicts of tensors. `argnums` says which of them to
differentiate by, and the result has their structure. A function is recorded at every call, because what its closure
holds may have changed; for gradients per example it is first looked whether it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from undertow.api.calls import check_argnums, check_arguments
from undertow.api.per_example import ExampleBatch, one_line_of_code
from undertow.autodiff.backward import backward_as_forward, differentiate
from undertow.calls.model_state import settings_key
from undertow.calls.reachable import reach
from undertow.calls.runner import sharing
from undertow.errors import CallError
from undertow.ir import InputKind, Program, Value
from undertow.ir.structure import Slot, fill_slots, leaves_in, list_tensors, replace_tensors, structure_key, tensors_in
from undertow.record.capture import Captured, capture
from undertow.record.traced_tensor import TracedTensor
from undertow.runtime.code import compile_program
from undertow.runtime.direct import DirectRun

Argnums = int | Sequence[int]
Parameters = ParamSpec("Parameters")
Output = TypeVar("Output")
Arguments = TypeVar("Arguments", bound=tuple[Any, ...])


def value_and_grad(
    function: Callable[Parameters, torch.Tensor], argnums: Argnums = 0, *, per_example: bool = False
) -> Callable[Parameters, tuple[torch.Tensor, Any]]:
    """A function that returns `function`'s value, a scalar, and its derivative by the arguments at `argnums`.

    With `per_example`, `function` is one of a single example. The arguments at `argnums` are shared by all examples,
    every tensor in the other arguments holds one example per index of its first dimension, and so do the results:
    `torch.func.vmap` of the derivative, with the same numbers. What the function closes over is shared.
    """

    kept: list[_PerExample] = []

    def differentiated(*args: Parameters.args, **kwargs: Parameters.kwargs) -> tuple[torch.Tensor, Any]:
        if per_example:
            return _value_and_grad_per_example(function, args, kwargs, argnums, kept)
        recorded = _Recorded(function, args, kwargs, argnums)
        output = recorded.scalar_output()
        run, _ = recorded.run([output])
        gradients = run.backward([torch.ones_like(run.outputs[0])])
        return run.outputs[0], recorded.arrange(gradients)

    return differentiated


def grad(
    function: Callable[Parameters, torch.Tensor], argnums: Argnums = 0, *, per_example: bool = False
) -> Callable[Parameters, Any]:
    """A function that returns the derivative of `function`, a scalar, by the arguments at `argnums`.

    With `per_example`, one derivative for every example of a batch, as in `value_and_grad`.
    """

    with_value = value_and_grad(function, argnums, per_example=per_example)

    def differentiated(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
        return with_value(*args, **kwargs)[1]

    return differentiated


def vjp(function: Callable[..., Output], *args: Any) -> tuple[Output, Callable[[Output], tuple[Any, ...]]]:
    """`function(*args)`, and a function that maps a cotangent of it to cotangents of all arguments."""
    recorded = _Recorded(function, args, {}, tuple(range(len(args))))
    outputs = recorded.captured.program.outputs
    run, places = recorded.run(outputs)
    value = fill_slots(recorded.captured.skeleton, run.outputs)
    slots = [slot.index for _, slot in leaves_in(recorded.captured.skeleton, Slot)]

    def pull_back(cotangent: Output) -> tuple[Any, ...]:
        cts = [tensor for _, tensor in tensors_in(cotangent)]
        expected = [tensor for _, tensor in tensors_in(value)]
        if [ct.shape for ct in cts] != [tensor.shape for tensor in expected]:
            raise CallError(
                f"the cotangent must have the shapes of the output {[tuple(tensor.shape) for tensor in expected]}, "
                f"got {[tuple(ct.shape) for ct in cts]}"
            )
        sums = _sum_by(slots, cts)
        return recorded.arrange(run.backward([sums[place] for place in places]))

    return value, pull_back


def hvp(function: Callable[..., torch.Tensor], args: Arguments, vectors: Arguments) -> Arguments:
    """The Hessian of `function`, a scalar, by all of `args`, times `vectors`."""
    check_arguments(args, None)
    second = _SecondOrder(function, args, tuple(range(len(args))))
    given = [tensor for _, tensor in tensors_in(vectors)]
    if [tensor.shape for tensor in given] != [tensor.shape for tensor in second.recorded.leaves]:
        raise CallError("vectors must have the structure and shapes of args")
    return second.recorded.arrange(second.product(given))


def hessian(function: Callable[..., torch.Tensor], argnums: Argnums = 0) -> Callable[..., Any]:
    """A function that returns all second derivatives of `function`, a scalar, by the arguments at `argnums`.

    The result has the structure of the arguments twice, as in JAX: for one tensor of shape s, a tensor of shape s + s.
    Each row costs one run of the twice-differentiated backward pass.
    """

    def differentiated(*args: Any) -> Any:
        second = _SecondOrder(function, args, argnums)
        leaves = second.recorded.leaves
        rows = []
        for index, leaf in enumerate(leaves):
            blocks = [
                torch.zeros(leaf.numel(), *other.shape, dtype=other.dtype, device=other.device) for other in leaves
            ]
            for element in range(leaf.numel()):
                vectors = [torch.zeros_like(other) for other in leaves]
                vectors[index].view(-1)[element] = 1
                columns = second.recorded.in_order(second.product(vectors))
                for block, column in zip(blocks, columns, strict=True):
                    block[element] = column
            rows.append([block.reshape(leaf.shape + other.shape) for block, other in zip(blocks, leaves, strict=True)])
        return second.recorded.arrange_tensors([second.recorded.arrange_tensors(row) for row in rows])

    return differentiated


def _value_and_grad_per_example(
    function: Callable[..., torch.Tensor], args: Any, kwargs: Any, argnums: Argnums, kept: list[_PerExample]
) -> tuple[torch.Tensor, Any]:
    """`kept` holds the recording of the last call, which this one may use."""
    batch = ExampleBatch(args, kwargs, check_argnums(argnums, args))
    example = batch.first()
    reached = reach(function)
    key = (
        None
        if reached is None
        else (reached[0], structure_key(example), sharing(list_tensors(*example)), settings_key())
    )
    if key is None or not kept or kept[0].key != key:
        kept[:] = [_PerExample(function, example, argnums, key, [] if reached is None else reached[1])]
    return kept[0].run(batch, args)


class _PerExample:
    """The function of one example, recorded and differentiated, ready to run for all. It holds no arguments.

    `held` are the objects that `key` was made from.
    """

    def __init__(
        self, function: Callable[..., Any], example: tuple[Any, Any], argnums: Argnums, key: Any, held: list[Any]
    ) -> None:
        self.key, self._held, self._argnums = key, held, argnums
        self._recorded = recorded = _Recorded(function, *example, argnums)
        self._output = recorded.scalar_output()
        joint = recorded.differentiate([self._output], is_composed=False)
        self._gradients = {item.input: item.value for item in joint.gradients if item.value is not None}
        self._wanted = list(dict.fromkeys((self._output, *self._gradients.values())))
        self._program = one_line_of_code(backward_as_forward(joint, self._wanted), self._wanted)
        self._code = compile_program(self._program, recorded.captured.live)
        recorded.forget_arguments()

    def run(self, batch: ExampleBatch, args: tuple[Any, ...]) -> tuple[torch.Tensor, Any]:
        """The value and the gradients of every example."""
        recorded = self._recorded

        def call(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            inputs = [
                _ones(item.value)
                if item.kind is InputKind.COTANGENT
                else recorded.captured.tensor_behind(item, tensors, {})
                for item in self._program.inputs
            ]
            return tuple(DirectRun(self._program, self._code, inputs).outputs)

        found = dict(zip(self._wanted, batch.run(call), strict=True))
        leaves = [tensor for place in check_argnums(self._argnums, args) for _, tensor in tensors_in(args[place])]
        arranged = [
            leaf.new_zeros((batch.num_examples, *leaf.shape))
            if value is None or value not in self._gradients
            else found[self._gradients[value]]
            for leaf, value in zip(leaves, recorded.wanted, strict=True)
        ]
        return found[self._output], recorded.arrange_tensors(arranged)


class _Recorded:
    """A function recorded on its arguments, with the leaves to differentiate by."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, argnums: Argnums) -> None:
        self.args, self.argnums = args, argnums
        positions = check_argnums(argnums, args)
        self.is_nested = any(isinstance(tensor, TracedTensor) for _, tensor in tensors_in((args, kwargs)))
        named = [(position, path, tensor) for position in positions for path, tensor in tensors_in(args[position])]
        for position, path, tensor in named:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise CallError(f"argument {position}{path} is {tensor.dtype}; a derivative needs floating point")
        self.leaves = [tensor for _, _, tensor in named]
        fresh_args = tuple(
            replace_tensors(arg, partial(_fresh, is_wanted=index in positions)) for index, arg in enumerate(args)
        )
        fresh_kwargs = replace_tensors(kwargs, partial(_fresh, is_wanted=False))
        self.tensors = [tensor for _, tensor in tensors_in((fresh_args, fresh_kwargs))]
        with torch.enable_grad():
            self.captured: Captured = capture(function, fresh_args, fresh_kwargs)
        by_place = {place: value for value, place in self.captured.arguments.items()}
        counts = [sum(1 for _ in tensors_in(arg)) for arg in args]
        alive = {item.value for item in self.captured.program.inputs}
        places = [sum(counts[:position]) + offset for position in positions for offset in range(counts[position])]
        self.wanted: list[Value | None] = [by_place[place] if by_place[place] in alive else None for place in places]
        self._skeletons = [self._skeleton(position, positions) for position in positions]

    def forget_arguments(self) -> None:
        """Keep no tensor that was given: what was recorded is kept, and runs on other ones."""
        self.args, self.leaves, self.tensors = (), [], []

    def scalar_output(self) -> Value:
        """The one output, which must be a scalar."""
        outputs = self.captured.program.outputs
        if (
            len(outputs) != 1
            or not isinstance(self.captured.skeleton, Slot)
            or outputs[0].tensor_type.num_elements != 1
        ):
            shapes = ", ".join(str(value.type) for value in outputs) or "no tensor"
            raise CallError(f"the function must return one scalar tensor, got {shapes}; for other outputs use ut.vjp")
        return outputs[0]

    def run(self, outputs: Sequence[Value]) -> tuple[DirectRun, list[int]]:
        """Run forward; also which of `outputs` take a cotangent."""
        joint = self.differentiate(outputs, is_composed=self.is_nested)
        places = [list(outputs).index(_seeded(joint, index)) for index in range(len(joint.cotangents))]
        code = compile_program(joint, self.captured.live)
        return DirectRun(joint, code, self.bind(joint), self.is_nested), places

    def differentiate(self, outputs: Sequence[Value], is_composed: bool) -> Program:
        """The recorded Program with its backward pass from `outputs`."""
        wanted = [value for value in self.wanted if value is not None]
        return differentiate(self.captured.program, outputs, wanted, is_composed=is_composed)

    def bind(self, program: Program) -> list[Any]:
        """The tensors that the Program's inputs stand for."""
        known = [item for item in program.inputs if item.kind is not InputKind.COTANGENT]
        return [self.captured.tensor_behind(item, self.tensors, {}) for item in known]

    def in_order(self, gradients: dict[Value, Any]) -> list[Any]:
        """One tensor per leaf: its gradient, or zeros where the function does not depend on it."""
        return [
            torch.zeros_like(leaf) if value is None or gradients.get(value) is None else gradients[value]
            for leaf, value in zip(self.leaves, self.wanted, strict=True)
        ]

    def arrange(self, gradients: dict[Value, Any]) -> Any:
        """Gradients in the structure of the arguments at `argnums`."""
        return self.arrange_tensors(self.in_order(gradients))

    def arrange_tensors(self, items: list[Any]) -> Any:
        """One item per leaf, in the structure of the arguments at `argnums`."""
        arranged = tuple(fill_slots(skeleton, items) for skeleton in self._skeletons)
        return arranged[0] if isinstance(self.argnums, int) else arranged

    def _skeleton(self, position: int, positions: tuple[int, ...]) -> Any:
        before = positions[: positions.index(position)]
        count = sum(sum(1 for _ in tensors_in(self.args[other])) for other in before)
        numbers = iter(range(count, count + sum(1 for _ in tensors_in(self.args[position]))))
        return replace_tensors(self.args[position], lambda tensor: Slot(next(numbers)))


class _SecondOrder:
    """The gradient of a scalar function as a Program, differentiated again."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], argnums: Argnums) -> None:
        self.recorded = _Recorded(function, args, {}, argnums)
        first = self.recorded.differentiate([self.recorded.scalar_output()], is_composed=True)
        self._gradients = [(item.input, item.value) for item in first.gradients if item.value is not None]
        gradients = list(dict.fromkeys(value for _, value in self._gradients))  # several inputs may have the same one
        forward = backward_as_forward(first, gradients)
        wanted = [value for value in self.recorded.wanted if value is not None]
        second = differentiate(forward, gradients, wanted, is_composed=self.recorded.is_nested)
        self._seeded = [_seeded(second, index) for index in range(len(second.cotangents))]
        seeds = [_ones(item.value) for item in first.cotangents]
        inputs = [*self.recorded.bind(second), *seeds]
        code = compile_program(second, self.recorded.captured.live)
        self._run = DirectRun(second, code, inputs, self.recorded.is_nested)

    def product(self, vectors: list[torch.Tensor]) -> dict[Value, Any]:
        """The Hessian times `vectors`, one per leaf."""
        by_input = _sum_by(self.recorded.wanted, vectors)
        cts = _sum_by([value for _, value in self._gradients], [by_input[owner] for owner, _ in self._gradients])
        return self._run.backward([cts[value] for value in self._seeded])


def _fresh(tensor: torch.Tensor, is_wanted: bool) -> torch.Tensor:
    """The tensor without its history, unless an outer recording needs the history."""
    if isinstance(tensor, TracedTensor):
        return tensor.view_as(tensor) if is_wanted else tensor
    return tensor.detach().requires_grad_(is_wanted)


def _ones(value: Value) -> torch.Tensor:
    kind = value.tensor_type
    return torch.ones(kind.shape, dtype=kind.dtype, device=kind.device)


def _sum_by(keys: Sequence[Any], tensors: Sequence[Any]) -> dict[Any, Any]:
    """The sum of the tensors that share a key other than None, added in their order, as autograd adds them."""
    sums: dict[Any, Any] = {}
    for key, tensor in zip(keys, tensors, strict=True):
        if key is not None:
            sums[key] = sums[key] + tensor if key in sums else tensor
    return sums


def _seeded(program: Program, index: int) -> Value:
    """The output that cotangent `index` belongs to."""
    name = program.cotangents[index].path
    return next(value for value in program.outputs if value.name == name)
