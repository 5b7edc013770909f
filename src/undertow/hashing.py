"""The elements of tensors as bytes, and hashes of tensors with their names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

# By these names types are hashed; safetensors files have the same.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order, on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> Any:
    """The elements in order, as a buffer that can be written or hashed."""
    return as_bytes(tensor).numpy().data


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """The sha256 of names, types, shapes and elements, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {DTYPES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
