"""Running reductions: cumsum, cumprod, logcumsumexp, cummax, cummin.

In: `c.self`, `c.out` or the recorded positions. Out: the cotangent of `self`, reduced from the end to the start.
"""

import torch

from undertow.rules.registry import Call, Case, Op, Sampler, Vjp, case, composed, kink, register

aten = torch.ops.aten
Tensor = torch.Tensor


def along_dims(draw: Sampler) -> list[Case]:
    """A dim of a matrix, of a transposed tensor, of size 1, of a 0-dim tensor."""
    return [
        case(draw.distinct(3, 4), 1),
        case(draw.distinct(2, 3, 4).transpose(0, 2), -2),
        case(draw.distinct(3, 1), 1),
        case(draw.distinct(1), 0),
        case(draw(), 0),
    ]


def _reversed_cumsum(ct: Tensor, dim: int) -> Tensor:
    return ct.flip(dim).cumsum(dim).flip(dim)


# y_k = sum of x_j, j <= k        ct_x_j = sum of ct_k, k >= j
def _cumsum(c: Call, ct: Tensor) -> Tensor:
    ct = ct.to(c.self.dtype)
    return ct if ct.numel() <= 1 or ct.shape[c.dim] == 1 else _reversed_cumsum(ct, c.dim)


register(
    Op(
        aten.cumsum.default,
        (composed(self=_cumsum),),
        lambda draw: [*along_dims(draw), kink(draw(3, 4).float(), 1, dtype=torch.float64)],
    )
)


# y_k = prod of x_j, j <= k        ct_x_j = sum of ct_k y_k / x_j, k >= j
# From the first zero, x_z, on all y are 0, so only x_z has a slope there: y_{z-1} sum of ct_k prod x_(z+1..k), up to
# the second zero. As in eager, time is linear in the length; differentiating this form again is wrong at a zero.
def _cumprod_linear(c: Call, ct: Tensor) -> Tensor:
    x, out, dim, ct = c.self, c.out, c.dim, ct.to(c.self.dtype)
    if x.numel() <= 1 or x.shape[dim] == 1:
        return ct
    num_zeros = (x == 0).cumsum(dim)
    is_before = num_zeros == 0
    slope_before = _reversed_cumsum(aten.where(is_before, out * ct, 0.0), dim) / x
    is_between = num_zeros == 1
    first_zero = is_between.max(dim, keepdim=True)[1]
    is_first_zero = aten.zeros_like(is_between).scatter(dim, first_zero, 1).logical_and(is_between)
    factors = x.masked_fill(is_between.logical_and(is_first_zero.logical_not()).logical_not(), 1.0).cumprod(dim)
    past_zero = (factors * ct.masked_fill(num_zeros != 1, 0.0)).sum(dim, keepdim=True)
    before_zero = aten.where(first_zero == 0, 1.0, out.gather(dim, (first_zero - 1).clamp(min=0)))
    return aten.where(is_first_zero, past_zero * before_zero, aten.where(is_before, slope_before, 0.0))


def _pairwise(tensor: Tensor, dim: int, as_row: bool) -> Tensor:
    """`tensor` with `dim` last, repeated along a new dim: [..., j, k] is the element at k (`as_row`) or at j."""
    moved = tensor.movedim(dim, -1)
    return moved.unsqueeze(-2 if as_row else -1).expand(*moved.shape, moved.shape[-1])


# The same in quadratic space, without division: y_k / x_j is the running product with 1 instead of x_j.
def _cumprod_pairwise(c: Call, ct: Tensor) -> Tensor:
    ct = ct.to(c.self.dtype)
    if c.self.dim() == 0:
        return ct
    size = c.self.shape[c.dim]
    position = aten.arange(size, device=ct.device)
    is_itself = position.unsqueeze(1) == position
    partial = aten.where(is_itself, 1.0, _pairwise(c.self, c.dim, as_row=True)).cumprod(-1)
    terms = aten.where(position >= position.unsqueeze(1), partial * _pairwise(ct, c.dim, as_row=True), 0.0)
    return terms.sum(-1).movedim(-1, c.dim)


def _with_zeros(*positions: int) -> Tensor:
    x = torch.arange(1.0, 6.0).double().repeat(2, 1)
    x[0, list(positions)] = 0
    return x


register(
    Op(
        aten.cumprod.default,
        (
            Vjp("linear", {"self": _cumprod_linear}, is_composed=False),
            composed(self=_cumprod_pairwise),
        ),
        lambda draw: [
            *along_dims(draw),
            *(case(_with_zeros(*positions), 1) for positions in ((0,), (2,), (1, 3), (4,))),
            kink(draw(3, 4).float(), 1, dtype=torch.float64),
        ],
    )
)


# y_k = ln sum of exp x_j, j <= k        ct_x_j = sum of ct_k exp(x_j - y_k), k >= j
# Eager adds up the positive and the negative ct separately, as logarithms.
def _logcumsumexp_by_sign(c: Call, ct: Tensor) -> Tensor:
    if ct.dim() == 0 or ct.numel() == 0:
        return ct
    lowest = torch.finfo(ct.dtype).min
    log_size = ct.abs().log()

    def part(has_sign: Tensor) -> Tensor:
        log_ct = aten.where(has_sign, log_size, lowest) - c.out
        return (log_ct.flip(c.dim).logcumsumexp(c.dim).flip(c.dim) + c.self).exp()

    return part(ct > 0) - part(ct < 0)


def _logcumsumexp_pairwise(c: Call, ct: Tensor) -> Tensor:
    if ct.dim() == 0 or ct.numel() == 0:
        return ct
    position = aten.arange(c.self.shape[c.dim], device=ct.device)
    gap = _pairwise(c.self, c.dim, as_row=False) - _pairwise(c.out, c.dim, as_row=True)
    weight = aten.where(position >= position.unsqueeze(1), gap, float("-inf")).exp()
    return (weight * _pairwise(ct, c.dim, as_row=True)).sum(-1).movedim(-1, c.dim)


register(
    Op(
        aten.logcumsumexp.default,
        (
            Vjp("signed", {"self": _logcumsumexp_by_sign}, is_composed=False),
            composed(self=_logcumsumexp_pairwise),
        ),
        along_dims,
    )
)

# y_k = max of x_j, j <= k        ct_k goes to the position recorded for k
for running_extremum in (aten.cummax.default, aten.cummin.default):
    register(
        Op(
            running_extremum,
            (composed(self=lambda c, ct, _: ct.new_zeros(c.self.shape).scatter_add(c.dim, c.outs[1], ct)),),
            along_dims,
        )
    )
