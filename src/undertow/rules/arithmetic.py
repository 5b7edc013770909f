"""Arithmetic of two or three tensors, element by element, with broadcasting and type promotion.

In: the operands, each a tensor or a Python number (`x * 2.0` is recorded as `mul.Tensor(x, 2.0)`). Out: one cotangent
per operand. It may have the broadcast shape and the promoted dtype; autodiff reduces and casts it afterwards.
"""

import math

import torch

from undertow.rules.registry import Call, Case, Op, Sampler, case, composed, kink, register

aten = torch.ops.aten
Tensor = torch.Tensor


def pairs(draw: Sampler) -> list[Case]:
    """Two operands: equal shapes, both broadcast, transposed, 0-dim, expanded, empty."""
    return [
        case(draw(3, 4), draw(3, 4)),
        case(draw(3, 1), draw(2, 1, 4)),
        case(draw(4, 3).t(), draw(4)),
        case(draw(2, 3, 4).permute(2, 0, 1), draw(2, 4, 3).permute(1, 0, 2)),
        case(draw(3), draw()),
        case(draw(3, 1).expand(3, 4), draw(3, 4)),
        case(draw(0, 4), draw(4)),
    ]


def promoted(draw: Sampler) -> list[Case]:
    """An operand that is a number, an integer tensor, or of another precision."""
    return [
        case(draw(3, 4), 2.5),
        case(draw(3, 4), 3),
        case(draw(3, 4), draw.integers(5, 4) + 1),
        case(draw.integers(5, 4) + 1, draw(3, 4)),
        kink(draw(3, 4).float(), draw(3, 1)),
        kink(draw(3, 4), draw(4).float()),
        kink(draw(3, 4).float(), draw()),
    ]


def positive_pairs(draw: Sampler) -> list[Case]:
    """The samples of `pairs` with elements above 1/2."""
    return [case(c.args[0].abs() + 0.5, c.args[1].abs() + 0.5) for c in pairs(draw)]


def _scaled(ct: Tensor, factor: float) -> Tensor:
    """`ct * factor`; eager leaves the factor 1 out."""
    return ct if factor == 1 else ct * factor


# z = x + a y        ct_x = ct        ct_y = a ct
register(
    Op(
        aten.add.Tensor,
        (composed(self=lambda c, ct: ct, other=lambda c, ct: _scaled(ct, c.alpha)),),
        lambda draw: [*pairs(draw), *promoted(draw), case(draw(3, 4), draw(4), alpha=2)],
    )
)
register(Op(aten.add.Scalar, (composed(self=lambda c, ct: ct),), lambda draw: [case(draw(3, 4), 2.0)]))

# z = x - a y        ct_x = ct        ct_y = -a ct
register(
    Op(
        aten.sub.Tensor,
        (composed(self=lambda c, ct: ct, other=lambda c, ct: _scaled(-ct, c.alpha)),),
        lambda draw: [*pairs(draw), *promoted(draw), case(draw(3, 4), draw(4), alpha=0.3)],
    )
)
register(Op(aten.sub.Scalar, (composed(self=lambda c, ct: ct),), lambda draw: [case(draw(3, 4), 2.0)]))

# z = y - a x        ct_x = -a ct        ct_y = ct
register(
    Op(
        aten.rsub.Tensor,
        (composed(self=lambda c, ct: _scaled(-ct, c.alpha), other=lambda c, ct: ct),),
        lambda draw: [*pairs(draw), case(draw(3, 4), draw(4), alpha=0.3)],
    )
)
register(
    Op(
        aten.rsub.Scalar,
        (composed(self=lambda c, ct: _scaled(-ct, c.alpha)),),
        lambda draw: [case(draw(3, 4), 2.0), case(draw(3, 4), 2, 3)],
    )
)

# z = x y        ct_x = ct y        ct_y = ct x
register(
    Op(
        aten.mul.Tensor,
        (composed(self=lambda c, ct: ct * c.other, other=lambda c, ct: ct * c.self),),
        lambda draw: [*pairs(draw), *promoted(draw), case(draw(3), draw.booleans(3))],
    )
)
register(Op(aten.mul.Scalar, (composed(self=lambda c, ct: ct * c.other),), lambda draw: [case(draw(3, 4), 2.5)]))


# z = x / y        ct_x = ct / y        ct_y = -ct (x / y / y); rounding the quotient leaves no slope
def _div_self(c: Call, ct: Tensor) -> Tensor:
    return ct / c.other


def _div_other(c: Call, ct: Tensor) -> Tensor:
    return -ct * ((c.self / c.other) / c.other)


def _div_mode_self(c: Call, ct: Tensor) -> Tensor:
    return _div_self(c, ct) if c.rounding_mode is None else aten.zeros_like(ct, dtype=c.self.dtype)


def _div_mode_other(c: Call, ct: Tensor) -> Tensor:
    return _div_other(c, ct) if c.rounding_mode is None else aten.zeros_like(ct, dtype=c.other.dtype)


