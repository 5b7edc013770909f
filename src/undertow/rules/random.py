"""Random operations: dropout and the randomised ReLU, which have a gradient, and draws, which have none.

In: the recorded mask or slopes. Out: the cotangent of the input. If a draw overwrites a tensor, the cotangent of the
tensor's former value is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from undertow.rules.registry import Call, Case, Formula, Op, Sampler, composed, fused, kink, register
from undertow.torch_internals import OpOverload

aten = torch.ops.aten


# y = x mask / (1 - p) in training; outside training the kernel passes the cotangent on unscaled
def _dropout_scale(c: Call) -> float:
    if not c.train:
        return 1.0
    return 0.0 if c.p == 1 else 1.0 / (1.0 - c.p)


def _ct_dropout(c: Call, ct: torch.Tensor, *_: None) -> torch.Tensor:
    return ct * c.outs[1] * _dropout_scale(c)


# On the CPU the kernel computes this product, and FakeTensors give the right strides only for the product.
def _ct_dropout_kernel(c: Call, ct: torch.Tensor, *_: None) -> torch.Tensor:
    if ct.device.type == "cpu":
        return _ct_dropout(c, ct)
    return aten.native_dropout_backward(ct, c.outs[1], _dropout_scale(c))


register(
    Op(
        aten.native_dropout.default,
        vjps=(fused(input=_ct_dropout_kernel), composed(input=_ct_dropout)),
        samples=lambda draw: [
            kink(draw(3, 4), 0.3, True),
            kink(draw(4, 3).t(), 0.5, False),
            kink(draw(3, 4), 1.0, True),
        ],
    )
)


# Draws that overwrite a tensor; see `sampling.py`.
def _register_overwriting(target: OpOverload, *bounds: int) -> None:
    register(
        Op(
            target,
            vjps=(composed(self=lambda c, ct: torch.zeros_like(ct)),),
            samples=lambda draw: [kink(draw(3, 4), *bounds)],
        )
    )


_register_overwriting(aten.random.to, 7)
_register_overwriting(getattr(aten.random, "from"), 2, 7)

register(
    Op(
        aten.bernoulli.Tensor,
        vjps=(
            composed(
                self=lambda c, ct: torch.zeros_like(ct),
                p=lambda c, ct: torch.zeros(c.p.shape, dtype=c.p.dtype, device=c.p.device),
            ),
        ),
        samples=lambda draw: [kink(draw(3, 4), draw.uniform(0, 1, 3, 4))],
    )
)


# y = x where x > 0, else x n, with a random slope n in training and the mean slope otherwise. In training the operation
# writes the slopes into `noise`; its functional form returns them as a second output.
def _noise(c: Call) -> torch.Tensor:
    return c.outs[1] if len(c.outs) > 1 else c.noise


def _ct_randomized_relu(c: Call, ct: torch.Tensor, *_: None) -> torch.Tensor:
    if c.training:
        return _noise(c) * ct
    return torch.where(c.self > 0, ct, ct * ((c.lower + c.upper) / 2))


# Eager computes the product in training and calls the leaky ReLU's backward kernel otherwise.
def _ct_randomized_relu_kernel(c: Call, ct: torch.Tensor, *_: None) -> torch.Tensor:
    if c.training:
        return _noise(c) * ct
    return aten.leaky_relu_backward(ct, c.self, (c.lower + c.upper) / 2, False)


register(
    Op(
        aten.rrelu_with_noise.default,
        vjps=(fused(self=_ct_randomized_relu_kernel), composed(self=_ct_randomized_relu)),
        samples=lambda draw: [
            kink(draw.distinct(3, 4), torch.zeros(3, 4, dtype=torch.float64), 0.1, 0.3, True),
            kink(draw.distinct(3, 4), torch.zeros(3, 4, dtype=torch.float64)),
        ],
    )
)


Tensor = torch.Tensor


def _zeros(c: Call, ct: Tensor) -> Tensor:
    return aten.zeros_like(ct)


def _zeros_of(name: str) -> Formula:
    return lambda c, ct: ct.new_zeros(getattr(c, name).shape)


def shaped(*arguments: float) -> Callable[[Sampler], list[Case]]:
    """A matrix and a transposed one, with further arguments."""

    def samples(draw: Sampler) -> list[Case]:
        plain, permuted = draw.uniform(0.2, 0.8, 3, 4), draw.uniform(0.2, 0.8, 4, 3).t()
        return [kink(plain, *arguments), kink(permuted, *arguments)]

    return samples


register(Op(aten.bernoulli.default, (composed(self=_zeros),), shaped()))
register(Op(aten.poisson.default, (composed(self=_zeros_of("self")),), shaped()))
register(
    Op(
        aten.normal.Tensor_float,
        (composed(mean=_zeros_of("mean")),),
        lambda draw: [kink(draw(3, 4))],
    )
)
register(
    Op(
        aten.normal.float_Tensor,
        (composed(std=_zeros_of("std")),),
        lambda draw: [kink(0.0, draw.uniform(0.5, 1, 3, 4))],
    )
)
register(
    Op(
        aten.normal.Tensor_Tensor,
        (composed(mean=_zeros_of("mean"), std=_zeros_of("std")),),
        lambda draw: [kink(draw(3, 4), draw.uniform(0.5, 1, 3, 4))],
    )
)

# These overwrite a tensor, whose former value is lost.
for overwrite, arguments in (
    (aten.bernoulli.p, (0.5,)),
    (aten.uniform.default, ()),
    (aten.exponential.default, ()),
    (aten.normal_functional.default, ()),
    (aten.log_normal.default, ()),
    (aten.cauchy.default, ()),
    (aten.geometric.default, (0.5,)),
    (aten.random.default, ()),
):
    register(Op(overwrite, (composed(self=_zeros),), shaped(*arguments)))

for fresh, arguments in (
    (aten.rand_like.default, ()),
    (aten.randn_like.default, ()),
    (aten.randint_like.default, (3,)),
    (aten.multinomial.default, (1,)),
):
    register(Op(fresh, samples=shaped(*arguments)))
