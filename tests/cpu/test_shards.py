"""A batch in shards, in one process: the bits of a plain loop that does the same."""

import copy

import pytest
import torch
from sharded_loop import train_plainly
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.models import SMALL


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


def train_both(model, loss, make_optimizer, batches, num_shards, **options):
    """Losses and state after the batches: of a step in shards, and of the plain loop."""
    plain = copy.deepcopy(model)
    own, others = (make_optimizer(item.parameters()) for item in (model, plain))
    args, targets = batches[0]
    step = ut.train_step(model, args, targets=targets, loss=loss, optimizer=own, shards=num_shards, **options)
    before = torch.get_rng_state()
    losses = [step(*args, *targets) for args, targets in batches]
    assert torch.equal(before, torch.get_rng_state())
    expected = train_plainly(plain, loss, others, batches, num_shards, **options)
    return [*losses, *state_of(model, own)], [*expected, *state_of(plain, others)]


@pytest.mark.parametrize("num_shards", [1, 3, 8])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits_of_the_plain_loop(num_shards, optimizer):
    torch.manual_seed(0)
    batches = classify(4, 24, last=17)
    found, expected = train_both(convnet(), functional.cross_entropy, OPTIMIZERS[optimizer], batches, num_shards)
    assert_same(found, expected)


@pytest.mark.parametrize("options", [{"clip_norm": 0.5}, {"accumulate": 2, "seed": 7}], ids=["clipped", "accumulated"])
@pytest.mark.parametrize("name", ["resnet50", "unet", "gpt", "lstm"])
def test_bits_of_networks(name, options):
    entry = SMALL[name]
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    batches = [(entry.example_inputs(10, draw), entry.example_targets(10, draw)) for _ in range(4)]
    found, expected = train_both(entry.build(), entry.loss, OPTIMIZERS["adamw"], batches, 4, **options)
    assert_same(found, expected)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_budgets(numerics):
    """Every budget is met, and changes no bit; the stated minimum is accepted."""
    entry = SMALL["lenet5"]
    draw = torch.Generator().manual_seed(1)
    inputs, targets = entry.example_inputs(32, draw), entry.example_targets(32, draw)

    def make(budget):
        torch.manual_seed(0)
        model = entry.build()
        optimizer = torch.optim.AdamW(model.parameters())
        settings = {"loss": entry.loss, "optimizer": optimizer, "budget": budget, "numerics": numerics, "shards": 4}
        return ut.train_step(model, inputs, targets=targets, **settings)

    def train(step):
        return [*[step(*inputs, *targets) for _ in range(2)], *state_of(step.model, step.optimizer)]

    free = make(None)
    expected = train(free)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        make(100_000)
    least, most = refusal.value.minimum_bytes, free.peak_bytes
    for budget in (least, (least + most) // 2):
        step = make(budget)
        assert_same(train(step), expected)
        assert ut.measure(step, *inputs, *targets).peak_bytes <= budget
    with pytest.raises(ut.InfeasibleBudget):
        make(least - 64)


def test_measuring_leaves_no_trace():
    """The generators of shards follow from the number of the call: a measured call must not count."""
    found = []
    for is_measured in (False, True):
        torch.manual_seed(0)
        model = convnet()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        (args, targets), second = classify(2, 8)
        step = ut.train_step(model, args, targets=targets, loss=functional.cross_entropy, optimizer=optimizer, shards=4)
        step(*args, *targets)
        if is_measured:
            ut.measure(step, *args, *targets)
        found.append([step(*second[0], *second[1]), *state_of(model, optimizer)])
    assert_same(*found)


def test_sums():
    """The gradient of a loss that is a sum is the sum over the shards."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3, dtype=torch.float64)
    x, y = torch.randn(10, 6, dtype=torch.float64), torch.randn(10, 3, dtype=torch.float64)

    def loss(found, wanted):
        return functional.mse_loss(found, wanted, reduction="sum")

    step = ut.train_step(model, (x,), targets=(y,), loss=loss, shards=3, loss_is_sum=True)
    total = step(x, y)
    expected = loss(model(x), y)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    # Sums of 10 terms in another order differ by at most that many roundings, of the largest partial sum.
    torch.testing.assert_close(total, expected.detach(), rtol=10 * 2**-52, atol=0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        bound = 10 * 2**-52 * float(gradient.abs().max()) * 10
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=bound)


class Centred(nn.Module):
    """Reads a buffer that it writes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.layer(x - self.mean)


@pytest.mark.parametrize(
    ("model", "num_examples", "options", "error", "words"),
    [
        (Centred, 8, {"shards": 2}, ut.CaptureError, "reads the buffer mean and writes it"),
        (lambda: nn.Linear(4, 2), 3, {"shards": 4}, ut.CallError, "the batch has 3 examples"),
        (lambda: nn.Linear(4, 2), 8, {"shards": 0}, ut.CallError, "shards must be a whole number"),
        (lambda: nn.Linear(4, 2), 8, {"shards": "4"}, ut.CallError, "shards must be a whole number"),
        (lambda: nn.Linear(4, 2), 8, {"shards": 2, "seed": -1}, ut.CallError, "seed must be a whole number"),
    ],
    ids=["buffer", "few examples", "none", "text", "seed"],
)
def test_refusals(model, num_examples, options, error, words):
    x, y = torch.randn(num_examples, 4), torch.randint(2, (num_examples,))
    with pytest.raises(error, match=words):
        ut.train_step(model(), (x,), targets=(y,), loss=functional.cross_entropy, **options)


def test_walking_shows_each_shard():
    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    x[4] = float("nan")
    step = ut.train_step(nn.Linear(4, 2), (x,), targets=(y,), loss=functional.cross_entropy, shards=3)
    losses = [outputs[0] for node, outputs in step.walk(x, y) if node.name == "nll_loss_forward"]
    assert [bool(loss.isfinite()) for loss in losses] == [True, True, False]