def _quotients(draw: Sampler) -> list[Case]:
    return [*positive_pairs(draw), *promoted(draw)]


register(Op(aten.div.Tensor, (composed(self=_div_self, other=_div_other),), _quotients))
register(Op(aten.div.Scalar, (composed(self=_div_self),), lambda draw: [case(draw(3, 4), 3.0)]))
register(
    Op(
        aten.div.Tensor_mode,
        (composed(self=_div_mode_self, other=_div_mode_other),),
        lambda draw: [
            *(case(*c.args, rounding_mode=None) for c in positive_pairs(draw)),
            case(draw.uniform(1.1, 1.9, 3, 4), draw.uniform(0.96, 1.04, 4), rounding_mode="floor"),
            case(draw.uniform(1.1, 1.9, 3, 4), 1.0, rounding_mode="trunc"),
            kink(draw(3, 4).float(), draw(3, 1), rounding_mode="trunc"),
        ],
    )
)
register(
    Op(
        aten.div.Scalar_mode,
        (composed(self=_div_mode_self),),
        lambda draw: [
            case(draw(3, 4), 3.0, rounding_mode=None),
            case(draw.uniform(1.1, 1.9, 3, 4), 1.0, rounding_mode="floor"),
        ],
    )
)


# z = x^p        ct_x = ct p x^(p-1), 0 at p = 0        ct_p = ct z ln x, 0 at x = 0 and p >= 0
def _pow_base(c: Call, ct: Tensor) -> Tensor:
    return aten.where(c.exponent == 0.0, 0.0, ct * (c.exponent * c.self.pow(c.exponent - 1)))


def _pow_exponent(c: Call, ct: Tensor) -> Tensor:
    is_flat = aten.logical_and(c.self == 0, c.exponent >= 0)
    base = c.self.to(torch.result_type(c.self, c.exponent))
    return ct * aten.where(is_flat, 0.0, c.out * base.log())


def _pow_exponent_of_scalar(c: Call, ct: Tensor) -> Tensor:
    base = float(c.self)
    log_base = math.log(base) if base > 0 else (-math.inf if base == 0 else math.nan)
    slope = c.out * log_base
    return ct * (aten.where(c.exponent >= 0, 0.0, slope) if base == 0 else slope)


register(
    Op(
        aten.pow.Tensor_Tensor,
        (composed(self=_pow_base, exponent=_pow_exponent),),
        lambda draw: [
            *positive_pairs(draw),
            case(draw(3, 4), draw.integers(4, 4)),
            case(draw.integers(4, 3, 4) + 1, draw(4)),
            kink(torch.tensor([0.0, 0.0, 0.0, -1.0]).double(), torch.tensor([0.0, 1.0, -1.0, 2.0]).double()),
        ],
    )
)
register(
    Op(
        aten.pow.Scalar,
        (composed(exponent=_pow_exponent_of_scalar),),
        lambda draw: [case(2, draw(3, 4)), case(0.5, draw(4, 3).t()), kink(0, draw(3)), kink(-2.0, draw(3))],
    )
)


def _atan2_reciprocal(c: Call) -> Tensor:
    square = c.self * c.self + c.other * c.other
    return aten.where(square == 0, 0.0, square.reciprocal())


register(
    Op(
        aten.atan2.default,
        # z = atan2(y, x)        ct_y = ct x / (x^2 + y^2)        ct_x = -ct y / (x^2 + y^2), 0 at the origin
        (
            composed(
                self=lambda c, ct: ct * c.other * _atan2_reciprocal(c),
                other=lambda c, ct: ct * -c.self * _atan2_reciprocal(c),
            ),
        ),
        lambda draw: [*positive_pairs(draw), kink(torch.zeros(2).double(), torch.zeros(2).double())],
    )
)

# z = sqrt(x^2 + y^2)        ct_x = ct x / z        ct_y = ct y / z
register(
    Op(
        aten.hypot.default,
        (composed(self=lambda c, ct: ct * c.self / c.out, other=lambda c, ct: ct * c.other / c.out),),
        positive_pairs,
    )
)

# z = ln(exp x + exp y)        ct_x = ct / (1 + exp(y - x))
register(
    Op(
        aten.logaddexp.default,
        (
            composed(
                self=lambda c, ct: ct / ((c.other - c.self).exp() + 1),
                other=lambda c, ct: ct / ((c.self - c.other).exp() + 1),
            ),
        ),
        pairs,
    )
)
register(
    Op(
        aten.logaddexp2.default,
        (
            composed(
                self=lambda c, ct: ct / (aten.pow(2, c.other - c.self) + 1),
                other=lambda c, ct: ct / (aten.pow(2, c.self - c.other) + 1),
            ),
        ),
        pairs,
    )
)


