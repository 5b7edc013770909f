"""The types of values: what is known of a tensor before it exists."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

CUDA_BLOCK_BYTES = 512  # the smallest block of PyTorch's caching allocator, and the unit of all others

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


@dataclass(frozen=True, slots=True)
class TensorType:
    """A strided tensor: dtype, sizes, strides in elements, device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorType:
        """The type of an existing tensor, fake ones included."""
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device)

    @property
    def num_elements(self) -> int:
        """Elements, counting each logical position once."""
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """Bytes from the first to the last element, gaps between strides included."""
        if 0 in self.shape:
            return 0
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return span * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether it lies row by row without gaps."""
        return self.strides == contiguous_strides(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether each element has memory of its own and no gaps lie between."""
        return self.num_bytes == self.num_elements * self.dtype.itemsize

    @property
    def packed(self) -> TensorType:
        """The type of a new tensor that PyTorch makes like this one: with its strides if dense, else row by row."""
        return self if self.is_dense else replace(self, strides=contiguous_strides(self.shape))

    @property
    def has_odd_ones(self) -> bool:
        """Whether it is dense, and has another stride along a size of 1 than a contiguous tensor would have.

        No element's address depends on such a stride, but kernels choose a layout by it.
        """
        found = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return self.is_dense and any(size == 1 and stride != usual for size, stride, usual in found)

    @property
    def allocated_bytes(self) -> int:
        """What the allocator takes for it: CUDA's rounds up."""
        unit = CUDA_BLOCK_BYTES if self.device.type == "cuda" else 1
        return -(-self.num_bytes // unit) * unit

    @property
    def is_differentiable(self) -> bool:
        """Whether values of this dtype can carry a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        text = f"{DTYPE_NAMES.get(self.dtype, str(self.dtype))}[{','.join(map(str, self.shape))}]"
        if not self.is_contiguous:
            text += f"({','.join(map(str, self.strides))})"
        return text if self.device.type == "cpu" else f"{text}@{self.device}"


@dataclass(frozen=True, slots=True)
class OpaqueType:
    """A Python object that only the derivative of its maker reads, such as the context of a custom Function."""

    description: str
    num_bytes: int = 0

    @property
    def allocated_bytes(self) -> int:
        """What its tensors take."""
        return self.num_bytes

    @property
    def is_differentiable(self) -> bool:
        """An opaque object never carries a gradient."""
        return False

    def __str__(self) -> str:
        return f"<{self.description}>"


ValueType = TensorType | OpaqueType


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a freshly made row-major tensor, as PyTorch fills them for sizes 0 and 1."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
