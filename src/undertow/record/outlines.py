"""What an operation gives, found without FakeTensors where that is faster.

In: an operation and its recorded arguments. Out: an `Outline` of each tensor that it makes, or None where only the fake
kernels of PyTorch can tell. A FakeTensor takes a third of a millisecond per operation, most of it in Python. Four ways
take a few microseconds instead: what was seen before is looked up; views run on meta tensors, by PyTorch's own C++
code; matrix products make row-major results, however their factors lie (`_PRODUCTS`); and others run on zeros, so that
the kernel itself tells: on a few where an operation keeps the shape of its tensors (`_run_twin`), else on all of them
if these are not many. Of the latter only those whose results cannot be larger than is known before (`_MADE_ELEMENTS`):
recording must not take the memory of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from undertow.ir import TensorType
from undertow.ir.pytorch import operation_of
from undertow.ir.schema import schema_of
from undertow.ir.types import contiguous_strides
from undertow.torch_internals import FakeTensorMode, OpOverload, disable_current_modes

aten = torch.ops.aten

SMALL_ELEMENTS = 1 << 20  # of all arguments and results together; a kernel takes less than a millisecond
MAX_KNOWN = 1 << 15  # calls that are remembered; of a GPT with 12 layers, 200 lengths have about 20,000


class Outline:
    """A tensor's type and offset; as a meta tensor and as a FakeTensor, each made when it is first asked for."""

    __slots__ = ("_fake", "_meta", "_mode", "offset", "type")

    def __init__(self, mode: FakeTensorMode, kind: TensorType, offset: int = 0) -> None:
        self._mode, self.type, self.offset = mode, kind, offset
        self._meta: torch.Tensor | None = None
        self._fake: torch.Tensor | None = None

    @classmethod
    def of_fake(cls, mode: FakeTensorMode, fake: torch.Tensor) -> Outline:
        """The outline of a FakeTensor."""
        outline = cls(mode, TensorType.of(fake), int(fake.storage_offset()))
        outline._fake = fake
        return outline

    @property
    def meta(self) -> torch.Tensor:
        if self._meta is None:
            self._meta = self._make(torch.device("meta"))
        return self._meta

    @property
    def fake(self) -> torch.Tensor:
        if self._fake is None:
            with disable_current_modes(), self._mode:
                self._fake = self._make(self.type.device)
        return self._fake

    def _make(self, device: torch.device) -> torch.Tensor:
        kind = self.type
        if not self.offset:
            return torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=device)
        num_elements = self.offset + kind.num_bytes // kind.dtype.itemsize
        whole = torch.empty(num_elements, dtype=kind.dtype, device=device)
        return whole.as_strided(kind.shape, kind.strides, self.offset)


# What an operation returned: outlines in order, and the kind of sequence that it returned them in, if any.
Made = tuple[list[Outline | None], type | None]


