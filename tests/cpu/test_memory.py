"""The measured peak of a planned step is not above eager's."""

import copy
import gc

import pytest
import torch
from families import FAMILIES
from spread_cases import spread

import undertow as ut
from undertow.models import SMALL
from undertow.runtime.measure import measure_call

# Autograd's tokens and the recorded state of the generator, which eager does not have: a few KiB.
ALLOWANCE_BYTES = 16 * 1024


def measure(model, args, kwargs, loss_of):
    def step():
        loss_of(model(*args, **kwargs)).backward()
        model.zero_grad(set_to_none=True)

    step()
    gc.collect()
    persistent = [*model.parameters(), *model.buffers(), *args, *kwargs.values()]
    return measure_call(step, persistent).peak_bytes


def compare(model, args, kwargs, loss_of):
    torch.manual_seed(0)
    planned = ut.plan(copy.deepcopy(model), args, kwargs)
    assert measure(planned, args, kwargs, loss_of) <= measure(model, args, kwargs, loss_of) + ALLOWANCE_BYTES


@pytest.mark.parametrize("name", spread(list(SMALL), str, every=3))
def test_zoo(name):
    zoo = SMALL[name]
    targets = zoo.example_targets(8)
    compare(zoo.build(), zoo.example_inputs(8), {}, lambda out: zoo.loss(out, *targets))


@pytest.mark.parametrize("name", spread([name for name in FAMILIES if name != "bart"], str, every=3))
def test_families(name):
    make, batch = FAMILIES[name]
    compare(make().train(), (), batch, lambda out: out.loss)
