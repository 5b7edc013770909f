"""Kernels that are declared to read only the shape of an argument: other numbers in it change no bit."""

import pytest
import torch

from undertow.ir.pytorch import declared
from undertow.ir.types import contiguous_strides
from undertow.ops.own import BLANK

aten = torch.ops.aten

WINDOW = ([3, 2], [2, 1], [1, 1], [1, 2], True)

CALLS = {
    aten.max_pool2d_with_indices_backward.default: [
        lambda x: (aten.max_pool2d_with_indices(x, [2, 2]), ([2, 2], [2, 2], [0, 0], [1, 1], False)),
        lambda x: (aten.max_pool2d_with_indices(x, *WINDOW), WINDOW),
    ],
    aten.avg_pool2d_backward.default: [
        lambda x: (aten.avg_pool2d(x, [3, 2], [2, 2], [1, 1], True, True), ([3, 2], [2, 2], [1, 1], True, True, None)),
    ],
    aten._adaptive_avg_pool2d_backward.default: [lambda x: (aten._adaptive_avg_pool2d(x, [3, 2]), ())],
}


def test_every_reader_has_a_call():
    assert set(CALLS) == set(declared("shape_only"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("target", CALLS, ids=str)
def test_the_numbers_do_not_matter(target, dtype):
    for call in CALLS[target]:
        x = torch.randn(2, 3, 8, 6, dtype=dtype)
        result, rest = call(x)
        output, tail = (result[0], (result[1],)) if isinstance(result, tuple) else (result, ())
        ct = torch.randn_like(output)
        blank = BLANK(tuple(x.shape), dtype, x.device)
        expected, found = target(ct, x, *rest, *tail), target(ct, blank, *rest, *tail)
        assert torch.equal(expected, found)
        assert found.stride() == contiguous_strides(tuple(x.shape))
