"""Operations whose output has no gradient: comparisons, logic, positions, and tensors made like another.

In: nothing. Out: records without a formulation. Each says that eager's output requires no gradient although an input
does.
"""

from functools import partial
from typing import Any

import torch

from undertow.rules.registry import Case, Op, Sampler, case, register

aten = torch.ops.aten

for comparison in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge):
    register(Op(comparison.Tensor, samples=lambda draw: [case(draw(3, 4), draw(4))]))
    register(Op(comparison.Scalar, samples=lambda draw: [case(draw(3, 4), 0.5)]))

for of_two in (aten.logical_and, aten.logical_or, aten.logical_xor):
    register(Op(of_two.default, samples=lambda draw: [case(draw(3, 4), draw(4))]))

for of_one in (
    aten.logical_not,
    aten.isnan,
    aten.isposinf,
    aten.isneginf,
    aten.signbit,
    aten.any,
    aten.all,
    aten.argmax,
    aten.argmin,
    aten.nonzero,
    aten.count_nonzero,
    aten.detach,
    aten.zeros_like,
    aten.ones_like,
    aten.empty_like,
):
    register(Op(of_one.default, samples=lambda draw: [case(draw(3, 4)), case(draw(4, 3).t())]))

for along in (aten.any.dim, aten.all.dim):
    register(Op(along, samples=lambda draw: [case(draw(3, 4), 1)]))

for along in (aten.any.dims, aten.all.dims, aten.count_nonzero.dim_IntList):
    register(Op(along, samples=lambda draw: [case(draw(3, 4), [1])]))


def _matrix_and(arguments: tuple[Any, ...], draw: Sampler) -> list[Case]:
    return [case(draw(3, 4), *arguments)]


for made_like, arguments in (
    (aten.full_like.default, (2.0,)),
    (aten.new_zeros.default, ([2, 3],)),
    (aten.new_ones.default, ([2, 3],)),
    (aten.new_empty.default, ([2, 3],)),
    (aten.new_full.default, ([2, 3], 2.0)),
    (aten.new_empty_strided.default, ([2, 3], [1, 2])),
    (aten.view.dtype, (torch.int64,)),
):
    register(Op(made_like, samples=partial(_matrix_and, arguments)))

register(Op(aten.searchsorted.Tensor, samples=lambda draw: [case(draw(5).sort()[0], draw(3))]))
register(Op(aten.bucketize.Tensor, samples=lambda draw: [case(draw(3), draw(5).sort()[0])]))
register(Op(aten.isin.Tensor_Tensor, samples=lambda draw: [case(draw(3), draw(5))]))
register(Op(aten.histc.default, samples=lambda draw: [case(draw(9), 3)]))
