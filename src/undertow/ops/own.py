"""Operations that a Program needs and PyTorch does not have, and records made from other records.

Called with tensors, each returns tensors, as PyTorch's own do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from undertow.ir.live import Live
from undertow.ir.operation import REVERSIBLE, Destination, Operation, operation_maker, register_operation
from undertow.ir.out_overloads import find_out_overload, out_names
from undertow.ir.program import Node
from undertow.ir.pytorch import declare, operation_of
from undertow.ir.schema import bind_arguments, flatten_outputs, schema_of
from undertow.kernels.draws import draw_bernoulli
from undertow.kernels.outputs import Out, given
from undertow.torch_internals import OpOverload, SchemaTensorType

aten = torch.ops.aten


def kernel(
    name: str, run: Callable[..., Any], *, returns_tuple: bool = False, writes_into: bool = False, **facts: Any
) -> Operation:
    """A kernel of our own: a function of its arguments that makes new tensors.

    One that `writes_into` what it is given takes `out`, a tensor or None per output.
    """
    destination = Destination(run, takes_some=True) if writes_into else None
    return Operation(name, run, returns_tuple=returns_tuple, find_destination=lambda: destination, **facts)


def register_kernel(name: str, run: Callable[..., Any], **facts: Any) -> Operation:
    """A kernel of our own, registered under its name."""
    return register_operation(kernel(name, run, **facts))


# A kernel of our own with PyTorch's bits draws the numbers of dropout.
declare(aten.bernoulli_.float, run=draw_bernoulli)

for _fill in (
    aten.fill.Scalar,
    aten.zero.default,
    aten.bernoulli_.float,
    aten.uniform_.default,
    aten.normal_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
    aten.exponential_.default,
):
    declare(_fill, is_filled=True)


def _restride(tensor: Tensor, strides: tuple[int, ...], out: Out = None) -> Tensor:
    make = partial(aten.empty_strided, tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return given(out, 0, make).copy_(tensor)


# A scatter into a view returns strides of its own, but the storage keeps its strides.
RESTRIDE = register_kernel("restride", _restride, gradient=lambda args, ct: (ct, None), writes_into=True)

# Writing into a tensor under no_grad changes its value but not its history: the gradient goes to the old value.
REPLACE_VALUE = register_operation(
    Operation(
        "replace_value",
        lambda old, new: new,
        gradient=lambda args, ct: (ct, None),
        shares=-1,
        is_view=True,
        costs_nothing=True,
    )
)

# Eager gives the operation that wrote through a view a contiguous copy of the cotangent, whatever the view's layout.
# A sum over it adds in that order.
WRITE_VIEW = register_operation(
    Operation(
        "write_view",
        lambda part: part,
        gradient=lambda args, ct: (aten.clone.default(ct, memory_format=torch.contiguous_format),),
        shares=0,
        is_view=True,
        costs_nothing=True,
    )
)


class GuardMiss(Exception):
    """A branch on a tensor's value took another path than the recorded one; `index` counts the Program's guards."""

    def __init__(self, index: int, found: Any) -> None:
        super().__init__(f"guard {index} found {found!r}")
        self.index = index
        self.found = found


def _guard_scalar(tensor: Tensor, expected: Any, index: int) -> None:
    found = tensor.item()
    if found != expected and not (found != found and expected != expected):
        raise GuardMiss(index, found)


def _guard_shape(tensor: Tensor, expected: tuple[int, ...], index: int) -> None:
    if tuple(tensor.shape) != expected:
        raise GuardMiss(index, tuple(tensor.shape))


def _guard(name: str, run: Callable[..., None]) -> Operation:
    return Operation(
        name,
        run,
        is_guard=True,
        must_run=True,
        chains=lambda node: (REVERSIBLE,),
        is_measurable=False,
        why_not_captured=lambda node: f"a branch on a tensor's value ({node.origin})",
    )


GUARD_SCALAR = register_operation(_guard("guard", _guard_scalar))
GUARD_SHAPE = register_operation(_guard("guard_shape", _guard_shape))


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that a random operation on `device` draws from when it is given none."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


_DEFAULT = "generator of "


def default_generator_of(device: torch.device) -> Live:
    """The name of that generator, as a live thing."""
    return Live(f"{_DEFAULT}{device}")


def bind(item: Live, live: Mapping[str, Any]) -> Any:
    """What a Live thing stands for; PyTorch's own generators are always there."""
    if item.name.startswith(_DEFAULT):
        return default_generator(torch.device(item.name.removeprefix(_DEFAULT)))
    return live[item.name]


