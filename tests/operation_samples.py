"""The operations of the registry and example calls of them, in several precisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import undertow.rules  # noqa: F401  (registers every family)
from undertow.ir.schema import schema_of
from undertow.rules.registry import Case, Op, Sampler, registered_ops

# The samples are drawn in float64; what a sample holds in float32 is there for the mixture of precisions.
PRECISIONS = {
    "float64": {torch.float64: torch.float64, torch.float32: torch.float32},
    "float32": {torch.float64: torch.float32, torch.float32: torch.bfloat16},
    "bfloat16": {torch.float64: torch.bfloat16, torch.float32: torch.float32},
}

# In-place forms with rules of their own are covered by training steps (tests/cpu/test_exactness_modules.py).
OPS = [op for op in registered_ops() if not schema_of(op.target).is_inplace]


def samples(op: Op) -> list[Case]:
    return op.samples(Sampler(seed=0))


def map_tensors(value: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, replace) for item in value)
    return value


def rebuild(tensor: torch.Tensor, dtypes: dict[torch.dtype, torch.dtype]) -> torch.Tensor:
    """A copy with storage of its own, the same strides and offset, overlaps included."""
    memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    memory = memory.to(dtypes.get(tensor.dtype, tensor.dtype), copy=True)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
