"""A batch in shards, in one process: the bits of a plain loop that does the same."""

import copy

import pytest
import torch
from sharded_loop import train_plainly
from torch import nn
from torch.nn import functional

import undertow as ut


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


def classify(num_steps, num_examples, last=None):
    draw = torch.Generator().manual_seed(5)
    sizes = [num_examples] * (num_steps - 1) + [last or num_examples]
    return [
        ((torch.randn(size, 3, 8, 8, generator=draw),), (torch.randint(5, (size,), generator=draw),)) for size in sizes
    ]


def state_of(model, optimizer):
    state = [
        item for key in model.parameters() for item in optimizer.state[key].values() if isinstance(item, torch.Tensor)
    ]
    return [*model.parameters(), *model.buffers(), *state]


def assert_same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


OPTIMIZERS = {
    "sgd": lambda items: torch.optim.SGD(items, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda items: torch.optim.AdamW(items, lr=0.01),
    "rmsprop": lambda items: torch.optim.RMSprop(items, lr=0.001),
}


@pytest.mark.parametrize("num_shards", [1, 3, 8])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits_of_the_plain_loop(num_shards, optimizer):
    torch.manual_seed(0)
    model = convnet()
    plain = copy.deepcopy(model)
    batches = classify(4, 24, last=17)
    own, others = (OPTIMIZERS[optimizer](item.parameters()) for item in (model, plain))
    step = ut.train_step(
        model, batches[0][0], targets=batches[0][1], loss=functional.cross_entropy, optimizer=own, shards=num_shards
    )
    before = torch.get_rng_state()
    losses = [step(*args, *targets) for args, targets in batches]
    assert torch.equal(before, torch.get_rng_state())
    expected = train_plainly(plain, functional.cross_entropy, others, batches, num_shards)
    assert_same(losses, expected)
    assert_same(state_of(model, own), state_of(plain, others))
