"""Pooling: maximum and average over windows, fixed or adaptive, and unpooling by indices.

In: the shape of `self`, and the indices of maxima. Out: the cotangent of `self`. Maximum pooling returns where each
maximum was, as an index into the flattened spatial dims: the cotangent goes there. Average pooling is a separable
linear map (see `resampling.py`), y = A x with a matrix A per spatial dim: the cotangent is A^T ct_y, and needs only
shapes from the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from undertow.alternatives.registry import Codec, register_codec
from undertow.ir import TensorType
from undertow.ir.pytorch import declare
from undertow.kernels.window_codes import decode_windows, encode_windows
from undertow.ops.own import register_kernel
from undertow.rules.registry import Call, Op, case, composed, fused, register
from undertow.rules.resampling import apply_transposed
from undertow.torch_internals import OpOverload

aten = torch.ops.aten


def _per_dim(value: Sequence[int], num_dims: int) -> list[int]:
    return list(value) * num_dims if len(value) == 1 else list(value)


def _scatter_to_indices(ct: torch.Tensor, indices: torch.Tensor, shape: Sequence[int], num_dims: int) -> torch.Tensor:
    zeros = torch.zeros(shape, dtype=ct.dtype, device=ct.device).flatten(-num_dims)
    return zeros.scatter_add(-1, indices.flatten(-num_dims), ct.flatten(-num_dims)).view(shape)


def _register_max_pool(target: OpOverload, kernel: OpOverload, num_dims: int, samples: Any) -> None:
    # y[i] = x[m(i)], m(i) the position of the maximum        ct_x[j] = sum of ct_y[i] over m(i) = j
    def by_kernel(c: Call, ct: torch.Tensor, *_: None) -> torch.Tensor:
        return kernel(ct, c.self, c.kernel_size, c.stride, c.padding, c.dilation, c.ceil_mode, c.outs[1])

    register(
        Op(
            target,
            vjps=(
                fused(self=by_kernel),
                composed(self=lambda c, ct, *_: _scatter_to_indices(ct, c.outs[1], c.self.shape, num_dims)),
            ),
            samples=samples,
        )
    )


_register_max_pool(
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    2,
    lambda draw: [
        case(draw.distinct(2, 3, 6, 6), [2, 2]),
        case(draw.distinct(2, 3, 7, 6), [3, 2], [2, 1], [1, 1], [1, 2], True),
        case(draw.distinct(3, 5, 5), [3], [1]),
        case(draw.distinct(2, 4, 6, 6).contiguous(memory_format=torch.channels_last), [3, 3], [2, 2], [1, 1]),
    ],
)


def _window_codec(bound: dict[str, Any], indices_type: TensorType) -> Codec | None:
    kernel = _per_dim(bound["kernel_size"], 2)
    if kernel[0] * kernel[1] > 256 or not indices_type.is_contiguous:
        return None
    stride = tuple(_per_dim(bound["stride"] or kernel, 2))
    geometry = (
        bound["self"].tensor_type.shape[-1],
        kernel[1],
        stride,
        tuple(_per_dim(bound["padding"], 2)),
        tuple(_per_dim(bound["dilation"], 2)),
    )
    return Codec(replace(indices_type, dtype=torch.uint8), (ENCODE_WINDOWS, geometry), (DECODE_WINDOWS, geometry))


ENCODE_WINDOWS = register_kernel("encode_windows", encode_windows, writes_into=True)
DECODE_WINDOWS = register_kernel("decode_windows", decode_windows, writes_into=True)
register_codec(aten.max_pool2d_with_indices.default, 1, _window_codec)

_register_max_pool(
    aten.max_pool3d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default,
    3,
    lambda draw: [
        case(draw.distinct(2, 2, 4, 5, 4), [2, 2, 2]),
        case(draw.distinct(2, 4, 5, 4), [3, 2, 3], [1, 2, 1], [1, 0, 1], [1, 1, 1], True),
    ],
)


def _register_adaptive_max_pool(target: OpOverload, kernel: OpOverload, num_dims: int, samples: Any) -> None:
    register(
        Op(
            target,
            vjps=(
                fused(self=lambda c, ct, *_: kernel(ct, c.self, c.outs[1])),
                composed(self=lambda c, ct, *_: _scatter_to_indices(ct, c.outs[1], c.self.shape, num_dims)),
            ),
            samples=samples,
        )
    )


_register_adaptive_max_pool(
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool2d_backward.default,
    2,
    lambda draw: [case(draw.distinct(2, 3, 5, 7), [2, 3]), case(draw.distinct(3, 4, 6), [1, 4])],
)

_register_adaptive_max_pool(
    aten.adaptive_max_pool3d.default,
    aten.adaptive_max_pool3d_backward.default,
    3,
    lambda draw: [case(draw.distinct(2, 2, 3, 5, 4), [2, 3, 2]), case(draw.distinct(2, 3, 4, 4), [1, 2, 3])],
)


def _register_max_unpool(target: OpOverload, num_dims: int, samples: Any) -> None:
    # y[m(i)] = x[i]        ct_x[i] = ct_y[m(i)]
    def gathered(c: Call, ct: torch.Tensor) -> torch.Tensor:
        return ct.flatten(-num_dims).gather(-1, c.indices.flatten(-num_dims)).view(c.indices.shape)

    register(Op(target, vjps=(composed(self=gathered),), samples=samples))


_register_max_unpool(
    aten.max_unpool2d.default,
    2,
    lambda draw: [case(draw(1, 2, 2, 2), torch.tensor([[[[0, 3], [8, 11]], [[5, 2], [9, 15]]]]), [4, 4])],
)

_register_max_unpool(
    aten.max_unpool3d.default,
    3,
    lambda draw: [
        case(draw(1, 1, 1, 2, 2), torch.tensor([[[[[0, 3], [17, 30]]]]]), [2, 4, 4], [2, 2, 2], [0, 0, 0]),
    ],
)


# Window i of average pooling covers [start, end) of the input. Its divisor counts the elements inside the padded input,
# or inside the input. The divisor is a product over the dims, so each dim has its own matrix of averages.
def _average_matrices(c: Call, ct: torch.Tensor, num_dims: int) -> list[torch.Tensor]:
    kernel = _per_dim(c.kernel_size, num_dims)
    strides = _per_dim(c.stride, num_dims) if c.stride else kernel
    padding = _per_dim(c.padding, num_dims)
    matrices = []
    for dim in range(num_dims):
        length = c.self.shape[dim - num_dims]
        first = torch.arange(ct.shape[dim - num_dims], device=ct.device) * strides[dim] - padding[dim]
        end = (first + kernel[dim]).clamp(max=length + padding[dim])
        start, inner_end = first.clamp(min=0), end.clamp(max=length)
        count = end - first if c.count_include_pad else inner_end - start
        matrix = _windows(start, inner_end, length).to(ct.dtype)
        matrices.append(matrix if c.divisor_override else matrix / count.unsqueeze(1))
    return matrices


def _windows(start: torch.Tensor, end: torch.Tensor, length: int) -> torch.Tensor:
    position = torch.arange(length, device=start.device)
    return (position >= start.unsqueeze(1)) & (position < end.unsqueeze(1))


def _register_average_pool(target: OpOverload, kernel: OpOverload, num_dims: int, samples: Any) -> None:
    def by_kernel(c: Call, ct: torch.Tensor) -> torch.Tensor:
        return kernel(
            *(ct, c.self, c.kernel_size, c.stride, c.padding),
            *(c.ceil_mode, c.count_include_pad, c.divisor_override),
        )

    def by_matrices(c: Call, ct: torch.Tensor) -> torch.Tensor:
        ct_x = apply_transposed(_average_matrices(c, ct, num_dims), ct)
        return ct_x / c.divisor_override if c.divisor_override else ct_x

    register(Op(target, vjps=(fused(self=by_kernel), composed(self=by_matrices)), samples=samples))


_register_average_pool(
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    2,
    lambda draw: [
        case(draw(2, 3, 6, 6), [2, 2]),
        case(draw(2, 3, 7, 6), [3, 2], [2, 2], [1, 1], True, True),
        case(draw(2, 3, 7, 6), [3, 2], [2, 2], [1, 1], True, False),
        case(draw(3, 5, 5), [3], [1], [1], False, True, 4),
        case(draw(2, 4, 6, 6).contiguous(memory_format=torch.channels_last), [3, 3], [2, 2], [1, 1]),
    ],
)

_register_average_pool(
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
    3,
    lambda draw: [
        case(draw(2, 1, 6, 3, 3), [3, 1, 1], [1, 1, 1]),
        case(draw(2, 4, 5, 5), [3, 2, 2], [2, 2, 2], [1, 1, 1], True, False),
        case(draw(1, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2], [1, 0, 1], False, True, 3),
    ],
)


# Adaptive pooling from X to Y elements averages [floor(i X / Y), ceil((i + 1) X / Y)).
def _adaptive_matrix(out_length: int, length: int, like: torch.Tensor) -> torch.Tensor:
    index = torch.arange(out_length, device=like.device) * length
    start = index.div(out_length, rounding_mode="floor")
    end = (index + length + out_length - 1).div(out_length, rounding_mode="floor")
    return _windows(start, end, length).to(like.dtype) / (end - start).unsqueeze(1)


def _register_adaptive_average_pool(target: OpOverload, kernel: OpOverload, num_dims: int, samples: Any) -> None:
    def by_matrices(c: Call, ct: torch.Tensor) -> torch.Tensor:
        lengths = zip(ct.shape[-num_dims:], c.self.shape[-num_dims:], strict=True)
        return apply_transposed([_adaptive_matrix(*pair, ct) for pair in lengths], ct)

    register(
        Op(
            target,
            vjps=(fused(self=lambda c, ct: kernel(ct, c.self)), composed(self=by_matrices)),
            samples=samples,
        )
    )


_register_adaptive_average_pool(
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    2,
    lambda draw: [
        case(draw(2, 3, 5, 7), [2, 3]),
        case(draw(3, 4, 6), [6, 4]),
        case(draw(2, 4, 6, 6).contiguous(memory_format=torch.channels_last), [4, 3]),
    ],
)

_register_adaptive_average_pool(
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default,
    3,
    lambda draw: [case(draw(2, 2, 3, 5, 4), [2, 3, 2]), case(draw(2, 3, 4, 4), [1, 2, 3])],
)

# These kernels read only the shape of the pooled tensor.
for _reader in (
    aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
):
    declare(_reader, shape_only=[item.name for item in _reader._schema.arguments].index("self"))
