"""Families of `transformers` at small random sizes, with dropout: training steps have eager's bits."""

import itertools

import pytest
import torch
from exactness import assert_same_steps
from families import FAMILIES
from spread_cases import spread

KINDS = {
    "float32": (torch.float32, None),
    "float64": (torch.float64, None),
    "autocast": (torch.float32, torch.bfloat16),
}
# Layer drop takes another path through the model at almost every step.
NUM_STEPS = {"bart": 8}


@pytest.mark.parametrize("case", spread([*itertools.product(FAMILIES, KINDS)], "-".join, every=4))
def test_same_bits_as_eager(case):
    name, kind = case
    dtype, autocast = KINDS[kind]
    torch.manual_seed(0)
    make, batch = FAMILIES[name]
    model = make().train().to(dtype)
    kwargs = {key: item.to(dtype) if item.is_floating_point() else item for key, item in batch.items()}
    planned = assert_same_steps(
        model, (), kwargs, lambda out: out.loss, num_steps=NUM_STEPS.get(name, 3), autocast=autocast
    )
    assert planned.plan.without_rule == ()
