"""Resampling: nearest, linear and cubic interpolation to another size, plain and antialiased.

In: shapes. Out: the cotangent of `self`. Interpolation is a separable linear map: y = A x with one matrix A[i, j] per
spatial dim, the weight of input j in output i. The fused form is PyTorch's kernel; the composed form makes A from
shapes and applies A^T. So both need no values from the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from undertow.rules.registry import Call, Case, Op, Sampler, case, composed, fused, register
from undertow.torch_internals import OpOverload

aten = torch.ops.aten


def apply_transposed(matrices: Sequence[torch.Tensor], ct: torch.Tensor) -> torch.Tensor:
    """A^T ct along the last dimensions, one matrix per dimension."""
    for dim, matrix in enumerate(matrices, start=-len(matrices)):
        ct = ct.transpose(dim, -1).matmul(matrix).transpose(dim, -1)
    return ct


def _at(index: torch.Tensor, length: int) -> torch.Tensor:
    """One row per output, true at the input position in `index`."""
    return index.unsqueeze(1) == torch.arange(length, device=index.device)


def _positions(out_length: int, like: torch.Tensor) -> torch.Tensor:
    # In 16 bits the positions themselves would be rounded.
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.arange(out_length, dtype=dtype, device=like.device)


def _step(out_length: int, length: int, factor: float | None) -> float:
    """The distance in the input between two neighbouring outputs."""
    return 1.0 / factor if factor is not None and factor > 0 else length / out_length


# y[i] = x[floor((i + offset) step)]. PyTorch computes the position in float32 for every dtype, which decides ties.
def _nearest(offset: float) -> Callable[..., torch.Tensor]:
    def matrix(out_length: int, length: int, like: torch.Tensor, factor: float | None) -> torch.Tensor:
        index = torch.arange(out_length, dtype=torch.float32, device=like.device)
        source = ((index + offset) * _step(out_length, length, factor)).floor().clamp(max=length - 1)
        return _at(source, length).to(like.dtype)

    return matrix


def _source(
    out_length: int, length: int, like: torch.Tensor, factor: float | None, align_corners: bool
) -> torch.Tensor:
    index = _positions(out_length, like)
    if align_corners:
        return index * ((length - 1) / (out_length - 1) if out_length > 1 else 0.0)
    return (index + 0.5) * _step(out_length, length, factor) - 0.5


# y[i] = (1 - t) x[j] + t x[j + 1], where j + t is the position of output i in the input
def _linear(
    out_length: int, length: int, like: torch.Tensor, factor: float | None, align_corners: bool
) -> torch.Tensor:
    source = _source(out_length, length, like, factor, align_corners).clamp(min=0)
    left = source.floor().clamp(max=length - 1)
    right = (left + 1).clamp(max=length - 1)
    part = (source - left).clamp(0, 1).unsqueeze(1)
    return (_at(left, length) * (1 - part) + _at(right, length) * part).to(like.dtype)


# Keys' cubic convolution with a = -3/4; the four neighbours are clamped to the border.
def _cubic(out_length: int, length: int, like: torch.Tensor, factor: float | None, align_corners: bool) -> torch.Tensor:
    source = _source(out_length, length, like, factor, align_corners)
    left = source.floor()
    part = source - left
    matrix = torch.zeros(out_length, length, dtype=source.dtype, device=like.device)
    for shift in (-1, 0, 1, 2):
        weight = _keys(part - shift, -0.75).unsqueeze(1)
        matrix = matrix + _at((left + shift).clamp(0, length - 1), length) * weight
    return matrix.to(like.dtype)


def _keys(distance: torch.Tensor, a: float) -> torch.Tensor:
    x = distance.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


# Antialiased: every output averages the inputs with a filter that is stretched to the step and sums to 1.
def _antialiased(reach: float, weigh: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def matrix(
        out_length: int, length: int, like: torch.Tensor, factor: float | None, align_corners: bool
    ) -> torch.Tensor:
        if align_corners:
            step = (length - 1) / (out_length - 1) if out_length > 1 else 0.0
        else:
            step = _step(out_length, length, factor)
        stretch = max(step, 1.0)
        center = (step * (_positions(out_length, like) + 0.5)).unsqueeze(1)
        position = _positions(length, like)
        start = (center - reach * stretch + 0.5).clamp(min=0).floor()
        end = (center + reach * stretch + 0.5).floor().clamp(max=length)
        weight = weigh((position - center + 0.5) / stretch) * ((position >= start) & (position < end))
        return (weight / weight.sum(1, keepdim=True)).to(like.dtype)

    return matrix


def _triangle(distance: torch.Tensor) -> torch.Tensor:
    return (1 - distance.abs()).clamp(min=0)


def _register(
    target: OpOverload,
    kernel: OpOverload,
    matrix: Callable[..., torch.Tensor],
    samples: Callable[[Sampler], list[Case]],
) -> None:
    arguments = [argument.name for argument in target._schema.arguments]
    scales = [name for name in arguments if name.startswith("scales")]
    has_corners = "align_corners" in arguments

    def factors(c: Call) -> list[float | None]:
        return [getattr(c, name) for name in scales]

    def corners(c: Call) -> list[bool]:
        return [c.align_corners] if has_corners else []

    def by_kernel(c: Call, ct: torch.Tensor) -> torch.Tensor:
        return kernel(ct, c.output_size, c.self.shape, *corners(c), *factors(c))

    def by_matrices(c: Call, ct: torch.Tensor) -> torch.Tensor:
        dims = zip(ct.shape[2:], c.self.shape[2:], factors(c), strict=True)
        return apply_transposed([matrix(out, length, ct, factor, *corners(c)) for out, length, factor in dims], ct)

    register(Op(target, vjps=(fused(self=by_kernel), composed(self=by_matrices)), samples=samples))


def _nearest_samples(num_dims: int) -> Callable[[Sampler], list[Case]]:
    def samples(draw: Sampler) -> list[Case]:
        sizes = (4, 5, 3)[:num_dims]
        return [
            case(draw(2, 3, *sizes), [2 * size for size in sizes], *[2.0] * num_dims),
            case(draw(2, 3, *sizes), [size + 3 for size in sizes]),
            case(draw(2, 3, *sizes), [int(size * 0.7) for size in sizes], *[0.7] * num_dims),
        ]

    return samples


def _smooth_samples(num_dims: int) -> Callable[[Sampler], list[Case]]:
    def samples(draw: Sampler) -> list[Case]:
        sizes = (4, 5, 3)[:num_dims]
        return [
            case(draw(2, 3, *sizes), [int(size * 1.5) for size in sizes], False, *[1.5] * num_dims),
            case(draw(2, 3, *sizes), [size + 4 for size in sizes], True),
            case(draw(2, 3, *sizes), [size - 2 for size in sizes], False),
        ]

    return samples


for _num_dims in (1, 2, 3):
    _register(
        getattr(aten, f"upsample_nearest{_num_dims}d").default,
        getattr(aten, f"upsample_nearest{_num_dims}d_backward").default,
        _nearest(0.0),
        _nearest_samples(_num_dims),
    )
    _register(
        getattr(aten, f"_upsample_nearest_exact{_num_dims}d").default,
        getattr(aten, f"_upsample_nearest_exact{_num_dims}d_backward").default,
        _nearest(0.5),
        _nearest_samples(_num_dims),
    )

_SMOOTH = {
    "upsample_linear1d": (1, _linear),
    "upsample_bilinear2d": (2, _linear),
    "upsample_trilinear3d": (3, _linear),
    "upsample_bicubic2d": (2, _cubic),
    "_upsample_bilinear2d_aa": (2, _antialiased(1.0, _triangle)),
    "_upsample_bicubic2d_aa": (2, _antialiased(2.0, lambda distance: _keys(distance, -0.5))),
}
for _name, (_num_dims, _matrix) in _SMOOTH.items():
    _register(
        getattr(aten, _name).default,
        getattr(aten, f"{_name}_backward").default,
        _matrix,
        _smooth_samples(_num_dims),
    )
