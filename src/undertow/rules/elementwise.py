"""Functions of one number, applied to every element: powers, exponentials, logarithms, trigonometry, rounding.

In: `c.self`, sometimes `c.out`. Out: the cotangent of `self`. Each formula has eager's operations in eager's order,
because floating-point products do not associate. So it reads the output where eager saved the output.
"""

import math
from collections.abc import Callable

import torch

from undertow.rules.registry import Call, Case, Op, Sampler, case, composed, fused, kink, register

aten = torch.ops.aten
Tensor = torch.Tensor

LN2 = math.log(2)
LN10 = 2.3025850929940456  # eager's literal, one ulp from math.log(10)
TWO_OVER_SQRT_PI = 2 / math.sqrt(math.pi)


def over(low: float, high: float) -> Callable[[Sampler], list[Case]]:
    """Samples with arguments between `low` and `high`: a matrix, a transposed one, a 0-dim tensor."""

    def samples(draw: Sampler) -> list[Case]:
        shapes = ((3, 5), (2, 3, 4), ())
        plain, permuted, scalar = (draw.uniform(low, high, *shape) for shape in shapes)
        return [case(plain), case(permuted.transpose(0, 2)), case(scalar)]

    return samples


def away_from_kinks(draw: Sampler) -> list[Case]:
    """A matrix and a transposed tensor without a zero; then zeros."""
    return [case(draw.distinct(3, 4)), case(draw.distinct(2, 3, 4).transpose(0, 2)), kink(torch.zeros(2, 2))]


# y = |x|        ct_x = ct sgn x        (0 at 0)
register(Op(aten.abs.default, (composed(self=lambda c, ct: ct * aten.sgn(c.self)),), away_from_kinks))

# y = -x        ct_x = -ct
register(Op(aten.neg.default, (composed(self=lambda c, ct: -ct),), over(-2, 2)))

# Piecewise constant: the derivative is 0 wherever it exists, and eager takes 0 at the jumps too.
for piecewise_constant in (
    aten.sign.default,
    aten.floor.default,
    aten.ceil.default,
    aten.round.default,
    aten.trunc.default,
):
    register(Op(piecewise_constant, (composed(self=lambda c, ct: aten.zeros_like(ct)),), over(0.1, 0.4)))

# y = sgn x        ct_x = 0, a ZeroTensor as in eager; complex numbers go through autograd
register(
    Op(
        aten.sgn.default,
        (composed(self=lambda c, ct: aten._efficientzerotensor(ct.shape, dtype=ct.dtype, device=ct.device)),),
        over(0.1, 0.4),
    )
)

register(
    Op(
        aten.round.decimals,
        (composed(self=lambda c, ct: aten.zeros_like(ct)),),
        lambda draw: [case(draw.uniform(0.01, 0.04, 3, 4), decimals=1)],
    )
)

# y = x - trunc x        ct_x = ct
register(Op(aten.frac.default, (composed(self=lambda c, ct: ct),), over(0.1, 0.9)))

# y = x in radians        ct_x = ct pi / 180
register(Op(aten.deg2rad.default, (composed(self=lambda c, ct: ct * (math.pi / 180)),), over(-90, 90)))
register(Op(aten.rad2deg.default, (composed(self=lambda c, ct: ct * (180 / math.pi)),), over(-2, 2)))

# y = x, infinities and NaN replaced        ct_x = ct where x is finite, else 0
register(
    Op(
        aten.nan_to_num.default,
        (composed(self=lambda c, ct: ct * torch.isfinite(c.self)),),
        lambda draw: [case(draw(3, 4)), kink(torch.tensor([1.0, math.inf, -math.inf, math.nan]).double())],
    )
)

# y = exp x        ct_x = ct y
register(Op(aten.exp.default, (composed(self=lambda c, ct: ct * c.out),), over(-2, 2)))

# y = 2^x        ct_x = ct y ln 2
register(Op(aten.exp2.default, (composed(self=lambda c, ct: ct * c.out * LN2),), over(-2, 2)))

