"""Sampling an image or a volume at the points of a grid, and the affine grid.

In: the image and the grid. Out: their cotangents. A sample is a sum over neighbouring pixels, its taps: y = sum over
taps of x[tap] times the product over the axes of the tap's weight. The composed form lists the taps of every axis with
their weights and the weights' slopes, as differentiable functions of the grid. ct_x adds weight * ct_y to each tap;
ct_grid has one axis's slope instead of its weight. Grids have the coordinates in the order x, y, z, the reverse of the
image's dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from undertow.rules.registry import Call, Case, Op, Sampler, case, composed, fused_joint, register
from undertow.torch_internals import OpOverload

aten = torch.ops.aten

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


@dataclass(frozen=True)
class _Tap:
    """One neighbour along one axis, for every point of the grid."""

    index: torch.Tensor
    is_inside: torch.Tensor
    weight: torch.Tensor
    slope: torch.Tensor | None  # d weight / d grid coordinate; None where it is zero


# -1 and 1 are the centres of the corner pixels, or the outer edges of the image.
def _pixels_per_unit(length: int, align_corners: bool) -> float:
    return (length - 1) / 2 if align_corners else length / 2


def _fold(
    coordinate: torch.Tensor, length: int, padding: int, align_corners: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`coordinate` moved into the image as the padding mode says, and its derivative."""
    slope = torch.ones_like(coordinate)
    if padding == _REFLECTION:
        low, span = (0.0, length - 1) if align_corners else (-0.5, length)
        distance = (coordinate - low).abs()
        turns = (distance / span).floor()
        is_forward = turns.remainder(2) == 0
        rest = distance - turns * span
        slope = torch.where((coordinate < low) == is_forward, -slope, slope)
        coordinate = torch.where(is_forward, rest, span - rest) + low
    if padding != _ZEROS:
        slope = torch.where((coordinate > 0) & (coordinate < length - 1), slope, 0.0)
        coordinate = coordinate.clamp(0, length - 1)
    return coordinate, slope


