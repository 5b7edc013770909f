"""Reductions: sums, means, products, variances, norms, extrema, and the running ones.

In: `c.self`, `c.out`, the reduced dims. Out: the cotangent of `self`, spread back over the reduced dims.

In a few cases eager branches on values (is there a zero in a product, is the maximum NaN). A formula must not: it
computes both branches and chooses with `where`, which gives the same bits.
"""

import math
from collections.abc import Callable, Sequence

import torch

from undertow.rules.registry import Call, Case, Formula, Op, Sampler, Vjp, case, composed, kink, register

aten = torch.ops.aten
Tensor = torch.Tensor


def _restore_dims(tensor: Tensor, dims: Sequence[int] | None, num_dims: int) -> Tensor:
    """Put the dims that a reduction removed back, with size 1; None stands for all of them."""
    if dims is not None and len(dims) == 1:
        return tensor.unsqueeze(dims[0])
    for dim in sorted(d % num_dims for d in (range(num_dims) if dims is None else dims)):
        tensor = tensor.unsqueeze(dim)
    return tensor


def _spread(ct: Tensor, shape: torch.Size, dims: Sequence[int] | None, keepdim: bool) -> Tensor:
    """The cotangent of a summed tensor: the same for every element of a sum."""
    if dims and not keepdim and shape:
        ct = _restore_dims(ct, dims, len(shape))
    return ct.expand(shape)


def _num_reduced(shape: torch.Size, dims: Sequence[int] | None) -> int:
    """How many elements are reduced to one."""
    return math.prod(shape[dim] for dim in (dims if dims else range(len(shape)))) if shape else 1


def over_dims(draw: Sampler) -> list[Case]:
    """One dim, several, negative; with keepdim or without; transposed; 0-dim."""
    return [
        case(draw(3, 4), [1]),
        case(draw(3, 4), [0], True),
        case(draw(2, 3, 4), [-1, 0]),
        case(draw(2, 3, 4).transpose(0, 2), [0, 1], True),
        case(draw(2, 3, 4).transpose(0, 2), [1]),
        case(draw(1, 3), [0]),
        case(draw(), [0]),
        case(draw(3, 1).expand(3, 4), [1]),
    ]


def over_all(draw: Sampler) -> list[Case]:
    """A matrix, a transposed tensor, one element, a 0-dim tensor."""
    return [case(draw(3, 4)), case(draw(2, 3, 4).transpose(0, 2)), case(draw(1)), case(draw())]


# y = sum of x        ct_x = ct for every summand
register(
    Op(
        aten.sum.default,
        (composed(self=lambda c, ct: ct.expand(c.self.shape)),),
        lambda draw: [*over_all(draw), kink(draw(3, 4).float(), dtype=torch.float64)],
    )
)
register(
    Op(
        aten.sum.dim_IntList,
        (composed(self=lambda c, ct: _spread(ct, c.self.shape, c.dim, c.keepdim)),),
        lambda draw: [
            *over_dims(draw),
            case(draw(3, 4), None),
            case(draw(3, 4), []),
            case(draw(0, 4), [0]),
            kink(draw(3, 4).float(), [1], dtype=torch.float64),
        ],
    )
)

# y = mean of x over n elements        ct_x = ct / n
register(
    Op(
        aten.mean.default,
        (composed(self=lambda c, ct: ct.expand(c.self.shape) / c.self.numel()),),
        lambda draw: [*over_all(draw), kink(draw(3, 4).float(), dtype=torch.float64)],
    )
)


def _mean(ct: Tensor, shape: torch.Size, dims: Sequence[int] | None, keepdim: bool) -> Tensor:
    return _spread(ct, shape, dims, keepdim) / _num_reduced(shape, dims)


register(
    Op(
        aten.mean.dim,
        (composed(self=lambda c, ct: _mean(ct, c.self.shape, c.dim, c.keepdim)),),
        lambda draw: [
            *over_dims(draw),
            case(draw(3, 4), None),
            kink(draw(3, 4).float(), [1], dtype=torch.float64),
            kink(draw(0, 4), [0]),
        ],
    )
)

# y = sum of what is not NaN        ct_x = ct where x is not NaN, else 0
register(
    Op(
        aten.nansum.default,
        (
            composed(
                self=lambda c, ct: (
                    _spread(ct.to(c.self.dtype), c.self.shape, c.dim, c.keepdim) * c.self.isnan().logical_not()
                ),
            ),
        ),
        lambda draw: [*over_dims(draw), kink(torch.tensor([1.0, math.nan]).double(), [0])],
    )
)

