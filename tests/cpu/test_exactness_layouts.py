"""Bits of training steps where strides along sizes of 1 decide the layout, and the layout decides the order of sums."""

import copy

import pytest
import torch
from exactness import assert_same_steps, differences, run_steps
from torch import nn

import undertow as ut


class NormOverChannels(nn.Module):
    """A LayerNorm over the channels of an image, which reads and writes it permuted."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ResidualNorms(nn.Module):
    """The cotangent of a residual sum is a view of the LayerNorm's cotangent: eager does not add into it."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 1)
        self.deep = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.last = NormOverChannels(channels)

    def forward(self, x):
        x = self.first(x)
        x = x + self.norms[0](self.deep(x))
        return self.last(x + self.norms[1](x))


class TwoReaders(nn.Module):
    """The cotangent of the image comes first from a convolution with channels last: eager adds the other into it."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels)
        self.last = nn.Conv2d(channels, channels, 1).to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.norm(self.first(x))
        return x.sin() + self.last(x)


class AddedToItself(TwoReaders):
    """As above, but the same cotangent comes twice: eager does not add a tensor into itself."""

    def forward(self, x):
        x = self.norm(self.first(x))
        sine = x.sin()
        return sine + self.last(x + x)


class TokensAsImage(nn.Module):
    """With a batch of 1, an image that is a view of permuted tokens no longer has channels last."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.linears = nn.ModuleList(nn.Linear(channels, channels) for _ in range(2))
        self.deep = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x):
        hidden = self.linears[0](self.norm(x)).relu().transpose(1, 2).view(x.shape[0], x.shape[2], 4, 4)
        hidden = self.deep(hidden).flatten(2).transpose(1, 2)
        return x + self.linears[1](nn.functional.gelu(hidden))


MODELS = {
    "residual norms": (lambda: ResidualNorms(16), (3, 16, 1, 1)),
    "two readers": (lambda: TwoReaders(16), (3, 16, 1, 1)),
    "added to itself": (lambda: AddedToItself(16), (3, 16, 1, 1)),
    "tokens as image": (lambda: nn.Sequential(TokensAsImage(16), TokensAsImage(16)), (1, 16, 16)),
}


def weighted_sum(output):
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    return (output * weights).sum()


@pytest.mark.parametrize("name", MODELS)
def test_steps_have_the_bits_of_eager(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    assert_same_steps(make(), (torch.randn(shape),), {}, weighted_sum)


@pytest.mark.parametrize("name", MODELS)
def test_steps_at_the_least_memory_have_the_bits_of_eager(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(copy.deepcopy(model), (x,), budget=1, costs="model")
    planned = ut.plan(copy.deepcopy(model), (x,), budget=refusal.value.minimum_bytes, costs="model")
    steps = [run_steps(network, (x,), {}, weighted_sum, 2, None) for network in (model, planned)]
    assert differences(*steps) == []
