"""Gradients that autograd's accumulation copies: the plan counts the copy, and `.grad` has eager's strides."""

import copy

import pytest
import torch
from exactness import same_bits
from spread_cases import spread
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.runtime.measure import measure_call


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


class Model(nn.Module):
    def __init__(self, forward, *parameters):
        super().__init__()
        self.parts, self.function = nn.ParameterList(parameters), forward

    def forward(self, x):
        return self.function(x, *self.parts)


# Segments of a backward pass end where a MiB of gradients is complete: these are larger.
LARGE = 600, 600

CASES = {
    "other strides": lambda: (
        Model(lambda x, w: functional.conv2d(x, w.permute(1, 0, 3, 2)), torch.randn(64, 96, 2, 2)),
        torch.randn(1, 64, 3, 3),
    ),
    "the cotangent, transposed": lambda: (Model(lambda x, w: x + w.t(), torch.randn(300, 200)), torch.randn(200, 300)),
    "a convolution on channels innermost": lambda: (
        nn.Conv2d(8, 64, 2),
        torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last),
    ),
    "expanded": lambda: (Model(lambda x, w: w.sum() * x, torch.randn(90_000)), torch.randn(1)),
    "expanded to size 1": lambda: (Model(lambda x, w: w.sum() * x, torch.randn(1, 1)), torch.randn(1)),
    "of a parameter with gaps": lambda: (
        Model(lambda x, w: (w * x).tanh(), torch.randn(300, 300)[:, ::2]),
        torch.randn(1),
    ),
    "of a transposed parameter": lambda: (
        Model(lambda x, w: (x @ w).tanh(), torch.randn(300, 300).t()),
        torch.randn(7, 300),
    ),
    "one tensor for two": lambda: (
        Model(lambda x, v, w: (v + w).tanh() * x, torch.randn(300, 300), torch.randn(300, 300)),
        torch.randn(1),
    ),
    "the cotangent for two": lambda: (
        Model(lambda x, v, w: v + w + x, torch.randn(300, 300), torch.randn(300, 300)),
        torch.randn(1),
    ),
    "one memory for two": lambda: (
        Model(lambda x, v, w: (v.view(-1) + w).tanh() * x, torch.randn(300, 300), torch.randn(90_000)),
        torch.randn(1),
    ),
    "parts of one memory": lambda: (
        Model(lambda x, v, w: torch.cat([v, w]).tanh() * x, torch.randn(300, 300), torch.randn(300, 300)),
        torch.randn(1),
    ),
    "of an output that is expanded": lambda: (
        Model(lambda x, w: (w * x).expand(500, 100), torch.randn(1, 100)),
        torch.randn(1),
    ),
    "of an output with gaps": lambda: (
        Model(lambda x, w: (w * x)[:, ::7], torch.randn(500, 100)),
        torch.randn(1),
    ),
    "read again by a product": lambda: (
        Model(lambda x, u, v, w: ((x * u).tanh() + v) * w, *torch.randn(3, *LARGE)),
        torch.randn(*LARGE),
    ),
    "read again by a matrix product": lambda: (
        Model(lambda x, u, v, w: ((x @ u + v) @ w).tanh(), *torch.randn(3, *LARGE)),
        torch.randn(*LARGE),
    ),
}


class Loss(torch.autograd.Function):
    """A loss that keeps nothing, and whose cotangent nothing else holds."""

    @staticmethod
    def forward(ctx, y):
        ctx.like = torch.empty_like(y, device="meta")
        return torch.empty(0)

    @staticmethod
    def backward(ctx, ct):
        return torch.ones_like(ctx.like, device="cpu")


def differentiate(model, x):
    """As in a loop that still holds what the model returned."""
    y = model(x)
    Loss.apply(y).backward(torch.empty(0))


def shared_memory(tensors):
    """Which of them share memory."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [storages.index(storage) for storage in storages]


@pytest.mark.parametrize("name", spread(list(CASES), str, every=3))
def test_a_gradient_that_autograd_copies_is_within_the_budget(name):
    torch.manual_seed(0)
    model, x = CASES[name]()
    eager = copy.deepcopy(model)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(model, (x,), budget=1)
    planned = ut.plan(model, (x,), budget=refusal.value.minimum_bytes)
    measured = measure_call(lambda: differentiate(planned, x), model.parameters(), [x])
    assert measured.peak_bytes <= refusal.value.minimum_bytes
    differentiate(eager, x)
    expected, found = ([item.grad for item in network.parameters()] for network in (eager, model))
    assert all(map(same_bits, expected, found))
    assert [item.stride() for item in expected] == [item.stride() for item in found]
    assert shared_memory(expected) == shared_memory(found)


def test_a_gradient_that_flows_on_lies_as_in_eager():
    """Operations before the model may have other bits with another layout."""
    torch.manual_seed(0)
    model = Model(lambda x, w: x.contiguous().tanh() + w, torch.randn(300, 200))
    planned = ut.plan(copy.deepcopy(model), (torch.randn(200, 300).t().requires_grad_(),))
    strides = []
    for network in (model, planned):
        x = torch.ones(200, 300, requires_grad=True).t() * 2
        x.register_hook(lambda gradient: strides.append(gradient.stride()))
        differentiate(network, x)
    assert strides == [(200, 1), (200, 1)]


def test_a_gradient_that_flows_on_is_not_changed_by_a_hook_of_a_parameter():
    model = Model(lambda x, w: x + w, torch.randn(300, 200))
    planned = ut.plan(copy.deepcopy(model), (torch.randn(300, 200).requires_grad_(),))
    found = []

    def clear(parameter):
        parameter.grad.zero_()

    for network in (model, planned):
        leaf = torch.ones(300, 200, requires_grad=True)
        next(network.parameters()).register_post_accumulate_grad_hook(clear)
        differentiate(network, leaf * 2)
        found.append(leaf.grad)
    assert torch.equal(*found)
