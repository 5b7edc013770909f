"""`scatter_reduce`: y = x with the values of s reduced into it at the positions i: sum, mean, product, extremum.

In: x, s, i, y. Out: ct_x and ct_s. The values that are reduced at a position share its cotangent.
"""

import torch

from undertow.rules.registry import Call, Case, Op, Sampler, case, composed, kink, register

aten = torch.ops.aten
Tensor = torch.Tensor


def _untouched(c: Call, ct: Tensor) -> Tensor:
    """`ct` with zeros where x was left out of the reduction."""
    return ct if c.include_self else ct.scatter(c.dim, c.index, 0)


def _num_averaged(c: Call, ct: Tensor) -> Tensor:
    """How many values were averaged at each position, at least 1."""
    count = aten.ones_like(ct) if c.include_self else aten.zeros_like(ct)
    count = count.scatter_add(c.dim, c.index, aten.ones_like(c.src))
    return aten.where(count == 0, 1.0, count)


def _extreme_share(c: Call, ct: Tensor) -> Tensor:
    """The cotangent of each position, divided by the number of values that equal the extremum there."""
    is_extreme = (c.self == c.out).to(c.self.dtype)
    also_extreme = (c.src == c.out.gather(c.dim, c.index)).to(c.self.dtype)
    return ct / is_extreme.scatter_add(c.dim, c.index, also_extreme)


# sum: ct        mean: ct / n        extremum: ct / m if x equals it        prod: ct times the product of the others
def _ct_self(c: Call, ct: Tensor) -> Tensor:
    if c.reduce == "sum":
        return _untouched(c, ct)
    if c.reduce == "mean":
        return _untouched(c, ct / _num_averaged(c, ct))
    if c.reduce in ("amax", "amin"):
        return _untouched(c, (c.self == c.out) * _extreme_share(c, ct))
    without_zeros = c.self.masked_fill(c.self == 0, 1)
    product = without_zeros.scatter_reduce(c.dim, c.index, c.src, "prod", include_self=c.include_self)
    return _untouched(c, (ct * product) / without_zeros)


def _ct_src(c: Call, ct: Tensor) -> Tensor:
    if c.reduce == "sum":
        return ct.gather(c.dim, c.index)
    if c.reduce == "mean":
        count = _num_averaged(c, ct).gather(c.dim, c.index)
        return ct.gather(c.dim, c.index) / count
    if c.reduce in ("amax", "amin"):
        share = _extreme_share(c, ct).gather(c.dim, c.index)
        return (c.src == c.out.gather(c.dim, c.index)) * share
    is_zero = c.src == 0
    num_zeros = aten.zeros_like(c.self).scatter_add(c.dim, c.index, is_zero.to(c.self.dtype)).gather(c.dim, c.index)
    is_only_zero = is_zero & (num_zeros == 1)
    others = c.self.scatter_reduce(
        c.dim, c.index, c.src.masked_fill(is_only_zero, 1), "prod", include_self=c.include_self
    )
    slope = (ct * c.out).gather(c.dim, c.index) / c.src.masked_fill(is_zero, 1)
    return aten.where(is_only_zero, (ct * others).gather(c.dim, c.index), slope)


def _samples(draw: Sampler) -> list[Case]:
    index = torch.tensor([[0, 1, 1], [2, 2, 2], [3, 0, 3]])
    calls = [
        case(draw.distinct(3, 4), 1, index, draw.distinct(3, 3) + 0.02, reduce, include_self=include_self)
        for reduce in ("sum", "mean", "amax", "amin", "prod")
        for include_self in (True, False)
    ]
    calls += [case(draw.distinct(4, 3).t(), 1, index, draw.distinct(3, 3) + 0.02, "prod")]
    zeros, ones = torch.zeros(3, 4).double(), torch.ones(3, 3).double()
    calls += [kink(zeros, 1, index, ones * 0, reduce) for reduce in ("mean", "amax", "amin", "prod")]
    return [*calls, kink(zeros + 2, 1, index, torch.eye(3).double(), "prod")]


register(Op(aten.scatter_reduce.two, (composed(self=_ct_self, src=_ct_src),), _samples))
