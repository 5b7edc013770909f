"""Selecting values by size: max, min, median, sort, top-k.

In: `c.self`, the values, the recorded positions. Out: the cotangent of `self`: the cotangent of each value, put where
the value came from. Over one dim the recorded position gets it all; over several dims equal values share it evenly.
"""

from collections.abc import Sequence

import torch

from undertow.rules.registry import Call, Case, Op, Sampler, case, composed, kink, register

aten = torch.ops.aten
Tensor = torch.Tensor

TIES = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]).double()
WITH_NAN = torch.tensor([[1.0, float("nan"), 3.0], [float("nan"), 2.0, float("nan")]]).double()


# ct_x = ct at the recorded position, 0 elsewhere
def _put_back(c: Call, ct: Tensor, _: None = None, *, keepdim: bool | None = None) -> Tensor:
    indices = c.outs[1]
    if not (c.keepdim if keepdim is None else keepdim) and c.self.dim():
        ct, indices = ct.unsqueeze(c.dim), indices.unsqueeze(c.dim)
    return ct.new_zeros(c.self.shape).scatter(c.dim, indices, ct)


def along_a_dim(draw: Sampler) -> list[Case]:
    """A dim of a matrix, of a transposed tensor, of size 1, of a 0-dim tensor; then ties and NaN."""
    return [
        case(draw.distinct(3, 4), 1),
        case(draw.distinct(2, 3, 4).transpose(0, 2), -2, True),
        case(draw.distinct(3, 1), 1),
        case(draw(), 0),
        kink(TIES, 1),
        kink(WITH_NAN, 1),
    ]


for over_one_dim in (aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default):
    register(Op(over_one_dim, (composed(self=_put_back),), along_a_dim))

register(
    Op(
        aten.kthvalue.default,
        (composed(self=_put_back),),
        lambda draw: [case(draw.distinct(3, 4), 2, 1), case(draw.distinct(4, 3).t(), 1, 0, True)],
    )
)


def _put_all_back(c: Call, ct: Tensor, _: None = None) -> Tensor:
    return _put_back(c, ct, keepdim=True)


register(
    Op(
        aten.topk.default,
        (composed(self=_put_all_back),),
        lambda draw: [case(draw.distinct(3, 5), 2), case(draw.distinct(5, 3).t(), 2, 1, False, False), case(draw(), 1)],
    )
)
register(
    Op(
        aten.sort.default,
        (composed(self=_put_all_back),),
        lambda draw: [case(draw.distinct(3, 5)), case(draw.distinct(5, 3).t(), 0, True), case(draw()), kink(TIES)],
    )
)
register(
    Op(
        aten.sort.stable,
        (composed(self=_put_all_back),),
        lambda draw: [
            case(draw.distinct(3, 5), stable=True),
            case(draw.distinct(5, 3).t(), stable=True, dim=0),
            kink(TIES, stable=True),
        ],
    )
)


# y = max of all x        ct_x = ct / m at the m elements that equal y (that are NaN, if y is), 0 elsewhere
def _share(c: Call, ct: Tensor) -> Tensor:
    is_extreme = (c.self == c.out).logical_or(c.self.isnan().logical_and(c.out.isnan()))
    share = ct / is_extreme.sum()
    if c.self.is_cuda:
        return is_extreme * share  # as eager does on CUDA; it gives -0 where eager on the CPU gives 0
    return aten.where(is_extreme, share, 0.0).contiguous()


for over_all_dims in (aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default):
    register(
        Op(
            over_all_dims,
            (composed(self=_share),),
            lambda draw: [
                case(draw.distinct(3, 5)),
                case(draw.distinct(2, 3, 4).transpose(0, 2)),
                case(draw()),
                kink(TIES),
                kink(WITH_NAN),
            ],
        )
    )


# y = max over dims        ct_x = ct / m at the m elements that equal y, 0 elsewhere
def _restored(tensor: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The tensor reshaped so that the reduced dims are there with size 1."""
    if keepdim:
        return tensor
    num_dims = tensor.dim() + len(dims)
    sizes = iter(tensor.shape)
    reduced = {dim % num_dims for dim in dims}
    return tensor.reshape([1 if dim in reduced else next(sizes) for dim in range(num_dims)])


def _share_along(x: Tensor, ct: Tensor, out: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    is_extreme = _restored(out, dims, keepdim) == x
    return (_restored(ct, dims, keepdim) / is_extreme.sum(list(dims), keepdim=True)) * is_extreme


for over_dims in (aten.amax.default, aten.amin.default):
    register(
        Op(
            over_dims,
            (composed(self=lambda c, ct: _share_along(c.self, ct, c.out, c.dim, c.keepdim)),),
            lambda draw: [
                case(draw.distinct(3, 4)),
                case(draw.distinct(3, 4), [1]),
                case(draw.distinct(2, 3, 4).transpose(0, 2), [0, -1], True),
                case(draw.distinct(2, 3, 4), [-1, 0]),
                kink(TIES, [1]),
                kink(TIES),
                kink(WITH_NAN, [1]),
            ],
        )
    )


def _aminmax(c: Call, ct_min: Tensor | None, ct_max: Tensor | None) -> Tensor:
    dims = range(c.self.dim()) if c.dim is None else [c.dim]
    parts = [
        _share_along(c.self, ct, out, list(dims), c.keepdim)
        for ct, out in zip((ct_min, ct_max), c.outs, strict=True)
        if ct is not None
    ]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


register(
    Op(
        aten.aminmax.default,
        (composed(self=_aminmax),),
        lambda draw: [
            case(draw.distinct(3, 4)),
            case(draw.distinct(4, 3).t(), dim=1),
            case(draw.distinct(3, 4), dim=0, keepdim=True),
            kink(TIES, dim=1),
        ],
    )
)
