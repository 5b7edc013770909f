"""Distances between all pairs of rows.

In: two matrices of rows, or one, and the distances. Out: the cotangents of the matrices. y[i, j] = |a[i] - b[j]| in the
p-norm, with d = a[i] - b[j]:

    ct_a[i] = sum_j ct_y[i, j] sign(d) |d|^(p - 1) / y[i, j]^(p - 1)        and the same for b with the opposite sign

The derivative at distance zero is zero.
"""

from __future__ import annotations

import math

import torch

from undertow.rules.registry import Call, Case, Op, Sampler, Vjp, case, composed, fused, register

aten = torch.ops.aten


def _derivative(difference: torch.Tensor, distance: torch.Tensor, p: float) -> torch.Tensor:
    """d distance / d difference, with the vectors in the last dimension."""
    if p == 0:
        return torch.zeros_like(difference)
    if p == 1:
        return difference.sign()
    if math.isinf(p):
        return difference.sign() * (difference.abs() == distance)
    is_zero = distance == 0
    ratio = difference / torch.where(is_zero, 1.0, distance)
    if p != 2:
        is_flat = ratio == 0
        ratio = torch.where(is_flat, 0.0, ratio.sign() * torch.where(is_flat, 1.0, ratio.abs()).pow(p - 1))
    return ratio.masked_fill(is_zero, 0)


def _ct_pairs(c: Call, ct: torch.Tensor) -> torch.Tensor:
    difference = c.x1.unsqueeze(-2) - c.x2.unsqueeze(-3)
    return ct.unsqueeze(-1) * _derivative(difference, c.out.unsqueeze(-1), c.p)


def _pair_samples(draw: Sampler) -> list[Case]:
    orders = (2.0, 1.0, math.inf, 3.0, 1.5)
    return [case(draw(3, 4), draw(5, 4), p, None) for p in orders] + [case(draw(2, 3, 4), draw(2, 2, 4), 2.0, None)]


register(
    Op(
        aten._cdist_forward.default,
        vjps=(
            fused(
                x1=lambda c, ct: aten._cdist_backward(ct.contiguous(), c.x1, c.x2, c.p, c.out),
                x2=lambda c, ct: aten._cdist_backward(ct.mT.contiguous(), c.x2, c.x1, c.p, c.out.mT.contiguous()),
            ),
            composed(
                x1=lambda c, ct: _ct_pairs(c, ct).sum(-2),
                x2=lambda c, ct: -_ct_pairs(c, ct).sum(-3),
            ),
        ),
        samples=_pair_samples,
    )
)


# The Euclidean distance of many rows, from |a|^2 + |b|^2 - 2 a b, with q = ct_y / y:
# ct_a = a sum_j q - q b        ct_b = b sum_i q - q^T a
def _ct_euclidean_left(c: Call, ratio: torch.Tensor) -> torch.Tensor:
    return c.x1 * ratio.sum(-1, keepdim=True) - ratio.matmul(c.x2)


def _ct_euclidean_right(c: Call, ratio: torch.Tensor) -> torch.Tensor:
    return c.x2 * ratio.sum(-2).unsqueeze(-1) - ratio.mT.matmul(c.x1)


# Filling in place preserves the cotangent's layout, on which the bits of the products depend.
def _ratio_in_place(c: Call, ct: torch.Tensor) -> torch.Tensor:
    return (ct / c.out).masked_fill_(c.out == 0, 0)


def _ratio(c: Call, ct: torch.Tensor) -> torch.Tensor:
    is_zero = c.out == 0
    return (ct / torch.where(is_zero, 1.0, c.out)).masked_fill(is_zero, 0)


_IN_PLACE = {
    "x1": lambda c, ct: _ct_euclidean_left(c, _ratio_in_place(c, ct)),
    "x2": lambda c, ct: _ct_euclidean_right(c, _ratio_in_place(c, ct)),
}

register(
    Op(
        aten._euclidean_dist.default,
        vjps=(
            Vjp("in place", _IN_PLACE, is_composed=False),
            composed(
                x1=lambda c, ct: _ct_euclidean_left(c, _ratio(c, ct)),
                x2=lambda c, ct: _ct_euclidean_right(c, _ratio(c, ct)),
            ),
        ),
        samples=lambda draw: [case(draw(3, 4), draw(5, 4)), case(draw(2, 3, 4), draw(2, 5, 4))],
    )
)


# The distances between the rows of one matrix, the upper triangle row by row
def _ct_rows(c: Call, ct: torch.Tensor) -> torch.Tensor:
    first, second = torch.triu_indices(c.self.shape[0], c.self.shape[0], 1, device=ct.device)
    difference = c.self.index_select(0, first) - c.self.index_select(0, second)
    ct_pairs = ct.unsqueeze(1) * _derivative(difference, c.out.unsqueeze(1), c.p)
    zeros = torch.zeros(c.self.shape, dtype=ct.dtype, device=ct.device)
    return zeros.index_add(0, first, ct_pairs).index_add(0, second, -ct_pairs)


register(
    Op(
        aten._pdist_forward.default,
        vjps=(
            fused(self=lambda c, ct: aten._pdist_backward(ct, c.self, c.p, c.out)),
            composed(self=_ct_rows),
        ),
        samples=lambda draw: [case(draw(4, 3), p) for p in (2.0, 1.0, math.inf, 3.0, 1.5)],
    )
)
