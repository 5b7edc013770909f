"""Undertow's own operations: what a Program needs and ATen does not have.

Each behaves like an ATen operation: called with tensors, it returns tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload

from undertow.ir import Node, Value, operation_name
from undertow.kernels.draws import draw_bernoulli
from undertow.kernels.outputs import Out, given
from undertow.ops.registry import bind_arguments
from undertow.ops.schema import flatten_outputs, schema_of

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class OwnOperation:
    """An operation run by a Python function. `gradient(args, *cts)` gives a cotangent per argument.

    A preparation brings weights into the form in which another operation reads them: what it makes can be kept until
    they change. One that `writes_into` what it is given takes `out`, a tensor or None per output. `flops` of the
    arguments are the multiplications and additions of its products, whichever algorithm saves some of them.
    """

    name: str
    run: Callable[..., Any] = field(repr=False)
    gradient: Callable[..., Sequence[Any]] | None = field(default=None, repr=False)
    has_effect: bool = False
    returns_tuple: bool = False
    is_preparation: bool = False
    writes_into: bool = False
    flops: Callable[..., int] | None = field(default=None, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __str__(self) -> str:
        return self.name


# Kernels of our own with the bits of the operations that they stand for.
_STAND_INS: dict[Any, Callable[..., Any]] = {aten.bernoulli_.float: draw_bernoulli}


def function_of(target: Any) -> Callable[..., Any]:
    """What is called to run an operation on tensors that hold something."""
    found: Callable[..., Any] = _STAND_INS.get(target, target)
    return found


def _restride(tensor: torch.Tensor, strides: tuple[int, ...], out: Out = None) -> torch.Tensor:
    make = partial(aten.empty_strided, tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return given(out, 0, make).copy_(tensor)


# A scatter into a view returns its own strides; the storage keeps those it has.
RESTRIDE = OwnOperation("restride", _restride, gradient=lambda args, ct: (ct, None), writes_into=True)

# Writing into a tensor under no_grad changes its value and leaves its history: the gradient passes to what stood there.
REPLACE_VALUE = OwnOperation("replace_value", lambda old, new: new, gradient=lambda args, ct: (ct, None))


# Eager hands the operation that wrote through a view a contiguous copy of the cotangent, whatever the view's layout is;
# a sum over it adds in that order.
WRITE_VIEW = OwnOperation(
    "write_view",
    lambda part: part,
    gradient=lambda args, ct: (aten.clone.default(ct, memory_format=torch.contiguous_format),),
)


class GuardMiss(Exception):
    """A branch on a tensor's value took another way than the one captured; `index` counts the Program's guards."""

    def __init__(self, index: int, found: Any) -> None:
        super().__init__(f"guard {index} found {found!r}")
        self.index = index
        self.found = found


def _guard_scalar(tensor: torch.Tensor, expected: Any, index: int) -> None:
    found = tensor.item()
    if found != expected and not (found != found and expected != expected):
        raise GuardMiss(index, found)


def _guard_shape(tensor: torch.Tensor, expected: tuple[int, ...], index: int) -> None:
    if tuple(tensor.shape) != expected:
        raise GuardMiss(index, tuple(tensor.shape))


GUARD_SCALAR = OwnOperation("guard", _guard_scalar, has_effect=True)
GUARD_SHAPE = OwnOperation("guard_shape", _guard_shape, has_effect=True)
GUARDS = (GUARD_SCALAR, GUARD_SHAPE)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that a random operation on `device` draws from when it is given none."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _generator_state(generator: torch.Generator) -> torch.Tensor:
    return generator.get_state()


# Before a random operation that is run again later.
GENERATOR_STATE = OwnOperation("generator_state", _generator_state)
GENERATOR_STATE_BYTES = torch.default_generator.get_state().numel()  # of the CPU's; CUDA's is 16 bytes


@dataclass(frozen=True)
class Replayed:
    """A random operation run again under a recorded generator state, which comes first among its arguments."""

    target: Any
    device: torch.device
    returns_tuple = True

    def __call__(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
        generator = given[0] if given else default_generator(self.device)
        before = generator.get_state()
        generator.set_state(state)
        try:
            return tuple(flatten_outputs(function_of(self.target)(*args, **kwargs)))
        finally:
            generator.set_state(before)

    def __str__(self) -> str:
        return f"{operation_name(self.target)}.replayed"


def _blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


# A tensor of the right shape for kernels that look at nothing else of an argument.
BLANK = OwnOperation("blank", _blank)


@dataclass(frozen=True)
class Mutating:
    """A mutating operation made functional: the mutated arguments are copied first and returned behind the outputs."""

    target: OpOverload
    returns_tuple = True

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        places, returns_fresh_tuple, function = _way_to_call(self.target)
        if kwargs or not places or len(args) <= max(places):
            bound = bind_arguments(self.target, args, kwargs)
            copies = _copy_items(bound, schema_of(self.target).mutated)
            result = call_bound(self.target, bound)
        else:  # the common case, without the cost of naming every argument
            given = list(args)
            copies = _copy_items(given, places)
            result = function(*given)
            if returns_fresh_tuple:
                return (*result, *copies)
        outputs = flatten_outputs(result) if result is not None else []
        fresh = [output for output in outputs if not any(output is copy for copy in copies)]
        return (*fresh, *copies)

    def __str__(self) -> str:
        return f"{operation_name(self.target)}.functional"


@cache
def _way_to_call(target: OpOverload) -> tuple[tuple[int, ...], bool, Callable[..., Any]]:
    """The positions of the mutated arguments, none where one is given by name only; whether several tensors come back,
    all of them new; and what to call.
    """
    arguments = {item.name: (place, item) for place, item in enumerate(target._schema.arguments)}
    mutated = [arguments[name] for name in schema_of(target).mutated]
    has_places = not any(item.kwarg_only for _, item in mutated)
    returns = target._schema.returns
    is_fresh = all(isinstance(item.type, torch._C.TensorType) and item.alias_info is None for item in returns)
    function = function_of(target)
    return (
        tuple(place for place, _ in mutated) if has_places else (),
        is_fresh and len(returns) > 1,
        function._op if function is target else function,
    )


def _copy_items(container: Any, keys: Iterable[Any]) -> list[torch.Tensor]:
    """Replace the tensors at `keys` by copies of the same strides, which are returned."""
    copies = []
    for key in keys:
        tensor = container[key]
        if isinstance(tensor, torch.Tensor):
            container[key] = tensor.clone() if tensor.is_contiguous() else _restride(tensor, tensor.stride())
            copies.append(container[key])
    return copies


def call_bound(target: OpOverload, bound: dict[str, Any]) -> Any:
    """Call `target` with arguments by schema name."""
    arguments = target._schema.arguments
    args = [bound[argument.name] for argument in arguments if not argument.kwarg_only]
    kwargs = {argument.name: bound[argument.name] for argument in arguments if argument.kwarg_only}
    return function_of(target)(*args, **kwargs)


def overwrites(node: Node) -> tuple[Value, ...]:
    """The inputs of the Program that a node gives another value: an optimizer's update overwrites its parameter."""
    return getattr(node.target, "overwrites", lambda node: ())(node)


