"""Moving elements: joining, repeating, shifting, padding, writing into parts, cutting into patches.

In: shapes and the arguments that say where each element went. Out: every element's cotangent at the position that the
element came from, summed if the element went to several positions.
"""

from collections.abc import Callable, Sequence

import torch

from undertow.ir.pytorch import declare
from undertow.rules.registry import Call, Case, Formula, Op, Sampler, Vjp, case, composed, fused, kink, register

aten = torch.ops.aten
Tensor = torch.Tensor


def plain(draw: Sampler) -> list[Case]:
    """A matrix, a transposed tensor, a 0-dim tensor."""
    return [case(draw(3, 4)), case(draw(2, 3, 4).transpose(0, 2)), case(draw())]


# y = a copy of x        ct_x = ct
register(
    Op(
        aten.clone.default,
        (composed(self=lambda c, ct: ct),),
        lambda draw: [*plain(draw), case(draw(3, 4).t(), memory_format=torch.contiguous_format)],
    )
)


# y = x_1, x_2, ... one after the other        ct_x_i = the part of ct that belongs to x_i
def _cat(c: Call, ct: Tensor) -> list[Tensor]:
    parts, start = [], 0
    for tensor in c.tensors:
        if tuple(tensor.shape) == (0,):
            parts.append(ct.new_zeros((0,)))
            continue
        parts.append(ct.narrow(c.dim, start, tensor.shape[c.dim]))
        start += tensor.shape[c.dim]
    return parts


register(
    Op(
        aten.cat.default,
        (composed(tensors=_cat),),
        lambda draw: [
            case([draw(3, 4), draw(2, 4)]),
            case([draw(4, 3).t(), draw(3, 2), draw(3, 0)], -1),
            case([draw(0), draw(3, 4)], 1),
            case([draw(3, 4)], 1),
            kink([draw(3, 4), draw(3, 2).float(), draw.integers(5, 3, 1)], 1),
        ],
    )
)
register(
    Op(
        aten.stack.default,
        (composed(tensors=lambda c, ct: [ct.select(c.dim, i) for i in range(len(c.tensors))]),),
        lambda draw: [
            case([draw(3, 4), draw(3, 4)]),
            case([draw(4, 3).t(), draw(3, 4), draw(3, 4)], -1),
            case([draw(), draw()]),
        ],
    )
)

# y = x reversed, shifted, turned        ct_x = ct reversed, shifted back, turned back
register(
    Op(
        aten.flip.default,
        (composed(self=lambda c, ct: ct.flip(c.dims)),),
        lambda draw: [case(draw(3, 4), [1]), case(draw(2, 3, 4).transpose(0, 2), [0, -1])],
    )
)
register(
    Op(
        aten.roll.default,
        (composed(self=lambda c, ct: ct.roll([-shift for shift in reversed(c.shifts)], list(reversed(c.dims)))),),
        lambda draw: [case(draw(3, 4), [1, -2], [0, 1]), case(draw(4, 3).t(), [1]), case(draw(3, 4), [5], [1])],
    )
)
register(
    Op(
        aten.rot90.default,
        (composed(self=lambda c, ct: ct.rot90(-c.k, c.dims)),),
        lambda draw: [case(draw(3, 4)), case(draw(2, 3, 4), 3, [0, 2])],
    )
)


# y = x repeated        ct_x = the sum over the repetitions
def _repeat(c: Call, ct: Tensor) -> Tensor:
    if 0 in c.repeats:
        return ct.new_zeros(c.self.shape)
    num_new = len(c.repeats) - c.self.dim()
    for _ in range(num_new):
        ct = ct.sum(0)
    shape: list[int] = []
    repeated: list[int] = []
    for size, count in zip(c.self.shape, c.repeats[num_new:], strict=True):
        if count != 1:
            repeated.append(len(shape))
            shape.append(count)
        shape.append(size)
    return ct.reshape(shape).sum(repeated) if repeated else ct


register(
    Op(
        aten.repeat.default,
        (composed(self=_repeat),),
        lambda draw: [
            case(draw(3, 4), [2, 1, 3]),
            case(draw(4, 3).t(), [2, 2]),
            case(draw(3), [1]),
            case(draw(), [3]),
            case(draw(3), [0]),
        ],
    )
)

