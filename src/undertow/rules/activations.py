"""Activation functions: ReLU and similar ones, sigmoid and similar ones, gated and shrinking ones.

In: `c.self` or `c.out`, as eager keeps it. Out: the cotangent of `self`, first through PyTorch's backward kernel, then
in ordinary operations. The composed forms make both branches of a `where` finite, so that a second derivative never
multiplies 0 by infinity.
"""

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from undertow.alternatives.registry import PACK_SIGNS, Code, packed_type, register_code
from undertow.ir import Node, Value
from undertow.kernels.bits import select_by_bits
from undertow.ops.own import register_kernel
from undertow.rules.registry import Call, Case, Op, Sampler, case, composed, fused, fused_joint, kink, register
from undertow.torch_internals import OpOverload

aten = torch.ops.aten
Tensor = torch.Tensor

SQRT_HALF = math.sqrt(0.5)
GELU_CUBIC = 0.044715  # the cubic coefficient of the tanh approximation, Hendrycks and Gimpel 2016


def smooth(draw: Sampler) -> list[Case]:
    """A matrix, a transposed one, a 0-dim tensor, every second column."""
    return [case(draw(3, 4)), case(draw(2, 3, 4).transpose(0, 2)), case(draw() + 4), case(draw(3, 8)[:, ::2])]


def kinked(draw: Sampler) -> list[Case]:
    """Elements away from zero; then zeros and a NaN."""
    at_zero = torch.tensor([-1.0, -0.0, 0.0, 1.0, math.nan]).double()
    return [case(draw.distinct(3, 4)), case(draw.distinct(2, 3, 4).transpose(0, 2)), kink(at_zero)]


def with_arguments(*arguments: float) -> Callable[[Sampler], list[Case]]:
    """The samples of `kinked`, each with further arguments."""
    return lambda draw: [Case((*c.args, *arguments), {}, c.is_smooth) for c in kinked(draw)]


register(
    Op(
        aten.relu.default,
        # y = max(x, 0)        ct_x = ct where y > 0, else 0        (y > 0 exactly where x > 0)
        (
            fused(self=lambda c, ct: aten.threshold_backward(ct, c.out, 0)),
            composed(self=lambda c, ct: aten.where(c.out <= 0, 0.0, ct)),
        ),
        kinked,
    )
)

SELECT_BY_BITS = register_kernel("select_by_bits", select_by_bits, writes_into=True)


def _select_by_signs(node: Node, code: Value) -> Iterator[Node]:
    ct, y, threshold = node.args
    if threshold == 0 and ct.type == y.type:
        yield replace(node, operation=SELECT_BY_BITS, args=(ct, code, y.tensor_type.strides), kwargs={})


register_code(
    aten.threshold_backward.default,
    Code(lambda node: node.args[1], packed_type, encode=PACK_SIGNS, readers=_select_by_signs),
)

register(
    Op(
        aten.threshold.default,
        # y = x where x > t, else v        ct_x = ct where x > t, else 0
        (
            fused(self=lambda c, ct: aten.threshold_backward(ct, c.self, c.threshold)),
            composed(self=lambda c, ct: aten.where(c.self <= c.threshold, 0.0, ct)),
        ),
        with_arguments(0, 2.0),
    )
)

register(
    Op(
        aten.leaky_relu.default,
        # y = x where x > 0, else s x        ct_x = ct where x > 0, else s ct
        (
            fused(self=lambda c, ct: aten.leaky_relu_backward(ct, c.self, c.negative_slope, False)),
            composed(self=lambda c, ct: aten.where(c.self > 0, ct, ct * c.negative_slope)),
        ),
        lambda draw: [*kinked(draw), *with_arguments(0.2)(draw)],
    )
)

register(
    Op(
        aten._prelu_kernel.default,
        # y = x where x > 0, else w x        ct_x = ct where x > 0, else w ct        ct_w = 0 where x > 0, else x ct
        (
            fused_joint(
                "self",
                "weight",
                by=lambda c, ct: dict(
                    zip(("self", "weight"), aten._prelu_kernel_backward(ct, c.self, c.weight), strict=True)
                ),
            ),
            composed(
                self=lambda c, ct: aten.where(c.self > 0, ct, c.weight * ct),
                weight=lambda c, ct: aten.where(c.self > 0, 0.0, c.self * ct),
            ),
        ),
        lambda draw: [
            case(draw.distinct(2, 3, 4), draw(1, 3, 1)),
            case(draw.distinct(4, 3).t(), draw(1, 1)),
            kink(torch.tensor([-1.0, -0.0, 0.0, 1.0]).double(), draw(4)),
        ],
    )
)


