"""Random draws.

A draw does not depend smoothly on what it is drawn with, so eager takes the derivative as 0, and 0 is not None: a
parameter that only a draw depends on gets a gradient of zeros. The `*_like` draws read nothing but a shape and carry no
gradient at all.
"""

from collections.abc import Callable

import torch

from undertow.ops.registry import Call, Case, Formula, Op, Sampler, composed, kink, register

aten = torch.ops.aten
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

# Drawn over a tensor, whose former value is lost.
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