# y = sum of the diagonal        ct_x = ct on the diagonal
register(
    Op(
        aten.trace.default,
        (
            composed(
                self=lambda c, ct: aten.diagonal_scatter(ct.new_zeros(c.self.shape), ct.expand(min(c.self.shape))),
            ),
        ),
        lambda draw: [case(draw(3, 4)), case(draw(4, 3).t())],
    )
)


# y = prod of x        ct_x = ct y / x; with a zero among the factors, ct times the product of all the others
def _others_product(x: Tensor, dim: int) -> Tensor:
    """For each element, the product of the others along `dim`: of those before it times those after it."""
    size = x.shape[dim]
    one = aten.ones_like(x.narrow(dim, 0, 1), memory_format=torch.contiguous_format)
    before = aten.cat([one, x.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    after = aten.cat([one, x.narrow(dim, 1, size - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * after


def _prod_all_without_division(c: Call, ct: Tensor) -> Tensor:
    x = c.self.to(ct.dtype)
    if x.numel() <= 1:
        return ct.expand(x.shape)
    return (ct * _others_product(x.reshape(-1), 0)).view(x.shape)


def _prod_all(c: Call, ct: Tensor) -> Tensor:
    x = c.self.to(ct.dtype)
    if x.dim() == 0:
        return ct
    num_zeros = (x == 0).sum()
    with_zeros = aten.where(num_zeros > 1, 0.0, _prod_all_without_division(c, ct))
    return aten.where(num_zeros == 0, ct * (c.out / x), with_zeros)


def _prod_dim_without_division(c: Call, ct: Tensor) -> Tensor:
    x = c.self.to(ct.dtype)
    if x.dim() == 0:
        return ct
    ct = ct if c.keepdim else ct.unsqueeze(c.dim)
    if x.numel() == 0 or x.shape[c.dim] == 1:
        return ct.expand(x.shape)
    return ct * _others_product(x, c.dim)


def _prod_dim(c: Call, ct: Tensor) -> Tensor:
    x = c.self.to(ct.dtype)
    if x.dim() == 0:
        return ct
    full_ct, out = (ct, c.out) if c.keepdim else (ct.unsqueeze(c.dim), c.out.unsqueeze(c.dim))
    return aten.where((x == 0).any().logical_not(), full_ct * (out / x), _prod_dim_without_division(c, ct))


def _with_zeros(num_zeros: int) -> Tensor:
    x = torch.arange(1.0, 7.0).double().reshape(2, 3)
    x.view(-1)[:num_zeros] = 0
    return x


register(
    Op(
        aten.prod.default,
        (
            Vjp("quotient", {"self": _prod_all}, is_composed=False),
            composed(self=_prod_all_without_division),
        ),
        lambda draw: [
            *over_all(draw),
            *(case(_with_zeros(n)) for n in (1, 2)),
            kink(draw(3).float(), dtype=torch.float64),
        ],
    )
)
register(
    Op(
        aten.prod.dim_int,
        (
            Vjp("quotient", {"self": _prod_dim}, is_composed=False),
            composed(self=_prod_dim_without_division),
        ),
        lambda draw: [
            case(draw(3, 4), 1),
            case(draw(2, 3, 4).transpose(0, 2), -2, True),
            case(draw(3, 1), 1),
            case(draw(), 0),
            *(case(_with_zeros(n), 1) for n in (1, 2)),
        ],
    )
)


# y = sum of (x - mean)^2 / (n - k)        ct_x = 2 / (n - k) ct (x - mean)
def _var(x: Tensor, ct: Tensor, dims: Sequence[int] | None, correction: float | None, keepdim: bool) -> Tensor:
    correction = 1 if correction is None else correction
    if x.dim() == 0 or dims is None:
        freedom = x.numel() - correction
        if freedom <= 0:
            return ct * aten.where(x == x.mean(), math.nan, math.inf)
        return (ct * (2.0 / freedom)) * (x - x.mean())
    if not keepdim and x.dim() > 1:
        ct = _restore_dims(ct, dims, x.dim()) if dims else ct
    freedom = (math.prod(x.shape[dim] for dim in dims)) - correction
    return (ct * (2.0 / freedom if freedom else math.inf)) * (x - x.mean(list(dims), keepdim=True))


def _var_of(c: Call, ct: Tensor) -> Tensor:
    return _var(c.self, ct, c.dim, c.correction, c.keepdim)


# y = sqrt(var)        ct_var = ct / (2 y), 0 at y = 0
def _std(c: Call, ct: Tensor) -> Tensor:
    return _var(c.self, aten.where(c.out == 0, 0.0, ct / (c.out * 2)), c.dim, c.correction, c.keepdim)


def _and_mean(of_spread: Callable[[Call, Tensor], Tensor]) -> Formula:
    """The cotangent from a variance or deviation and the cotangent from the mean, added; either may be missing."""

    def formula(c: Call, ct_spread: Tensor | None, ct_mean: Tensor | None) -> Tensor:
        parts = [] if ct_spread is None else [of_spread(c, ct_spread)]
        parts += [] if ct_mean is None else [_mean(ct_mean, c.self.shape, c.dim, c.keepdim)]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    return formula


def _variances(draw: Sampler) -> list[Case]:
    return [
        case(draw(3, 4)),
        case(draw(2, 3, 4).transpose(0, 2), correction=0.5),
        case(draw(3, 4), [1]),
        case(draw(3, 4), [1], correction=0),
        case(draw(2, 3, 4), [0, -1], keepdim=True),
        case(draw(2, 3, 4).transpose(0, 2), [0, 1], correction=2),
        case(draw(5), [0]),
        kink(torch.ones(3, 2).double(), [0]),
    ]


def _degenerate_variances(draw: Sampler) -> list[Case]:
    return [*_variances(draw), kink(draw(1)), kink(draw(3, 1), [1])]


register(
    Op(
        aten.var.correction,
        (composed(self=_var_of),),
        _degenerate_variances,
    )
)
register(
    Op(
        aten.std.correction,
        (composed(self=_std),),
        _degenerate_variances,
    )
)
register(Op(aten.var_mean.correction, (composed(self=_and_mean(_var_of)),), _variances))
register(Op(aten.std_mean.correction, (composed(self=_and_mean(_std)),), _variances))


# y = (sum |x|^p)^(1/p)        ct_x = ct sgn(x) |x|^(p-1) / y^(p-1), written so that no power is negative
def _norm(x: Tensor, ct: Tensor, out: Tensor, order: float, dims: Sequence[int], keepdim: bool) -> Tensor | None:
    if not keepdim and x.dim():
        ct, out = (_restore_dims(t, dims, x.dim()) if dims else t for t in (ct, out))
    if order == 0:
        return None
    if order == 1:
        return x.sgn() * ct
    if order == 2:
        return ct * aten.where(out == 0, 0.0, x / out)
    if math.isinf(order):
        size = x.abs()
        is_extreme = (size == out).logical_or(size.isnan())
        return x.sgn() * ((ct / is_extreme.sum(list(dims), keepdim=True)) * is_extreme)
    if order < 1:
        power = aten.where(x == 0, 0.0, x.abs().pow(order - 1))
        return x.sgn() * power * ct * out.pow(1 - order)
    scaled = x.sgn() * x.abs().pow(order - 1) if order < 2 else x * x.abs().pow(order - 2)
    return scaled * aten.where(out == 0, 0.0, ct / out.pow(order - 1))


register(
    Op(
        aten.linalg_vector_norm.default,
        (composed(self=lambda c, ct: _norm(c.self, ct, c.out, float(c.ord), c.dim or [], c.keepdim)),),
        lambda draw: [
            *(
                case(*arguments)
                for order in (1, 2, 3, 1.5, 0.5, math.inf, -math.inf)
                for arguments in (
                    (draw.distinct(3, 4), order),
                    (draw.distinct(3, 4), order, [1]),
                    (draw.distinct(2, 3, 4).transpose(0, 2), order, [0, 2], True),
                )
            ),
            *(kink(torch.zeros(2, 3).double(), order, [1]) for order in (0, 1, 2, 3, 1.5, 0.5, math.inf)),
            case(draw()),
            kink(draw(3, 4).float(), 3, [1], dtype=torch.float64),
        ],
    )
)


def _dist(c: Call, ct: Tensor) -> Tensor | None:
    return _norm(c.self - c.other, ct, c.out, float(c.p), [], keepdim=True)


def _negated_dist(c: Call, ct: Tensor) -> Tensor | None:
    ct_self = _dist(c, ct)
    return None if ct_self is None else -ct_self


register(
    Op(
        aten.dist.default,
        # y = |x - z|_p
        (composed(self=_dist, other=_negated_dist),),
        lambda draw: [
            case(draw(3, 4), draw(3, 4)),
            case(draw(3, 4), draw(4), 3),
            case(draw(4, 3).t(), draw(3, 4), 1.5),
        ],
    )
)


# y = ln sum exp x        ct_x = ct exp(x - y)
def _logsumexp(c: Call, ct: Tensor) -> Tensor:
    out = c.out
    if not c.keepdim and c.self.dim() and c.dim:
        ct, out = (_restore_dims(t, c.dim, c.self.dim()) for t in (ct, out))
    return ct * (c.self - out).exp()


register(Op(aten.logsumexp.default, (composed(self=_logsumexp),), over_dims))
