"""Modules that mix the examples of a batch: found where they do, and nowhere else; nothing is changed."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.api.mixing import find_mixing
from undertow.api.training import make_step
from undertow.models import SMALL
from undertow.terms import CostSource, Terms


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def find(model, args, targets=(), loss=None, **terms):
    request = make_step(model, len(args), loss, None, Terms(costs=CostSource.MODEL, **terms)).request
    return find_mixing(request, (*args, *targets), {})


def network(function):
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), Layer(function), nn.ReLU(), nn.Linear(8, 3))


MIXING = {
    "softmax over the batch": lambda x: x.softmax(0),
    "difference to the mean": lambda x: x - x.mean(0),
    "scaled by the largest of all": lambda x: x / x.abs().max(),
    "neighbours": lambda x: x + x.roll(1, 0),
    "similarities": lambda x: (x @ x.t()).softmax(1) @ x,
    "sum so far": lambda x: x.cumsum(0),
}
SEPARATE = {
    "softmax": lambda x: x.softmax(1),
    "layer norm": lambda x: functional.layer_norm(x, (8,)),
    "joined and taken apart": lambda x: (
        x.view(-1, 2, 4).transpose(0, 1).reshape(-1, 4).tanh().view(2, -1, 4).transpose(0, 1).reshape(-1, 8)
    ),
    "divided by the size of the batch": lambda x: x * (1.0 / len(x)),
    "attention": lambda x: functional.scaled_dot_product_attention(*[x.view(-1, 2, 2, 2)] * 3).reshape(-1, 8),
    "batch norm": nn.BatchNorm1d(8),
    "a mask": lambda x: torch.where(x > 0, x, x.exp()),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_found_where_it_is(name):
    found = find(network(MIXING[name]), (torch.randn(8, 6),), (torch.randint(3, (8,)),), functional.cross_entropy)
    assert len(found) == 1
    assert found[0].startswith("2 ") and "test_mixing.py" in found[0]


@pytest.mark.parametrize("name", SEPARATE)
def test_what_is_separate_is_no_mixing(name):
    assert (
        find(network(SEPARATE[name]), (torch.randn(8, 6),), (torch.randint(3, (8,)),), functional.cross_entropy) == []
    )


@pytest.mark.parametrize("name", SMALL)
def test_the_zoo_mixes_nothing(name):
    entry = SMALL[name]
    args, targets = entry.example_inputs(4), entry.example_targets(4)
    assert find(entry.build(), args, targets, entry.loss) == []


def test_nothing_is_changed_and_little_is_taken():
    model = network(lambda x: functional.batch_norm(x, None, None, training=True).softmax(0))
    model.insert(1, nn.BatchNorm1d(8))
    x, before = torch.randn(8, 6), copy.deepcopy(model.state_dict())
    y = torch.randint(3, (8,))
    state = torch.get_rng_state()
    assert find(model, (x,), (y,), functional.cross_entropy)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(item, before[name]) for name, item in model.state_dict().items())
    assert find(model, (x,), (y,), functional.cross_entropy, budget_bytes=100) == []


def test_models_that_refuse_small_batches_are_passed_over():
    def refuse(x):
        if len(x) < 8:
            raise ValueError("eight at least")
        return x.softmax(0)

    assert find(network(refuse), (torch.randn(8, 6),), (torch.randint(3, (8,)),), functional.cross_entropy) == []


def test_a_step_in_shards_warns_once_in_one_line():
    model, x, y = network(MIXING["softmax over the batch"]), torch.randn(8, 6), torch.randint(3, (8,))
    settings = {
        "targets": (y,),
        "loss": functional.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    with pytest.warns(
        UserWarning, match=r"examples of a batch are mixed by 2  test_mixing.py:\d+: with shards"
    ) as seen:
        step = ut.train_step(model, (x,), shards=2, **settings)
        step(x, y)
        step(x[:6], y[:6])
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ut.train_step(model, (x,), **settings)
