"""Views: other shapes, orders and parts of the same memory.

In: mostly the shape of `c.self`. Out: the cotangent of `self`, zero outside the part that was viewed. Eager has kernels
that write a part into fresh zeros; the composed forms use scatter operations, which have rules.
"""

from collections.abc import Callable, Sequence

import torch

from undertow.rules.registry import Call, Case, Op, Sampler, Vjp, case, composed, fused, register

aten = torch.ops.aten
Tensor = torch.Tensor

END = 2**63 - 1  # the end of a slice without a given end


def plain(draw: Sampler) -> list[Case]:
    """A matrix, a transposed tensor, a 0-dim tensor."""
    return [case(draw(3, 4)), case(draw(2, 3, 4).transpose(0, 2)), case(draw())]


# The same elements in the same order: ct_x = ct
for identity in (aten.alias.default, aten.lift_fresh.default):
    register(Op(identity, (composed(self=lambda c, ct: ct),), plain))

# y = x in another shape        ct_x = ct in the shape of x
for reshape in (aten.view.default, aten._unsafe_view.default):
    register(
        Op(
            reshape,
            (composed(self=lambda c, ct: ct.reshape(c.self.shape)),),
            lambda draw: [
                case(draw(3, 4), [4, 3]),
                case(draw(2, 3, 4), [-1, 4]),
                case(draw(3, 4).t(), [4, 3, 1]),
                case(draw(), [1, 1]),
                case(draw(1), []),
            ],
        )
    )
register(
    Op(
        aten._reshape_alias.default,
        (composed(self=lambda c, ct: ct.reshape(c.self.shape)),),
        lambda draw: [case(draw(3, 4), [4, 3], [3, 1])],
    )
)

# y = x repeated along dims of size 1        ct_x = the sum of ct over them, which autodiff does
register(
    Op(
        aten.expand.default,
        (composed(self=lambda c, ct: ct),),
        lambda draw: [
            case(draw(3, 1), [3, 4]),
            case(draw(3, 1), [2, 3, -1]),
            case(draw(4, 1, 3).transpose(0, 2), [2, 3, 5, 4]),
            case(draw(), [2, 2]),
            case(draw(3), [3]),
        ],
    )
)


# y = x with dims in another order        ct_x = ct with dims in the order of x
def _permute(c: Call, ct: Tensor) -> Tensor:
    order = [dim % ct.dim() for dim in c.dims]
    return ct.permute([order.index(dim) for dim in range(ct.dim())])


register(
    Op(
        aten.permute.default,
        (composed(self=_permute),),
        lambda draw: [case(draw(2, 3, 4), [2, 0, -2]), case(draw(), [])],
    )
)
register(
    Op(
        aten.transpose.int,
        (composed(self=lambda c, ct: ct.transpose(c.dim0, c.dim1)),),
        lambda draw: [case(draw(2, 3, 4), 0, -1), case(draw(3), 0, 0), case(draw(), 0, -1)],
    )
)
register(
    Op(
        aten.t.default,
        (composed(self=lambda c, ct: ct.t()),),
        lambda draw: [case(draw(3, 4)), case(draw(3)), case(draw())],
    )
)

# y = x with an added dim of size 1        ct_x = ct without it
register(
    Op(
        aten.unsqueeze.default,
        (composed(self=lambda c, ct: ct.squeeze(c.dim)),),
        lambda draw: [case(draw(3, 4), 1), case(draw(3, 4).t(), -1), case(draw(1), 0), case(draw(), 0)],
    )
)