def has_effect(target: Any) -> bool:
    """Whether a node must run even if nobody reads its outputs: random draws, guards, assertions."""
    if isinstance(target, OpOverload):
        return schema_of(target).has_effect
    return is_random(target) or getattr(target, "has_effect", False)


def is_random(target: Any) -> bool:
    """Whether the operation draws from a generator."""
    if isinstance(target, Mutating):
        target = target.target
    return isinstance(target, OpOverload) and schema_of(target).is_random


# Attention whose kernels touch no generator where nothing is dropped out; the derivatives of two are marked as random.
_DRAWING_BY_DROPOUT = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)


def draws(node: Node) -> bool:
    """Whether the node draws from a generator when it is run."""
    if node.target in _DRAWING_BY_DROPOUT:
        return bind_arguments(node.target, node.args, node.kwargs)["dropout_p"] != 0
    return is_random(node.target)


def is_view(target: Any) -> bool:
    """Whether the outputs share the memory of the first argument."""
    if isinstance(target, OpOverload):
        return schema_of(target).is_view or target in _UNDECLARED_VIEWS
    return target in (REPLACE_VALUE, WRITE_VIEW)


# Autograd treats these as fresh tensors, but their outputs lie in their input's memory.
_UNDECLARED_VIEWS = {
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.lift_fresh.default,
    aten._reshape_alias.default,
}