# Keys' cubic convolution with a = -3/4, and its derivative
def _keys(distance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, a = distance.abs(), -0.75
    weight = torch.where(x <= 1, ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a)
    slope = torch.where(x <= 1, (3 * (a + 2) * x - 2 * (a + 3)) * x, (3 * a * x - 10 * a) * x + 8 * a)
    return weight, slope * distance.sign()


def _tap(index: torch.Tensor, length: int, weight: torch.Tensor, slope: torch.Tensor | None) -> _Tap:
    is_inside = (index >= 0) & (index < length)
    return _Tap(index.clamp(0, length - 1).to(torch.int64), is_inside, weight, slope)


def _taps(c: Call, axis: int) -> list[_Tap]:
    """The neighbours of every grid point along one axis of the image."""
    length = c.input.shape[2 + axis]
    units = _pixels_per_unit(length, c.align_corners)
    coordinate = (c.grid.select(-1, c.input.dim() - 3 - axis) + 1) * units - (0 if c.align_corners else 0.5)
    if c.interpolation_mode == _BICUBIC:
        left = coordinate.floor()
        taps = []
        for shift in (-1, 0, 1, 2):
            weight, slope = _keys(coordinate - left - shift)
            folded, _ = _fold(left + shift, length, c.padding_mode, c.align_corners)
            taps.append(_tap(folded.round(), length, weight, slope * units))
        return taps
    coordinate, slope = _fold(coordinate, length, c.padding_mode, c.align_corners)
    if c.interpolation_mode == _NEAREST:
        return [_tap(coordinate.round(), length, torch.ones_like(coordinate), None)]
    left = coordinate.floor()
    part, slope = coordinate - left, slope * units
    return [_tap(left, length, 1 - part, -slope), _tap(left + 1, length, part, slope)]


def _flat_index(c: Call, taps: tuple[_Tap, ...]) -> torch.Tensor:
    flat = taps[0].index
    for axis, tap in enumerate(taps[1:], start=1):
        flat = flat * c.input.shape[2 + axis] + tap.index
    return flat.flatten(1).unsqueeze(1).expand(-1, c.input.shape[1], -1)


def _is_inside(taps: tuple[_Tap, ...]) -> torch.Tensor:
    inside = taps[0].is_inside
    for tap in taps[1:]:
        inside = inside & tap.is_inside
    return inside


def _ct_input(c: Call, ct: torch.Tensor) -> torch.Tensor:
    ct_x = torch.zeros(c.input.shape, dtype=ct.dtype, device=ct.device).flatten(2)
    for taps in itertools.product(*(_taps(c, axis) for axis in range(c.input.dim() - 2))):
        weight = torch.where(_is_inside(taps), taps[0].weight, 0.0)
        for tap in taps[1:]:
            weight = weight * tap.weight
        ct_x = ct_x.scatter_add(2, _flat_index(c, taps), (ct * weight.unsqueeze(1)).flatten(2))
    return ct_x.view(c.input.shape)


def _ct_grid(c: Call, ct: torch.Tensor) -> torch.Tensor:
    num_axes = c.input.dim() - 2
    ct_axes = [torch.zeros_like(c.grid.select(-1, 0)) for _ in range(num_axes)]
    for taps in itertools.product(*(_taps(c, axis) for axis in range(num_axes))):
        pixel = c.input.flatten(2).gather(2, _flat_index(c, taps)).view(ct.shape)
        share = torch.where(_is_inside(taps), (ct * pixel).sum(1), 0.0)
        for axis, slope in enumerate(tap.slope for tap in taps):
            if slope is not None:
                product = share * slope
                for other, tap in enumerate(taps):
                    product = product * tap.weight if other != axis else product
                ct_axes[axis] = ct_axes[axis] + product
    return torch.stack(ct_axes[::-1], dim=-1)


def _register(target: OpOverload, kernel: OpOverload, samples: Callable[[Sampler], list[Case]]) -> None:
    def by_kernel(c: Call, ct: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mask = [c.wants("input"), c.wants("grid")]
        return kernel(ct, c.input, c.grid, c.interpolation_mode, c.padding_mode, c.align_corners, mask)

    register(
        Op(
            target,
            vjps=(fused_joint("input", "grid", by=by_kernel), composed(input=_ct_input, grid=_ct_grid)),
            samples=samples,
        )
    )


def _samples_2d(draw: Sampler) -> list[Case]:
    modes = itertools.product((_BILINEAR, _NEAREST, _BICUBIC), (_ZEROS, _BORDER, _REFLECTION), (False, True))
    return [case(draw(2, 3, 4, 5), draw.uniform(-1.7, 1.7, 2, 3, 2, 2), *mode) for mode in modes]


def _samples_3d(draw: Sampler) -> list[Case]:
    modes = itertools.product((_BILINEAR, _NEAREST), (_ZEROS, _BORDER, _REFLECTION), (False, True))
    return [case(draw(2, 2, 3, 4, 3), draw.uniform(-1.7, 1.7, 2, 2, 1, 3, 3), *mode) for mode in modes]


_register(aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default, _samples_2d)
_register(aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default, _samples_3d)


def _base_line(length: int, align_corners: bool, like: torch.Tensor) -> torch.Tensor:
    if length <= 1:
        return torch.zeros(length, dtype=like.dtype, device=like.device)
    line = torch.linspace(-1, 1, length, dtype=like.dtype, device=like.device)
    return line if align_corners else line * (length - 1) / length


# y = theta [x, y, z, 1]^T for every pixel of the base grid        ct_theta = sum over pixels of ct_y [x, y, z, 1]
def _ct_theta(c: Call, ct: torch.Tensor) -> torch.Tensor:
    batch, _, *spatial_shape = c.size
    num_axes = len(spatial_shape)
    columns = []
    for axis in reversed(range(num_axes)):
        line = _base_line(spatial_shape[axis], c.align_corners, ct)
        columns.append(line.view([-1 if other == axis else 1 for other in range(num_axes)]))
    columns.append(torch.ones([1] * num_axes, dtype=ct.dtype, device=ct.device))
    base = torch.stack([column.expand(batch, *spatial_shape) for column in columns], dim=-1)
    return base.view(batch, -1, num_axes + 1).transpose(1, 2).bmm(ct.reshape(batch, -1, num_axes)).transpose(1, 2)


register(
    Op(
        aten.affine_grid_generator.default,
        vjps=(composed(theta=_ct_theta),),
        samples=lambda draw: [
            case(draw(2, 2, 3), [2, 1, 3, 4], False),
            case(draw(2, 2, 3), [2, 3, 4, 1], True),
            case(draw(2, 3, 4), [2, 1, 2, 3, 4], False),
        ],
    )
)