def _elu_composed(x: Tensor, ct: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    is_negative = x <= 0
    decay = (aten.where(is_negative, x, 0.0) * input_scale).exp()
    return aten.where(is_negative, ct * (input_scale * alpha * scale) * decay, ct * scale)


register(
    Op(
        aten.elu.default,
        # y = s x where x > 0, else s a (exp(b x) - 1)        ct_x = s ct where x > 0, else s a b exp(b x) ct
        (
            fused(self=lambda c, ct: aten.elu_backward(ct, c.alpha, c.scale, c.input_scale, False, c.self)),
            composed(self=lambda c, ct: _elu_composed(c.self, ct, c.alpha, c.scale, c.input_scale)),
        ),
        lambda draw: [*kinked(draw), *with_arguments(1.67, 1.05)(draw), *with_arguments(1.0, 1.0, 0.5)(draw)],
    )
)


def _as_float32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


def _register_inplace_elu(target: OpOverload, factors: Callable[[Call], tuple[float, float, float]]) -> None:
    """Eager differentiates the in-place forms from their output, which gives other bits than from the input."""

    def composed_form(c: Call, ct: Tensor) -> Tensor:
        # y > 0 iff x > 0, and where not, exp(b x) = y / (s a) + 1        ct_x = b (y + s a) ct
        alpha, scale, input_scale = factors(c)
        return aten.where(c.out > 0, ct * scale, ct * input_scale * (c.out + scale * alpha))

    fused_form = fused(self=lambda c, ct: aten.elu_backward(ct, *factors(c), True, c.out))
    register(Op(target, (fused_form, composed(self=composed_form))))


_register_inplace_elu(aten.elu_.default, lambda c: (c.alpha, c.scale, c.input_scale))
_register_inplace_elu(aten.celu_.default, lambda c: (c.alpha, 1.0, 1.0 / _as_float32(c.alpha)))

register(
    Op(
        aten.celu.default,
        # y = x where x > 0, else a (exp(x / a) - 1)        ct_x = ct where x > 0, else exp(x / a) ct
        # Eager rounds a to float32 before it takes the reciprocal, for every dtype.
        (
            fused(self=lambda c, ct: aten.elu_backward(ct, c.alpha, 1, 1.0 / _as_float32(c.alpha), False, c.self)),
            composed(self=lambda c, ct: _elu_composed(c.self, ct, c.alpha, 1.0, 1.0 / _as_float32(c.alpha))),
        ),
        lambda draw: [*kinked(draw), *with_arguments(0.75)(draw)],
    )
)

register(
    Op(
        aten.hardtanh.default,
        # y = x clamped to [a, b]        ct_x = ct where a < x < b, else 0        (clamp includes the ends)
        (
            fused(self=lambda c, ct: aten.hardtanh_backward(ct, c.self, c.min_val, c.max_val)),
            composed(self=lambda c, ct: aten.where((c.self <= c.min_val) | (c.self >= c.max_val), 0.0, ct)),
        ),
        lambda draw: [*with_arguments(-0.5, 0.5)(draw), kink(torch.tensor([-1.0, 0.0, 1.0, 6.0]).double(), 0, 6)],
    )
)

register(
    Op(
        aten.hardsigmoid.default,
        # y = x / 6 + 1/2 clamped to [0, 1]        ct_x = ct / 6 where -3 < x < 3, else 0
        (
            fused(self=lambda c, ct: aten.hardsigmoid_backward(ct, c.self)),
            composed(self=lambda c, ct: aten.where((c.self > -3) & (c.self < 3), ct / 6, 0.0)),
        ),
        lambda draw: [*smooth(draw), case(draw.distinct(3, 4) * 3), kink(torch.tensor([-3.0, 3.0]).double())],
    )
)


def _hardswish_composed(c: Call, ct: Tensor) -> Tensor:
    between = aten.where(c.self < 3, ct * (c.self / 3 + 0.5), ct)
    return aten.where(c.self <= -3, 0.0, between)


register(
    Op(
        aten.hardswish.default,
        # y = x hardsigmoid(x)        ct_x = ct (x / 3 + 1/2) where -3 < x < 3, 0 below, ct above
        (
            fused(self=lambda c, ct: aten.hardswish_backward(ct, c.self)),
            composed(self=_hardswish_composed),
        ),
        lambda draw: [*smooth(draw), case(draw.distinct(3, 4) * 3), kink(torch.tensor([-3.0, 3.0]).double())],
    )
)

for shrink, shrink_backward in (
    (aten.softshrink.default, aten.softshrink_backward),
    (aten.hardshrink.default, aten.hardshrink_backward),
):
    register(
        Op(
            shrink,
            # y = 0 where |x| <= l, else x (hard) or x moved by l towards 0 (soft)        ct_x = ct where |x| > l
            (
                fused(self=lambda c, ct, kernel=shrink_backward: kernel(ct, c.self, c.lambd)),
                composed(self=lambda c, ct: aten.where((c.self >= -c.lambd) & (c.self <= c.lambd), 0.0, ct)),
            ),
            lambda draw: [*kinked(draw), kink(torch.tensor([-0.5, 0.5]).double()), *with_arguments(0.2)(draw)],
        )
    )

register(
    Op(
        aten.sigmoid.default,
        # y = 1 / (1 + exp(-x))        ct_x = ct (1 - y) y
        (
            fused(self=lambda c, ct: aten.sigmoid_backward(ct, c.out)),
            composed(self=lambda c, ct: ct * (1 - c.out) * c.out),
        ),
        smooth,
    )
)

register(
    Op(
        aten.tanh.default,
        # y = tanh x        ct_x = ct (1 - y^2)
        (
            fused(self=lambda c, ct: aten.tanh_backward(ct, c.out)),
            composed(self=lambda c, ct: ct * (1 - c.out * c.out)),
        ),
        smooth,
    )
)

register(
    Op(
        aten.log_sigmoid_forward.default,
        # y = -ln(1 + exp(-x))        ct_x = ct sigmoid(-x)        (the second output is the kernel's scratch)
        (
            fused(self=lambda c, ct, _: aten.log_sigmoid_backward(ct, c.self, c.outs[1])),
            composed(self=lambda c, ct, _: ct * aten.sigmoid(-c.self)),
        ),
        smooth,
    )
)


def _softplus_composed(c: Call, ct: Tensor) -> Tensor:
    scaled = c.self * c.beta
    return aten.where(scaled > c.threshold, ct, ct * scaled.sigmoid())


register(
    Op(
        aten.softplus.default,
        # y = ln(1 + exp(b x)) / b, and x itself where b x > t        ct_x = ct sigmoid(b x), ct where b x > t
        (
            fused(self=lambda c, ct: aten.softplus_backward(ct, c.self, c.beta, c.threshold)),
            composed(self=_softplus_composed),
        ),
        lambda draw: [*smooth(draw), case(draw(3, 4), 2.0), kink(draw(3, 4), 2.0, 0.5)],
    )
)


def _silu_composed(c: Call, ct: Tensor) -> Tensor:
    gate = c.self.sigmoid()
    return ct * (gate * (1 + c.self * (1 - gate)))


register(
    Op(
        aten.silu.default,
        # y = x s, s = sigmoid x        ct_x = ct s (1 + x (1 - s))
        (fused(self=lambda c, ct: aten.silu_backward(ct, c.self)), composed(self=_silu_composed)),
        smooth,
    )
)


def _mish_composed(c: Call, ct: Tensor) -> Tensor:
    gate = aten.softplus(c.self).tanh()
    return ct * (gate + c.self * c.self.sigmoid() * (1 - gate * gate))


register(
    Op(
        aten.mish.default,
        # y = x t, t = tanh(softplus x)        ct_x = ct (t + x sigmoid(x) (1 - t^2))
        (fused(self=lambda c, ct: aten.mish_backward(ct, c.self)), composed(self=_mish_composed)),
        smooth,
    )
)


def _gelu_composed(c: Call, ct: Tensor) -> Tensor:
    x = c.self
    if c.approximate == "tanh":
        scale = math.sqrt(2 / math.pi)
        gate = (scale * (x + GELU_CUBIC * x * x * x)).tanh()
        slope = scale * (1 + 3 * GELU_CUBIC * x * x)
        return ct * (0.5 * (1 + gate) + 0.5 * x * (1 - gate * gate) * slope)
    density = (-0.5 * x * x).exp() * (SQRT_HALF / math.sqrt(math.pi))
    # erfc has the digits that 1 + erf loses in the left tail.
    return ct * (0.5 * (x * -SQRT_HALF).erfc() + x * density)


register(
    Op(
        aten.gelu.default,
        # y = x P(x), P the normal distribution        ct_x = ct (P(x) + x p(x)), p its density
        # approximate="tanh": P(x) = (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
        (
            fused(self=lambda c, ct: aten.gelu_backward(ct, c.self, approximate=c.approximate)),
            composed(self=_gelu_composed),
        ),
        lambda draw: [*smooth(draw), *(case(*c.args, approximate="tanh") for c in smooth(draw))],
    )
)


def _glu_composed(c: Call, ct: Tensor) -> Tensor:
    value, pre_gate = c.self.chunk(2, c.dim)
    gate = pre_gate.sigmoid()
    return aten.cat([ct * gate, ct * value * gate * (1 - gate)], c.dim)


register(
    Op(
        aten.glu.default,
        # y = a s, s = sigmoid b, x = [a, b]        ct_a = ct s        ct_b = ct a s (1 - s)
        (fused(self=lambda c, ct: aten.glu_backward(ct, c.self, c.dim)), composed(self=_glu_composed)),
        lambda draw: [case(draw(3, 4)), case(draw(4, 3), 0), case(draw(2, 4, 3).transpose(0, 2), 1)],
    )
)