# y = exp x - 1        ct_x = ct (y + 1)
register(Op(aten.expm1.default, (composed(self=lambda c, ct: ct * (c.out + 1)),), over(-2, 2)))

# y = ln x        ct_x = ct / x
register(Op(aten.log.default, (composed(self=lambda c, ct: ct / c.self),), over(0.5, 3)))
register(Op(aten.log2.default, (composed(self=lambda c, ct: ct / (c.self * LN2)),), over(0.5, 3)))
register(Op(aten.log10.default, (composed(self=lambda c, ct: ct / (c.self * LN10)),), over(0.5, 3)))
register(Op(aten.log1p.default, (composed(self=lambda c, ct: ct / (c.self + 1)),), over(-0.5, 2)))

# y = sqrt x        ct_x = ct / (2 y)
register(Op(aten.sqrt.default, (composed(self=lambda c, ct: ct / (c.out * 2)),), over(0.5, 3)))

# y = 1 / sqrt x        ct_x = -1/2 ct y^3
register(Op(aten.rsqrt.default, (composed(self=lambda c, ct: (ct * -0.5) * c.out.pow(3)),), over(0.5, 3)))

# y = 1 / x        ct_x = -ct y^2
register(Op(aten.reciprocal.default, (composed(self=lambda c, ct: -ct * (c.out * c.out)),), over(0.5, 3)))


def _pow_tensor_scalar(c: Call, ct: Tensor) -> Tensor:
    if c.exponent == 0:
        return aten.zeros_like(c.self, memory_format=torch.contiguous_format)
    exponent = float(c.exponent)
    return ct * (c.self.pow(exponent - 1) * exponent)


register(
    Op(
        aten.pow.Tensor_Scalar,
        # y = x^p        ct_x = ct p x^(p-1), and 0 for p = 0 even at x = 0
        (composed(self=_pow_tensor_scalar),),
        lambda draw: [
            case(draw(3, 4), 2),
            case(draw(2, 3, 4).transpose(0, 2), 3),
            case(draw.uniform(0.5, 2, 3), 0.5),
            case(draw.uniform(0.5, 2, 3), -1.5),
            case(draw(2, 3, 4).transpose(0, 2), 0),
            case(draw(), 2.0),
        ],
    )
)

# Trigonometric functions and their inverses.
register(Op(aten.sin.default, (composed(self=lambda c, ct: ct * c.self.cos()),), over(-2, 2)))
register(Op(aten.cos.default, (composed(self=lambda c, ct: ct * -c.self.sin()),), over(-2, 2)))
# y = tan x        ct_x = ct (1 + y^2)
register(Op(aten.tan.default, (composed(self=lambda c, ct: ct * (c.out.pow(2) + 1)),), over(-1, 1)))
# y = asin x        ct_x = ct / sqrt(1 - x^2)
register(Op(aten.asin.default, (composed(self=lambda c, ct: ct * (-c.self * c.self + 1).rsqrt()),), over(-0.8, 0.8)))
register(Op(aten.acos.default, (composed(self=lambda c, ct: ct * -(-c.self * c.self + 1).rsqrt()),), over(-0.8, 0.8)))
# y = atan x        ct_x = ct / (1 + x^2)
register(Op(aten.atan.default, (composed(self=lambda c, ct: ct / (c.self * c.self + 1)),), over(-2, 2)))

# Hyperbolic functions and their inverses; tanh is in activations.py.
register(Op(aten.sinh.default, (composed(self=lambda c, ct: ct * c.self.cosh()),), over(-2, 2)))
register(Op(aten.cosh.default, (composed(self=lambda c, ct: ct * c.self.sinh()),), over(-2, 2)))
# y = asinh x        ct_x = ct / sqrt(x^2 + 1)
register(Op(aten.asinh.default, (composed(self=lambda c, ct: ct * (c.self.pow(2) + 1).rsqrt()),), over(-2, 2)))
# y = acosh x        ct_x = ct / sqrt(x^2 - 1)
register(Op(aten.acosh.default, (composed(self=lambda c, ct: ct * (c.self * c.self - 1).rsqrt()),), over(1.5, 3)))
# y = atanh x        ct_x = ct / (1 - x^2)        (eager's product with 1 decides the strides of the quotient)
register(Op(aten.atanh.default, (composed(self=lambda c, ct: ct * 1 / (1 - c.self.pow(2))),), over(-0.8, 0.8)))

