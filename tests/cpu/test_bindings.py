"""Python functions that are called for operations: only where they call the same operation with the same arguments."""

import pytest
import torch

from undertow.ir import TensorType, Value
from undertow.runtime.bindings import callable_for

aten = torch.ops.aten
X, NUMBER = (Value(name, TensorType.of(torch.zeros(shape))) for name, shape in (("x", (4, 4)), ("number", ())))


@pytest.mark.parametrize(
    "target, args, kwargs, expected",
    [
        (aten.mm.default, (X, X), {}, torch.mm),
        (aten.mul.Tensor, (X, X), {}, torch.mul),
        (aten.mul.Tensor, (X, NUMBER), {}, torch.mul),
        (aten.sum.dim_IntList, (X, (0,), True), {}, torch.sum),
        (aten.view.default, (X, (16,)), {}, torch.Tensor.view),
        (aten.reshape.default, (X, (16,)), {}, torch.reshape),
        (aten.clone.default, (X,), {"memory_format": torch.contiguous_format}, torch.clone),
        (aten.gelu.default, (X,), {"approximate": "tanh"}, torch._C._nn.gelu),
    ],
)
def test_functions_that_come_to_the_operation(target, args, kwargs, expected):
    assert callable_for(target, args, kwargs) == expected


@pytest.mark.parametrize(
    "target, args, kwargs",
    [
        (aten.mul.Scalar, (X, 2.0), {}),  # torch.mul makes a tensor of the number
        (aten.threshold_backward.default, (X, X, 0), {}),  # has none
        (aten.zeros.default, ((4, 4),), {}),  # modes that choose a device look at these
    ],
)
def test_other_operations_are_called_themselves(target, args, kwargs):
    assert callable_for(target, args, kwargs) is target._op


def test_the_operation_depends_on_the_arguments():
    assert callable_for(aten.add.Tensor, (X, X), {"alpha": 2}) == torch.add
    assert callable_for(aten.add.Scalar, (X, 1), {}) is aten.add.Scalar._op