# y = the lower or upper triangle, 0 elsewhere        ct_x = that triangle of ct
for triangle in (aten.tril, aten.triu):
    register(
        Op(
            triangle.default,
            (composed(self=lambda c, ct, triangle=triangle: triangle(ct, c.diagonal)),),
            lambda draw: [case(draw(3, 4)), case(draw(2, 4, 3).transpose(1, 2), -1)],
        )
    )

# y = x with channels as pixels, or pixels as channels, or channels mixed        ct_x = the inverse applied to ct
register(
    Op(
        aten.pixel_shuffle.default,
        (composed(self=lambda c, ct: aten.pixel_unshuffle(ct, c.upscale_factor)),),
        lambda draw: [case(draw(2, 4, 2, 3), 2), case(draw(2, 2, 3, 8).permute(0, 3, 1, 2), 2)],
    )
)
register(
    Op(
        aten.pixel_unshuffle.default,
        (composed(self=lambda c, ct: aten.pixel_shuffle(ct, c.downscale_factor)),),
        lambda draw: [case(draw(2, 1, 4, 6), 2), case(draw(2, 4, 6, 3).permute(0, 3, 1, 2), 2)],
    )
)
register(
    Op(
        aten.channel_shuffle.default,
        (composed(self=lambda c, ct: aten.channel_shuffle(ct, ct.shape[1] // c.groups)),),
        lambda draw: [case(draw(2, 6, 2, 2), 2), case(draw(1, 6, 3), 3)],
    )
)

# y = x with a margin of a constant; a negative margin crops        ct_x = ct without the margin
register(
    Op(
        aten.constant_pad_nd.default,
        (composed(self=lambda c, ct: aten.constant_pad_nd(ct, [-margin for margin in c.pad])),),
        lambda draw: [
            case(draw(3, 4), [1, 2]),
            case(draw(2, 4, 3).transpose(1, 2), [-1, 2, 1, 0], 0.5),
            case(draw(3), [0, 0]),
        ],
    )
)


# y = x with a margin of its own elements        ct_x = the sum of ct over the positions that an element went to
def _mirrored(position: Tensor, size: int) -> Tensor:
    return (size - 1) - ((size - 1) - position.abs()).abs()


def _clipped(position: Tensor, size: int) -> Tensor:
    return position.clamp(0, size - 1)


def _gather_margin(source_of: Callable[[Tensor, int], Tensor]) -> Formula:
    def formula(c: Call, ct: Tensor) -> Tensor:
        for i in range(len(c.padding) // 2):
            dim, (left, right) = c.self.dim() - 1 - i, c.padding[2 * i : 2 * i + 2]
            size = c.self.shape[dim]
            source = source_of(aten.arange(-left, size + right, device=ct.device), size)
            shape = [*ct.shape[:dim], size, *ct.shape[dim + 1 :]]
            ct = ct.new_zeros(shape).index_add(dim, source, ct)
        return ct

    return formula


def _padded(num_dims: int) -> Callable[[Sampler], list[Case]]:
    def samples(draw: Sampler) -> list[Case]:
        padding = [1, 2, 2, 0, 1, 1][: 2 * num_dims]
        shape = (2, 3, 4, 4)[: num_dims + 1]
        return [
            case(draw(*shape), padding),
            case(draw(2, *shape), padding),
            case(draw(2, *shape).transpose(1, 2).contiguous().transpose(1, 2), [-1 if p == 0 else p for p in padding]),
        ]

    return samples


for num_dims in (1, 2, 3):
    for name, source_of in (("reflection", _mirrored), ("replication", _clipped)):
        kernel = getattr(aten, f"{name}_pad{num_dims}d_backward")
        register(
            Op(
                getattr(aten, f"{name}_pad{num_dims}d").default,
                (
                    fused(self=lambda c, ct, kernel=kernel: kernel(ct, c.self, c.padding)),
                    composed(self=_gather_margin(source_of)),
                ),
                _padded(num_dims),
            )
        )


# y = x with a part replaced by s        ct_x = ct with zeros there        ct_s = that part of ct
# In a Program these stand for a write through a view, `x[:, 1] = s`. Eager gives the cotangent of such a write the
# layout of x and passes on a contiguous copy of the part.
def _with_layout_of(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.stride() == like.stride():
        return tensor
    return aten.copy(tensor.new_empty_strided(like.shape, like.stride()), tensor)


def _written(scatter: Callable[..., Tensor], view: Callable[..., Tensor], *names: str) -> tuple[Vjp]:
    """The rule for writing through `view`, whose arguments have these names."""

    def arguments(c: Call) -> list[object]:
        return [getattr(c, name) for name in names]

    return (
        composed(
            self=lambda c, ct: scatter(_with_layout_of(ct, c.self), ct.new_zeros(c.src.shape), *arguments(c)),
            src=lambda c, ct: view(_with_layout_of(ct, c.self), *arguments(c)).contiguous(),
        ),
    )


register(
    Op(
        aten.select_scatter.default,
        _written(aten.select_scatter, aten.select, "dim", "index"),
        lambda draw: [case(draw(3, 4), draw(4), 0, 1), case(draw(4, 3).t(), draw(3), -1, -2)],
    )
)
register(
    Op(
        aten.slice_scatter.default,
        _written(aten.slice_scatter, aten.slice, "dim", "start", "end", "step"),
        lambda draw: [case(draw(3, 4), draw(1, 4), 0, 1, 2), case(draw(5, 3).t(), draw(3, 2), -1, 1, None, 2)],
    )
)
register(
    Op(
        aten.diagonal_scatter.default,
        _written(aten.diagonal_scatter, aten.diagonal, "offset", "dim1", "dim2"),
        lambda draw: [case(draw(3, 4), draw(3)), case(draw(4, 3).t(), draw(3), 1, 0, -1)],
    )
)
register(
    Op(
        aten.as_strided_scatter.default,
        _written(aten.as_strided_scatter, aten.as_strided, "size", "stride", "storage_offset"),
        lambda draw: [case(draw(3, 4), draw(2, 2), [2, 2], [1, 4]), case(draw(4, 3).t(), draw(2), [2], [5], 1)],
    )
)


# y = s, broadcast and cast to x        ct_x = 0        ct_s = ct, cast first and then summed
register(
    Op(
        aten.copy.default,
        (
            composed(
                self=lambda c, ct: aten.zeros_like(ct, memory_format=torch.contiguous_format),
                src=lambda c, ct: ct.to(c.src.dtype),
            ),
        ),
        lambda draw: [
            case(draw(3, 4), draw(3, 4)),
            case(draw(4, 3).t(), draw(4)),
            kink(draw(3, 4), draw(4).float()),
            kink(draw(3, 4).float(), draw(3, 1)),
        ],
    )
)
# y = a constant        ct_x = 0        ct_value = the sum of ct
register(
    Op(
        aten.fill.Scalar,
        (composed(self=lambda c, ct: aten.zeros_like(ct)),),
        lambda draw: [case(draw(3, 4), 2.0), case(draw(4, 3).t(), 1)],
    )
)
register(
    Op(
        aten.fill.Tensor,
        (composed(self=lambda c, ct: aten.zeros_like(ct), value=lambda c, ct: ct.sum()),),
        lambda draw: [case(draw(3, 4), draw()), case(draw(4, 3).t(), draw())],
    )
)
register(Op(aten.zero.default, (composed(self=lambda c, ct: aten.zeros_like(ct)),), plain))


# y = the patches of an image as columns, or columns added up to an image; each is the other's transpose
def _patch_arguments(c: Call) -> tuple[Sequence[int], ...]:
    return c.kernel_size, c.dilation, c.padding, c.stride


register(
    Op(
        aten.im2col.default,
        (composed(self=lambda c, ct: aten.col2im(ct, c.self.shape[-2:], *_patch_arguments(c))),),
        lambda draw: [
            case(draw(2, 3, 4, 5), [2, 3], [1, 1], [1, 0], [1, 2]),
            case(draw(3, 4, 5), [2, 2], [2, 1], [0, 0], [1, 1]),
        ],
    )
)
register(
    Op(
        aten.col2im.default,
        (composed(self=lambda c, ct: aten.im2col(ct, *_patch_arguments(c))),),
        lambda draw: [case(draw(2, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])],
    )
)

declare(aten.col2im.default, is_oversized=True)
