"""Every model of the zoo, at test size: three training steps have eager's bits."""

import pytest
import torch
from exactness import assert_same_steps

from undertow.models import SMALL

KINDS = {
    "float32": (torch.float32, None),
    "float64": (torch.float64, None),
    "autocast": (torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SMALL)
def test_same_bits_as_eager(name, kind):
    dtype, autocast = KINDS[kind]
    torch.manual_seed(0)
    zoo = SMALL[name]
    model = zoo.build().to(dtype)
    generator = torch.Generator().manual_seed(1)
    args = tuple(item.to(dtype) if item.is_floating_point() else item for item in zoo.example_inputs(3, generator))
    targets = tuple(item.to(dtype) if item.is_floating_point() else item for item in zoo.example_targets(3, generator))
    planned = assert_same_steps(model, args, {}, lambda out: zoo.loss(out, *targets), autocast=autocast)
    assert planned.plan.without_rule == ()