def find_outlines(mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Made | None:
    """What `func` gives for arguments in which Outlines stand for tensors; None where fake kernels have to tell."""
    way = _way_of(func)
    if way is None:
        return None
    given: list[Outline] = []
    key = (func, _key_of(args, given), _key_of(tuple(kwargs.items()), given) if kwargs else (), *_settings())
    if way is not _run_view:
        is_on_cpu = all(item.type.device == _CPU for item in given) if given else kwargs.get("device") == _CPU
        if not is_on_cpu:
            return None
    try:
        known = _KNOWN.get(key)
    except TypeError:  # an argument that cannot be hashed
        return None
    if known is None:
        types = [item.type for item in given]
        known = (_run_twin(func, args, kwargs, types) if _keeps_shape(func) else None) or way(func, args, kwargs, types)
        if known is None:
            return None
        if len(_KNOWN) >= MAX_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = known
    made, sequence = known
    return [None if item is None else Outline(mode, *item) for item in made], sequence


_CPU = torch.device("cpu")
# The type and the offset of each tensor that a call makes, and the kind of sequence that it returns, if any.
_Found = tuple[tuple[tuple[TensorType, int] | None, ...], type | None]
_KNOWN: dict[Any, _Found | None] = {}


@cache
def _way_of(func: OpOverload) -> Callable[[OpOverload, Any, dict[str, Any], list[TensorType]], _Found | None] | None:
    """How to find what an operation gives; None where fake kernels have to tell."""
    if is_view(func):
        return _run_view
    if func in _PRODUCTS:
        return _multiply
    return _run_on_zeros if func in _MADE_ELEMENTS or _is_pointwise(func) else None


@cache
def is_view(func: OpOverload) -> bool:
    """Whether it only gives another view of its first argument, and no values are read for that."""
    return operation_of(func).is_view and not schema_of(func).mutated


@cache
def _is_pointwise(func: OpOverload) -> bool:
    schema = schema_of(func)
    return torch.Tag.pointwise in func.tags and not (schema.mutated or schema.is_random or schema.has_effect)


def _settings() -> tuple[Any, ...]:
    """What types depend on besides the arguments."""
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()


def _key_of(item: Any, given: list[Outline]) -> Any:
    """An argument by its type or value, and the tensors in it."""
    if type(item) is Outline:
        given.append(item)
        return item.type, item.offset
    if isinstance(item, tuple | list):
        return tuple([_key_of(part, given) for part in item])
    return type(item), item  # 1, True and 1.0 are told apart


def _run_view(func: OpOverload, args: Any, kwargs: dict[str, Any], given: list[TensorType]) -> _Found | None:
    if not args or not isinstance(args[0], Outline):
        return None
    device = args[0].type.device
    try:
        result = func(*(item.meta if isinstance(item, Outline) else item for item in args), **kwargs)
    except (RuntimeError, IndexError, NotImplementedError):  # eager's own error is raised elsewhere
        return None
    if isinstance(result, torch.Tensor):
        return (_described(result, device),), None
    return tuple([_described(item, device) for item in result]), type(result)


def _described(meta: torch.Tensor, device: torch.device) -> tuple[TensorType, int]:
    kind = TensorType(meta.dtype, tuple(meta.shape), tuple(meta.stride()), device)
    return kind, int(meta.storage_offset())


def _multiply(func: OpOverload, args: Any, kwargs: dict[str, Any], given: list[TensorType]) -> _Found | None:
    """A product's type, from its factors; None where the call may be wrong."""
    left, right = given[-2:]
    num_dims, has_bias = _PRODUCTS[func], len(given) == 3
    is_right = (
        len({kind.dtype for kind in given}) == 1
        and len(left.shape) == len(right.shape) == num_dims
        and left.shape[-1] == right.shape[-2]
        and left.shape[:-2] == right.shape[:-2]
        and not (kwargs.keys() - {"alpha", "beta"})
    )
    shape = (*left.shape[:-1], right.shape[-1])
    if not is_right or (has_bias and not _is_broadcast_to(given[0].shape, shape)):
        return None
    return ((TensorType(left.dtype, shape, contiguous_strides(shape), left.device), 0),), None


def _is_broadcast_to(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if len(shape) > len(wanted):
        return False
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return all(size in (1, other) for size, other in pairs)


@cache
def _keeps_shape(func: OpOverload) -> bool:
    return func in _SHAPE_KEPT or _is_pointwise(func)


def _run_twin(func: OpOverload, args: Any, kwargs: dict[str, Any], given: list[TensorType]) -> _Found | None:
    """What an operation that keeps a shape gives for tensors of one shape, all row by row; None for others.

    It runs on tensors with 2 where they have more, so that all lengths have one twin. For arguments of one shape that
    lie row by row PyTorch makes results that do too, of whatever size; the twin tells dtypes, and that it is so here.
    """
    shape = next((kind.shape for kind in given if kind.shape), ())
    if not shape or 0 in shape or not all(kind.is_contiguous and kind.shape in (shape, ()) for kind in given):
        return None
    twins: list[Outline] = []
    args, kwargs = _shrink(args, twins), {name: _shrink(item, twins) for name, item in kwargs.items()}
    key = (_run_twin, func, _key_of(args, []), _key_of(tuple(kwargs.items()), []), *_settings())
    if key not in _KNOWN:
        _KNOWN[key] = _run_on_zeros(func, args, kwargs, [item.type for item in twins])
    found = _KNOWN[key]
    if found is None or found[1] is not None or found[0][0] is None:
        return None
    kind, _ = found[0][0]
    if kind.shape != next(item.type.shape for item in twins if item.type.shape) or not kind.is_contiguous:
        return None
    return ((TensorType(kind.dtype, shape, contiguous_strides(shape), kind.device), 0),), None


def _shrink(item: Any, twins: list[Outline]) -> Any:
    if isinstance(item, Outline):
        shape = tuple([min(size, 2) for size in item.type.shape])
        twins.append(Outline(item._mode, replace(item.type, shape=shape, strides=contiguous_strides(shape))))
        return twins[-1]
    return type(item)([_shrink(part, twins) for part in item]) if type(item) in (tuple, list) else item


def _run_on_zeros(func: OpOverload, args: Any, kwargs: dict[str, Any], given: list[TensorType]) -> _Found | None:
    count = _MADE_ELEMENTS.get(func, _broadcast)
    try:
        num_elements = sum(kind.num_bytes // kind.dtype.itemsize for kind in given) + count(args, given)
        if num_elements > SMALL_ELEMENTS:
            return None
        result = func(*_as_zeros(args), **{name: _as_zeros(item) for name, item in kwargs.items()})
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):  # it refuses zeros, or the call is wrong
        return None
    if isinstance(result, torch.Tensor):
        return ((TensorType.of(result), 0),), None
    if not isinstance(result, tuple | list) or not all(isinstance(item, torch.Tensor | None) for item in result):
        return None
    return tuple(None if item is None else (TensorType.of(item), 0) for item in result), type(result)


def _as_zeros(item: Any) -> Any:
    if isinstance(item, Outline):
        kind = item.type
        num_elements = kind.num_bytes // kind.dtype.itemsize
        return torch.zeros(num_elements, dtype=kind.dtype, device="cpu").as_strided(kind.shape, kind.strides)
    return type(item)(map(_as_zeros, item)) if isinstance(item, tuple | list) else item


def _broadcast(args: Any, given: list[TensorType]) -> int:
    return math.prod(torch.broadcast_shapes(*(kind.shape for kind in given)))


def _no_larger(args: Any, given: list[TensorType]) -> int:
    """For operations that return a few tensors, each with at most as many elements as the largest argument."""
    return 4 * max(kind.num_elements for kind in given)


# Products of matrices, and how many dimensions both factors have. Before any kernel runs, PyTorch's own function for
# the types (TORCH_META_FUNC of mm, addmm, bmm, baddbmm) asks for a row-major result with the dtype of the factors.
_PRODUCTS: dict[OpOverload, int] = {
    aten.mm.default: 2,
    aten.addmm.default: 2,
    aten.bmm.default: 3,
    aten.baddbmm.default: 3,
}

_MADE_ELEMENTS: dict[OpOverload, Callable[[Any, list[TensorType]], int]] = {
    aten.embedding.default: lambda args, given: args[1].type.num_elements * args[0].type.shape[1],
    aten.embedding_dense_backward.default: lambda args, given: args[2] * args[0].type.shape[-1],
    aten.slice_backward.default: lambda args, given: math.prod(args[1]),
    aten.select_backward.default: lambda args, given: math.prod(args[1]),
    aten.cat.default: lambda args, given: sum(kind.num_elements for kind in given),
    aten.stack.default: lambda args, given: sum(kind.num_elements for kind in given),
    aten.scalar_tensor.default: lambda args, given: 1,
    aten.ones.default: lambda args, given: math.prod(args[0]),
    aten.zeros.default: lambda args, given: math.prod(args[0]),
    aten.full.default: lambda args, given: math.prod(args[0]),
    aten.arange.default: lambda args, given: math.ceil(args[0]),
}
# Besides those that compute element by element: their result has the shape of their tensors.
_SHAPE_KEPT = frozenset(
    (
        aten.clone.default,
        aten.tril.default,
        aten.triu.default,
        aten._safe_softmax.default,
        aten._to_copy.default,
        aten.empty_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
    )
)
_MADE_ELEMENTS |= dict.fromkeys(
    (
        *_SHAPE_KEPT,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.nll_loss_forward.default,
        aten.nll_loss_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ),
    _no_larger,
)
