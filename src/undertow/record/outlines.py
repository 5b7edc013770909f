"""What an operation gives, found without FakeTensors where that is faster.

In: an operation and its recorded arguments. Out: an `Outline` of each tensor that it makes, or None where only the fake
kernels of PyTorch can tell. A FakeTensor takes a third of a millisecond per operation, most of it in Python. Three ways
take a few microseconds instead: views run on meta tensors, by PyTorch's own C++ code; other calls are looked up among
those that were seen before; and what is new and small runs on zeros, so that the kernel itself tells.

Only operations whose results cannot be larger than is known before run on zeros (`_MADE_ELEMENTS`): recording must not
take the memory of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from undertow.ir import TensorType
from undertow.ir.pytorch import operation_of
from undertow.ir.schema import schema_of
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

    @classmethod
    def of_meta(cls, mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> Outline:
        """The outline of a meta tensor that stands for one on a device."""
        kind = TensorType(meta.dtype, tuple(meta.shape), tuple(meta.stride()), device)
        outline = cls(mode, kind, int(meta.storage_offset()))
        outline._meta = meta
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
    if is_view(func):
        return _run_view(mode, func, args, kwargs)
    if func not in _MADE_ELEMENTS and not _is_pointwise(func):
        return None
    given: list[TensorType] = []
    key = (func, _key_of(args, given), _key_of(tuple(kwargs.items()), given), *_settings())
    is_on_cpu = all(kind.device == _CPU for kind in given) if given else kwargs.get("device") == _CPU
    if not is_on_cpu:
        return None
    try:
        known = _KNOWN.get(key)
    except TypeError:  # an argument that cannot be hashed
        return None
    if known is None:
        known = _run_on_zeros(func, args, kwargs, given)
        if known is None:
            return None
        if len(_KNOWN) >= MAX_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = known
    types, sequence = known
    return [None if kind is None else Outline(mode, kind) for kind in types], sequence


_CPU = torch.device("cpu")
_KNOWN: dict[Any, tuple[tuple[TensorType | None, ...], type | None]] = {}


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


def _key_of(item: Any, given: list[TensorType]) -> Any:
    """An argument by its type or value, and the types of the tensors in it."""
    if isinstance(item, Outline):
        given.append(item.type)
        return item.type
    if isinstance(item, tuple | list):
        return tuple([_key_of(part, given) for part in item])
    return type(item), item  # 1, True and 1.0 are told apart


def _run_view(mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Made | None:
    if not args or not isinstance(args[0], Outline):
        return None
    device = args[0].type.device
    try:
        result = func(*(item.meta if isinstance(item, Outline) else item for item in args), **kwargs)
    except (RuntimeError, IndexError, NotImplementedError):  # eager's own error is raised elsewhere
        return None
    if isinstance(result, torch.Tensor):
        return [Outline.of_meta(mode, result, device)], None
    return [Outline.of_meta(mode, item, device) for item in result], type(result)


def _run_on_zeros(
    func: OpOverload, args: Any, kwargs: dict[str, Any], given: list[TensorType]
) -> tuple[tuple[TensorType | None, ...], type | None] | None:
    count = _MADE_ELEMENTS.get(func, _broadcast)
    try:
        num_elements = sum(kind.num_bytes // kind.dtype.itemsize for kind in given) + count(args, given)
        if num_elements > SMALL_ELEMENTS:
            return None
        result = func(*_as_zeros(args), **{name: _as_zeros(item) for name, item in kwargs.items()})
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):  # it refuses zeros, or the call is wrong
        return None
    if isinstance(result, torch.Tensor):
        return (TensorType.of(result),), None
    if not isinstance(result, tuple | list) or not all(isinstance(item, torch.Tensor | None) for item in result):
        return None
    return tuple(None if item is None else TensorType.of(item) for item in result), type(result)


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


def _product(left: int, right: int) -> Callable[[Any, list[TensorType]], int]:
    return lambda args, given: (
        math.prod(args[left].type.shape[:-1]) * args[right].type.shape[-1] if isinstance(args[left], Outline) else 0
    )


_MADE_ELEMENTS: dict[OpOverload, Callable[[Any, list[TensorType]], int]] = {
    aten.mm.default: _product(0, 1),
    aten.bmm.default: _product(0, 1),
    aten.addmm.default: _product(1, 2),
    aten.baddbmm.default: _product(1, 2),
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
_MADE_ELEMENTS |= dict.fromkeys(
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
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.nll_loss_forward.default,
        aten.nll_loss_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ),
    _no_larger,
)