def _generator_state(generator: torch.Generator) -> Tensor:
    return generator.get_state()


_DRAWN_AGAIN = "numbers are drawn a second time under a recorded generator state"

# Runs before a random operation that is run again later, and records the state between the same draws.
GENERATOR_STATE = register_operation(
    Operation(
        "generator_state",
        _generator_state,
        chains=lambda node: (REVERSIBLE,),
        costs_nothing=True,
        is_measurable=False,
        why_not_captured=lambda node: _DRAWN_AGAIN,
    )
)
GENERATOR_STATE_BYTES = torch.default_generator.get_state().numel()  # of the CPU's; CUDA's is 16 bytes


@operation_maker
def replayed(inner: Operation, device: torch.device) -> Operation:
    """A random operation run again under a recorded generator state, which comes first among its arguments."""
    inside = inner.destination
    destination = None if inside is None else Destination(partial(_replay_into, inside, device))
    return Operation(
        f"{inner.name}.replayed",
        partial(_replay, inner.run, device),
        returns_tuple=True,
        repeats=inner,
        find_destination=lambda: destination,
        rehearse=partial(_rehearse_replay, inner, device),
        why_not_captured=lambda node: _DRAWN_AGAIN,
    )


# Positional: the operation itself may have an argument `device` or `state`.
def _replay(
    run: Callable[..., Any], device: torch.device, state: Tensor, /, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
    generator = given[0] if given else default_generator(device)
    before = generator.get_state()
    generator.set_state(state)
    try:
        return tuple(flatten_outputs(run(*args, **kwargs)))
    finally:
        generator.set_state(before)


def _replay_into(
    inside: Destination, device: torch.device, /, *args: Any, out: Sequence[Tensor], **kwargs: Any
) -> tuple[Tensor, ...]:
    kwargs |= {"out": out} if inside.names is None else dict(zip(inside.names, out, strict=True))
    _replay(inside.call, device, *args, **kwargs)
    return tuple(out)


def _rehearse_replay(
    inner: Operation, device: torch.device, state: Tensor, /, *args: Any, **kwargs: Any
) -> Callable[[], Any]:
    known = default_generator(device).get_state()  # a generator refuses a made-up state
    call = partial(inner.run, *args, **kwargs) if inner.rehearse is None else inner.rehearse(*args, **kwargs)
    return lambda: _replay(call, device, known)


def _blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


# A tensor of the right shape, for kernels that read only the shape of an argument.
BLANK = register_kernel("blank", _blank)


@operation_maker
def functional(inner: Operation) -> Operation:
    """A mutating operation made functional: the mutated arguments are copied first and returned after the outputs."""
    overload = inner.overload
    assert overload is not None
    # Some operations change the tensor's shape instead of its elements.
    can_be_told = torch.Tag.inplace_view not in overload.tags and (
        schema_of(overload).is_inplace or find_out_overload(overload) is not None
    )
    # In low precision, batch normalisation keeps its statistics in another dtype than fake tensors say.
    fits: Callable[[Node], bool] = (lambda node: True) if schema_of(overload).is_inplace else _is_in_full_precision
    destination = Destination(partial(_run_functional_into, overload), fits=fits) if can_be_told else None
    kept = ("is_random", "must_run", "chains", "draws", "droppable", "why_not_captured", "is_filled")
    return Operation(
        f"{inner.name}.functional",
        partial(_run_functional, inner),
        returns_tuple=True,
        functional_of=inner,
        is_fresh=True,
        find_destination=lambda: destination,
        **{name: getattr(inner, name) for name in kept},
    )


def _is_in_full_precision(node: Node) -> bool:
    return not any(value.tensor_type.dtype in (torch.bfloat16, torch.float16) for value in node.inputs)


def _run_functional(inner: Operation, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    places, returns_fresh_tuple, function = _way_to_call(inner)
    overload = inner.overload
    assert overload is not None
    if kwargs or not places or len(args) <= max(places):
        bound = bind_arguments(overload, args, kwargs)
        copies = _copy_items(bound, schema_of(overload).mutated)
        result = call_bound(inner, bound)
    else:  # the common case, without the cost of naming every argument
        given = list(args)
        copies = _copy_items(given, places)
        result = function(*given)
        if returns_fresh_tuple:
            return (*result, *copies)
    outputs = flatten_outputs(result) if result is not None else []
    fresh = [output for output in outputs if not any(output is copy for copy in copies)]
    return (*fresh, *copies)


def _run_functional_into(overload: OpOverload, *args: Any, out: Sequence[Tensor], **kwargs: Any) -> tuple[Tensor, ...]:
    """First copy the mutated arguments to the end of `out`."""
    bound = bind_arguments(overload, args, kwargs)
    mutated = [name for name in schema_of(overload).mutated if bound[name] is not None]
    num_fresh = len(out) - len(mutated)
    for name, tensor in zip(mutated, out[num_fresh:], strict=True):
        bound[name] = tensor.copy_(bound[name])
    written = find_out_overload(overload)
    if num_fresh and written is not None:
        call_bound(operation_of(written), bound | dict(zip(out_names(written), out, strict=False)))
    else:
        call_bound(operation_of(overload), bound)
    return tuple(out)


@cache
def _way_to_call(inner: Operation) -> tuple[tuple[int, ...], bool, Callable[..., Any]]:
    """The positions of the mutated arguments, none where one is given by name only; whether several tensors come back,
    all of them new; and what to call.
    """
    overload = inner.overload
    assert overload is not None
    arguments = {item.name: (place, item) for place, item in enumerate(overload._schema.arguments)}
    mutated = [arguments[name] for name in schema_of(overload).mutated]
    has_places = not any(item.kwarg_only for _, item in mutated)
    returns = overload._schema.returns
    is_fresh = all(isinstance(item.type, SchemaTensorType) and item.alias_info is None for item in returns)
    return (
        tuple(place for place, _ in mutated) if has_places else (),
        is_fresh and len(returns) > 1,
        overload._op if inner.run is overload else inner.run,
    )


def _copy_items(container: Any, keys: Iterable[Any]) -> list[Tensor]:
    """Replace the tensors at `keys` by copies of the same strides, which are returned."""
    copies = []
    for key in keys:
        tensor = container[key]
        if isinstance(tensor, Tensor):
            container[key] = tensor.clone() if tensor.is_contiguous() else _restride(tensor, tensor.stride())
            copies.append(container[key])
    return copies


def call_bound(operation: Operation, bound: dict[str, Any]) -> Any:
    """Call one of PyTorch's operations with arguments by schema name."""
    assert operation.overload is not None
    arguments = operation.overload._schema.arguments
    args = [bound[argument.name] for argument in arguments if not argument.kwarg_only]
    kwargs = {argument.name: bound[argument.name] for argument in arguments if argument.kwarg_only}
    return operation.run(*args, **kwargs)


@operation_maker
def as_tensor(inner: Operation) -> Operation:
    """An operation with a Python result, such as `torch.equal`, as one with a tensor result."""
    return Operation(
        inner.name, lambda *args: torch.tensor(inner.run(*args)), releases_arguments=inner.releases_arguments
    )


@operation_maker
def compact(inner: Operation) -> Operation:
    """An operation with its output in memory of its own size."""
    return replace(
        kernel(f"{inner.name}.compact", partial(_run_compact, inner)),
    )


def _run_compact(inner: Operation, *args: Any, **kwargs: Any) -> Tensor:
    output = inner.run(*args, **kwargs)
    return output if output.untyped_storage().nbytes() == output.nbytes else output.clone()
