"""Choosing between operands, element by element: maximum, clamp, where, copysign.

In: the operands. Out: their cotangents: the chosen operand gets it, and ties are split as eager splits them.

Where eager zeroes a fresh tensor in place, a `where` is used here: `masked_fill` would give the same values with other
strides, and strides decide the order of later sums.
"""

import math
from collections.abc import Callable

import torch

from undertow.rules.registry import Call, Case, Formula, Op, Sampler, case, composed, kink, register

aten = torch.ops.aten
Tensor = torch.Tensor


def distinct_pairs(draw: Sampler) -> list[Case]:
    """Pairs without a tie; then pairs with ties and a NaN on either side; then integers and floats."""
    ties = torch.tensor([1.0, 2.0, math.nan, 0.5]).double()
    others = torch.tensor([1.0, 3.0, 0.0, math.nan]).double()
    first, second = draw.distinct(2, 3, 4)
    return [
        case(first, second),
        case(first.t().contiguous().t(), second),
        case(draw.distinct(3, 1), draw.distinct(4) + 0.03),
        kink(ties, others),
        kink(draw.integers(3, 4), draw(4)),
    ]


# z = max(x, y)        ct_x = ct where x > y, ct / 2 at a tie, else 0
def _winner(loses: Callable[[Call], Tensor]) -> Formula:
    """The cotangent of an operand: 0 where `loses(c)`, half at a tie, else all."""

    def formula(c: Call, ct: Tensor) -> Tensor:
        return aten.where(loses(c), 0.0, aten.where(c.self == c.other, ct / 2, ct))

    return formula


register(
    Op(
        aten.maximum.default,
        (composed(self=_winner(lambda c: c.self < c.other), other=_winner(lambda c: c.self > c.other)),),
        distinct_pairs,
    )
)
register(
    Op(
        aten.minimum.default,
        (composed(self=_winner(lambda c: c.self > c.other), other=_winner(lambda c: c.self < c.other)),),
        distinct_pairs,
    )
)

# z = max(x, y), where a NaN loses        ct goes to x where x >= y or y is NaN, else to y
for ignoring_nan, wins in ((aten.fmax, torch.ge), (aten.fmin, torch.le)):
    register(
        Op(
            ignoring_nan.default,
            (
                composed(
                    self=lambda c, ct, wins=wins: ct.masked_fill(
                        (wins(c.self, c.other).logical_or(c.other.isnan())).logical_not(), 0
                    ),
                    other=lambda c, ct, wins=wins: ct.masked_fill(wins(c.self, c.other).logical_or(c.other.isnan()), 0),
                ),
            ),
            distinct_pairs,
        )
    )


# y = x clamped to [a, b]        ct_x = ct where a <= x <= b        ct_a = ct where x < a < b        ct_b = ct above
def _clamp_self(c: Call, ct: Tensor) -> Tensor:
    if c.min is None and c.max is None:
        return ct
    is_free = [c.self >= c.min] if c.min is not None else []
    is_free += [c.self <= c.max] if c.max is not None else []
    return aten.where(is_free[0] if len(is_free) == 1 else is_free[0].logical_and(is_free[1]), ct, 0.0)


def _clamp_min(c: Call, ct: Tensor) -> Tensor:
    is_below = c.self < c.min
    return aten.where(is_below if c.max is None else is_below.logical_and(c.min < c.max), ct, 0.0)


def _clamp_max(c: Call, ct: Tensor) -> Tensor:
    is_above = c.self > c.max
    return aten.where(is_above if c.min is None else is_above.logical_or(c.max < c.min), ct, 0.0)


register(
    Op(
        aten.clamp.default,
        (composed(self=_clamp_self),),
        lambda draw: [
            case(draw.distinct(3, 4), -0.5, 0.5),
            case(draw.distinct(4, 3).t(), -0.5),
            case(draw.distinct(3, 4), None, 0.5),
            kink(torch.tensor([-1.0, 0.0, 1.0, math.nan]).double(), -1.0, 1.0),
        ],
    )
)
register(
    Op(
        aten.clamp.Tensor,
        (composed(self=_clamp_self, min=_clamp_min, max=_clamp_max),),
        lambda draw: [
            case(draw.distinct(3, 4), draw.distinct(4) / 99 - 0.5, draw.distinct(4) / 99 + 0.5),
            case(draw.distinct(4, 3).t(), draw.distinct(3, 1) / 99),
            case(draw.distinct(3, 4), None, draw.distinct(4) / 99),
            case(draw.distinct(4), torch.tensor(0.6).double(), torch.tensor(-0.6).double()),
            kink(torch.tensor([-1.0, 0.0, 1.0]).double(), torch.tensor(-1.0).double(), torch.ones(3).double()),
        ],
    )
)
register(
    Op(
        aten.clamp_min.default,
        (composed(self=lambda c, ct: aten.where(c.self >= c.min, ct, 0.0)),),
        lambda draw: [case(draw.distinct(3, 4), 0.1), kink(torch.tensor([0.0, 1.0]).double(), 1)],
    )
)
register(
    Op(
        aten.clamp_max.default,
        (composed(self=lambda c, ct: aten.where(c.self <= c.max, ct, 0.0)),),
        lambda draw: [case(draw.distinct(3, 4), 0.1), kink(torch.tensor([0.0, 1.0]).double(), 1)],
    )
)
register(
    Op(
        aten.clamp_min.Tensor,
        (
            composed(
                self=lambda c, ct: aten.where(c.self >= c.min, ct, 0.0),
                min=lambda c, ct: aten.where(c.self < c.min, ct, 0.0),
            ),
        ),
        distinct_pairs,
    )
)
register(
    Op(
        aten.clamp_max.Tensor,
        (
            composed(
                self=lambda c, ct: aten.where(c.self <= c.max, ct, 0.0),
                max=lambda c, ct: aten.where(c.self > c.max, ct, 0.0),
            ),
        ),
        distinct_pairs,
    )
)

register(
    Op(
        aten.where.self,
        # z = x where the condition is true, else y        ct_x = ct where it is true, else 0        ct_y = ct elsewhere
        (
            composed(
                self=lambda c, ct: aten.where(c.condition, ct, 0),
                other=lambda c, ct: aten.where(c.condition, 0, ct),
            ),
        ),
        lambda draw: [
            case(draw.booleans(3, 4), draw(3, 4), draw(3, 4)),
            case(draw.booleans(4, 3).t(), draw(4), draw(3, 1)),
            case(draw.booleans(4), draw(3, 4), draw()),
            kink(draw.booleans(4), draw(3, 4).float(), draw(4)),
        ],
    )
)


# z = |x| with the sign of y        ct_x = ct z / x, 0 at x = 0        ct_y = 0
def _copysign_self(c: Call, ct: Tensor) -> Tensor:
    return ct * aten.where(c.self == 0, 0.0, c.out / c.self)


register(
    Op(
        aten.copysign.Tensor,
        (composed(self=_copysign_self, other=lambda c, ct: ct.new_zeros(c.other.shape)),),
        lambda draw: distinct_pairs(draw)[:3],
    )
)
register(
    Op(
        aten.copysign.Scalar,
        (composed(self=_copysign_self),),
        lambda draw: [case(draw.distinct(3, 4), -1.0), kink(torch.tensor([0.0, 1.0]).double(), -2.0)],
    )
)