# z = x ln y, 0 at x = 0        ct_x = ct ln y, 0 where z is 0 by definition        ct_y = ct x / y
def _xlogy_self(c: Call, ct: Tensor) -> Tensor:
    return aten.xlogy(ct, c.other).masked_fill((c.self == 0.0) & (c.other <= 0.0), 0.0)


def _xlogy_self_of_scalar(c: Call, ct: Tensor) -> Tensor:
    slope = aten.xlogy(ct, c.other)
    return slope if c.other > 0 else slope.masked_fill(c.self == 0.0, 0.0)


def _xlogy_other(c: Call, ct: Tensor) -> Tensor:
    return ct * c.self / c.other


register(
    Op(
        aten.xlogy.Tensor,
        (composed(self=_xlogy_self, other=_xlogy_other),),
        lambda draw: [
            *positive_pairs(draw),
            kink(torch.tensor([0.0, 0.0]).double(), torch.tensor([0.0, 2.0]).double()),
        ],
    )
)
register(
    Op(
        aten.xlogy.Scalar_Self,
        (composed(other=_xlogy_other),),
        lambda draw: [case(2.0, draw.uniform(0.5, 2, 3, 4))],
    )
)
register(
    Op(
        aten.xlogy.Scalar_Other,
        (composed(self=_xlogy_self_of_scalar),),
        lambda draw: [case(draw(3, 4), 2.0), kink(torch.tensor([0.0, 1.0]).double(), 0.0)],
    )
)


# z = x - y trunc(x / y), or floor for remainder        ct_x = ct        ct_y = -ct trunc(x / y)
def _moduli(draw: Sampler) -> list[Case]:
    quotient = draw.integers(4, 3, 4) + draw.uniform(0.3, 0.7, 3, 4)
    divisor = draw.uniform(0.9, 1.1, 3, 4)
    return [
        case(quotient * divisor, divisor),
        case((quotient * divisor).t(), divisor.t()),
        case(-quotient, draw() / 99 + 1),
    ]


for modulus, rounding in ((aten.fmod, "trunc"), (aten.remainder, "floor")):
    register(
        Op(
            modulus.Tensor,
            (
                composed(
                    self=lambda c, ct: ct,
                    other=lambda c, ct, rounding=rounding: -ct * c.self.div(c.other, rounding_mode=rounding),
                ),
            ),
            _moduli,
        )
    )
    register(
        Op(
            modulus.Scalar,
            (composed(self=lambda c, ct: ct),),
            lambda draw: [case(draw.uniform(0.6, 0.9, 3, 4), 0.5)],
        )
    )


# z = x 2^y        ct_x = ct 2^y        ct_y = ct z ln 2
register(
    Op(
        aten.ldexp.Tensor,
        (composed(self=lambda c, ct: ct * aten.pow(2, c.other), other=lambda c, ct: ct * c.out * math.log(2)),),
        pairs,
    )
)

# z = x + w (y - x)        ct_x = ct (1 - w)        ct_y = ct w        ct_w = ct (y - x)
register(
    Op(
        aten.lerp.Scalar,
        (composed(self=lambda c, ct: ct * (1 - float(c.weight)), end=lambda c, ct: ct * c.weight),),
        lambda draw: [case(*c.args, 0.3) for c in pairs(draw)],
    )
)
register(
    Op(
        aten.lerp.Tensor,
        (
            composed(
                self=lambda c, ct: ct * (1 - c.weight),
                end=lambda c, ct: ct * c.weight,
                weight=lambda c, ct: ct * (c.end - c.self),
            ),
        ),
        lambda draw: [case(*c.args, draw(4)) for c in pairs(draw)[:3]],
    )
)

# z = x + v y w        ct_x = ct        ct_y = ct (v w)        ct_w = ct (v y)
register(
    Op(
        aten.addcmul.default,
        (
            composed(
                self=lambda c, ct: ct,
                tensor1=lambda c, ct: ct * (c.tensor2 * c.value),
                tensor2=lambda c, ct: ct * (c.tensor1 * c.value),
            ),
        ),
        lambda draw: [case(draw(3, 4), draw(4), draw(3, 1)), case(draw(4, 3).t(), draw(3, 4), draw(4), value=0.3)],
    )
)

# z = x + v y / w        ct_x = ct        ct_y = ct (v / w)        ct_w = -ct (v y / w^2)
register(
    Op(
        aten.addcdiv.default,
        (
            composed(
                self=lambda c, ct: ct,
                # PyTorch divides a number by a tensor as number times reciprocal, which rounds twice.
                tensor1=lambda c, ct: ct * (aten.full_like(c.tensor2, c.value) / c.tensor2),
                tensor2=lambda c, ct: -ct * (c.tensor1 * c.value / (c.tensor2 * c.tensor2)),
            ),
        ),
        lambda draw: [
            case(draw(3, 4), draw(4), draw.uniform(1, 2, 3, 1)),
            case(draw(4, 3).t(), draw(3, 4), draw.uniform(1, 2, 4), value=0.3),
        ],
    )
)