# y = x without dims of size 1        ct_x = ct with them
def _unsqueeze_to(ct: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    candidates = {dim % len(shape) for dim in dims} if shape else set()
    for dim, size in enumerate(shape):
        if dim in candidates and size == 1:
            ct = ct.unsqueeze(dim)
    return ct


register(
    Op(
        aten.squeeze.default,
        (composed(self=lambda c, ct: _unsqueeze_to(ct, c.self.shape, range(c.self.dim()))),),
        lambda draw: [case(draw(3, 1, 4, 1)), case(draw(1, 1)), case(draw(3, 4)), case(draw())],
    )
)
register(
    Op(
        aten.squeeze.dim,
        (composed(self=lambda c, ct: _unsqueeze_to(ct, c.self.shape, [c.dim])),),
        lambda draw: [case(draw(3, 1, 4), 1), case(draw(3, 1, 4), 0), case(draw(3, 4, 1), -1), case(draw(), 0)],
    )
)
register(
    Op(
        aten.squeeze.dims,
        (composed(self=lambda c, ct: _unsqueeze_to(ct, c.self.shape, c.dim)),),
        lambda draw: [case(draw(3, 1, 4, 1), [1, -1]), case(draw(3, 1, 4), [0, 1])],
    )
)

register(
    Op(
        aten.select.int,
        # y = x[..., i, ...]        ct_x = ct at i, 0 elsewhere
        (
            fused(self=lambda c, ct: aten.select_backward(ct, c.self.shape, c.dim, c.index)),
            composed(self=lambda c, ct: ct.new_zeros(c.self.shape).select_scatter(ct, c.dim, c.index)),
        ),
        lambda draw: [case(draw(3, 4), 1, 2), case(draw(2, 3, 4).transpose(0, 2), 0, -1), case(draw(3), 0, 0)],
    )
)


def _slice_bounds(c: Call) -> tuple[int, int]:
    return (0 if c.start is None else c.start), (END if c.end is None else c.end)


register(
    Op(
        aten.slice.Tensor,
        # y = x[..., a:b:s, ...]        ct_x = ct there, 0 elsewhere
        (
            fused(self=lambda c, ct: aten.slice_backward(ct, c.self.shape, c.dim, *_slice_bounds(c), c.step)),
            composed(
                self=lambda c, ct: ct.new_zeros(c.self.shape).slice_scatter(ct, c.dim, *_slice_bounds(c), c.step),
            ),
        ),
        lambda draw: [
            case(draw(3, 4), 1, 1, 3),
            case(draw(5, 4), 0, 0, END, 2),
            case(draw(4, 5).t(), 0, -3),
            case(draw(3, 4)),
            case(draw(3, 4), 0, 2, 1),
        ],
    )
)

for diagonal in (aten.diagonal.default, aten.diagonal_copy.default):
    register(
        Op(
            diagonal,
            # y = diagonal of x        ct_x = ct on it, 0 elsewhere
            (
                fused(self=lambda c, ct: aten.diagonal_backward(ct, c.self.shape, c.offset, c.dim1, c.dim2)),
                composed(
                    self=lambda c, ct: aten.diagonal_scatter(ct.new_zeros(c.self.shape), ct, c.offset, c.dim1, c.dim2),
                ),
            ),
            lambda draw: [case(draw(3, 4)), case(draw(2, 4, 3).transpose(0, 2), 1, -1, 0)],
        )
    )

# y = matrices with x on a diagonal        ct_x = that diagonal of ct
register(
    Op(
        aten.diag_embed.default,
        (composed(self=lambda c, ct: ct.diagonal(c.offset, c.dim1, c.dim2)),),
        lambda draw: [case(draw(3)), case(draw(2, 3), -1, 0, 2)],
    )
)


# y = windows of x, in a new last dim        ct_x = the sum over the windows that contain an element
def _unfold_composed(c: Call, ct: Tensor) -> Tensor:
    if c.self.dim() == 0:
        return ct.sum()
    dim = c.dimension % c.self.dim()
    source = aten.arange(c.self.shape[dim], device=ct.device).unfold(0, c.size, c.step).reshape(-1)
    windows = ct.movedim(-1, dim + 1).flatten(dim, dim + 1)
    return ct.new_zeros(c.self.shape).index_add(dim, source, windows)


register(
    Op(
        aten.unfold.default,
        (
            fused(self=lambda c, ct: aten.unfold_backward(ct, c.self.shape, c.dimension, c.size, c.step)),
            composed(self=_unfold_composed),
        ),
        lambda draw: [
            case(draw(3, 7), 1, 3, 2),
            case(draw(2, 5, 3).transpose(0, 2), -2, 2, 1),
            case(draw(4), 0, 2, 3),
        ],
    )
)


# y = x's memory viewed with a size, strides and an offset        ct_x = the sum of ct over the positions in y that show
# an element of x. If x itself overlaps, elements that share an address share the sum.
def _has_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share an address. This is eager's test, which may say yes where none do."""
    extent = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride <= extent:
            return True
        extent += stride * (size - 1)
    return False


def _span(shape: Sequence[int], strides: Sequence[int], offset: int) -> int:
    """How many elements of memory the geometry spans."""
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _as_strided(c: Call, ct: Tensor, *, by_index: bool) -> Tensor:
    x_offset = c.self.storage_offset()
    offset = x_offset if c.storage_offset is None else c.storage_offset
    if 0 in c.size or 0 in c.self.shape:
        return ct.new_zeros(c.self.shape)
    base = min(offset, x_offset)
    num_elements = max(_span(c.self.shape, c.self.stride(), x_offset - base), _span(c.size, c.stride, offset - base))
    size: list[int] = []
    strides: list[int] = []
    for dim in reversed(range(ct.dim())):
        if c.size[dim] == 1:
            ct = ct.squeeze(dim)
        elif c.stride[dim] == 0:
            ct = ct.sum(dim)
        else:
            size, strides = [c.size[dim], *size], [c.stride[dim], *strides]
    memory = ct.new_zeros(num_elements)
    position = aten.arange(num_elements, device=ct.device)
    if by_index or _has_overlap(size, strides):
        target = position.as_strided(size, strides, offset - base)
        memory = memory.index_add(0, target.reshape(-1), ct.reshape(-1))
    else:
        memory = aten.as_strided_scatter(memory, ct, size, strides, offset - base)
    source = position.as_strided(c.self.shape, c.self.stride(), x_offset - base)
    if _has_overlap(c.self.shape, c.self.stride()):
        owners = aten.ones_like(source, dtype=ct.dtype, memory_format=torch.contiguous_format)
        count = aten.zeros_like(memory).index_add(0, source.reshape(-1), owners.reshape(-1))
        memory = memory / count
    if by_index:
        return memory.index_select(0, source.reshape(-1)).view(c.self.shape)
    return memory.as_strided(c.self.shape, c.self.stride(), x_offset - base)


register(
    Op(
        aten.as_strided.default,
        (
            Vjp("scattered", {"self": lambda c, ct: _as_strided(c, ct, by_index=False)}, is_composed=False),
            composed(self=lambda c, ct: _as_strided(c, ct, by_index=True)),
        ),
        lambda draw: [
            case(draw(3, 4), [2, 2], [1, 2]),
            case(draw(3, 4), [3, 2], [1, 1], 2),
            case(draw(4, 3).t(), [2, 1, 3], [4, 0, 1], 1),
            case(draw(8)[2:], [2, 2, 2], [1, 0, 3], 0),
        ],
    )
)


# y_1, y_2, ... = x cut along a dim        ct_x = the cotangents concatenated, with zeros for missing ones
def _rejoin(c: Call, cts: Sequence[Tensor | None]) -> Tensor:
    pieces = [c.self.new_zeros(out.shape) if ct is None else ct for ct, out in zip(cts, c.outs, strict=True)]
    return aten.cat(pieces, c.dim)


def _cuts(sizes: int | list[int]) -> Callable[[Sampler], list[Case]]:
    return lambda draw: [case(draw(5, 3), sizes), case(draw(2, 5, 3).transpose(0, 2), sizes, -2)]


for split, sizes in (
    (aten.split.Tensor, 2),
    (aten.unsafe_split.Tensor, 2),
    (aten.split_with_sizes.default, [2, 3]),
    (aten.unsafe_split_with_sizes.default, [2, 3]),
):
    register(
        Op(
            split,
            (composed(self=lambda c, *cts: _rejoin(c, cts)),),
            _cuts(sizes),
        )
    )


def _unbind(c: Call, *cts: Tensor | None) -> Tensor:
    present = next(ct for ct in cts if ct is not None)
    zeros = present.new_zeros(()).expand(present.shape) if any(ct is None for ct in cts) else None
    return aten.stack([zeros if ct is None else ct for ct in cts], c.dim)


register(
    Op(
        aten.unbind.int,
        (composed(self=_unbind),),
        lambda draw: [case(draw(3, 4)), case(draw(2, 3, 4).transpose(0, 2), -1)],
    )
)