# y = erf x        ct_x = 2 / sqrt(pi) exp(-x^2) ct
register(
    Op(
        aten.erf.default,
        (composed(self=lambda c, ct: (-c.self.pow(2)).exp() * TWO_OVER_SQRT_PI * ct),),
        over(-2, 2),
    )
)
register(
    Op(
        aten.erfc.default,
        (composed(self=lambda c, ct: (-c.self.pow(2)).exp() * -TWO_OVER_SQRT_PI * ct),),
        over(-2, 2),
    )
)
# y = erfinv x        ct_x = sqrt(pi) / 2 exp(y^2) ct
register(
    Op(
        aten.erfinv.default,
        (composed(self=lambda c, ct: c.self.erfinv().pow(2).exp() * (0.5 * math.sqrt(math.pi)) * ct),),
        over(-0.8, 0.8),
    )
)

# y = ln |Gamma(x)|        ct_x = ct digamma x; the derivative of each polygamma function is the next one
register(Op(aten.lgamma.default, (composed(self=lambda c, ct: ct * c.self.digamma()),), over(0.5, 3)))
register(Op(aten.digamma.default, (composed(self=lambda c, ct: ct * aten.polygamma(1, c.self)),), over(0.5, 3)))
register(
    Op(
        aten.polygamma.default,
        (composed(self=lambda c, ct: ct * aten.polygamma(c.n + 1, c.self)),),
        lambda draw: [case(1, draw.uniform(0.5, 3, 3, 4)), case(2, draw.uniform(0.5, 3, 4, 3).t())],
    )
)


def _logit_composed(c: Call, ct: Tensor) -> Tensor:
    low = 0.0 if c.eps is None else c.eps
    outside = math.nan if c.eps is None else 0.0
    is_inside = (c.self >= low) & (c.self <= 1.0 - low)
    return aten.where(is_inside, ct / (c.self * (1.0 - c.self)), outside)


register(
    Op(
        aten.logit.default,
        # y = ln(x / (1 - x)) of x clamped to [eps, 1 - eps]        ct_x = ct / (x (1 - x)), 0 where clamped
        (fused(self=lambda c, ct: aten.logit_backward(ct, c.self, c.eps)), composed(self=_logit_composed)),
        lambda draw: [
            case(draw.uniform(0.2, 0.8, 3, 4)),
            case(draw.uniform(0.2, 0.8, 4, 3).t(), 0.1),
            case(torch.tensor([0.05, 0.5, 0.95]).double(), 0.1),
        ],
    )
)


def _sinc(c: Call, ct: Tensor) -> Tensor:
    angle = c.self * math.pi
    square = c.self * c.self * math.pi
    slope = ct * ((angle * angle.cos() - angle.sin()) / square)
    return aten.where(square == 0.0, 0.0, slope)


register(
    Op(
        aten.sinc.default,
        # y = sin(pi x) / (pi x)        ct_x = ct (pi x cos(pi x) - sin(pi x)) / (pi x^2), 0 at 0
        (composed(self=_sinc),),
        lambda draw: [case(draw.uniform(0.5, 2, 3, 4)), case(torch.tensor([0.0, 0.5]).double())],
    )
)


register(
    Op(
        aten._to_copy.default,
        (composed(self=lambda c, ct: ct.to(device=c.self.device, dtype=c.self.dtype)),),
        lambda draw: [
            case(draw(3, 4), dtype=torch.float64),
            case(draw(4, 3).t(), memory_format=torch.contiguous_format),
            case(draw(1, 2, 3, 4), memory_format=torch.channels_last),
            kink(draw(4, 3).t(), dtype=torch.float32),
            kink(draw(3, 4).float(), dtype=torch.float64),
            kink(draw(4, 3).t(), dtype=torch.bfloat16),
            kink(draw(3), dtype=torch.float16),
        ],
    )
)
