"""Questions leave no trace: `ut.measure` and `ut.largest_batch` put back what their steps changed."""

import copy
import random

import numpy
import pytest
import torch
from torch import nn

import undertow as ut

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Noisy(nn.Module):
    """Has buffers that change, draws from PyTorch's generator and from one of its own."""

    def __init__(self, device):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4)).to(device)
        self.own = torch.Generator(device).manual_seed(5)

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.own, device=x.device)
        return self.layers(x + noise).square().sum()


def make_batch(device, count=32):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1)).to(device)


def state_of(model, optimizer):
    """Everything that a step changes, by value, and which objects the tensors are."""
    generators = [torch.get_rng_state(), model.own.get_state(), random.getstate(), numpy.random.get_state()[1].tolist()]
    if torch.cuda.is_available():
        generators.append(torch.cuda.get_rng_state())
    tensors = [*model.parameters(), *model.buffers(), *(item.grad for item in model.parameters())]
    state = {} if optimizer is None else optimizer.state_dict()
    return copy.deepcopy((tensors, state, generators)), [id(item) for item in tensors if item is not None]


def assert_equal(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        assert_equal(list(left.values()), list(right.values()))
    elif isinstance(left, tuple | list):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            assert_equal(*pair)
    else:
        assert left == right


def ask(question, model, optimizer, device):
    x = make_batch(device)
    if question == "measure a model":
        ut.measure(model, x)
    elif question == "measure a planned model":
        ut.measure(ut.plan(model, (x,)), x)
    elif question == "measure a step":
        ut.measure(ut.train_step(model, (x,), optimizer=optimizer), x)
    elif question == "measure a step that accumulates":
        step = ut.train_step(model, (x,), optimizer=optimizer, accumulate=3 if optimizer else 1)
        ut.measure(step, x)
        assert not optimizer or step.training.live["later step"].num_calls == 0
    else:
        batches = lambda count: ((torch.randn(count, 8).to(device),), ())  # noqa: E731
        budget = "30KiB" if device == "cpu" else "128MiB"
        ut.largest_batch(model, batches, budget=budget, optimizer=optimizer, costs="model")


QUESTIONS = [
    "measure a model",
    "measure a planned model",
    "measure a step",
    "measure a step that accumulates",
]
OPTIMIZERS = {
    "none": lambda parameters: None,
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_stepped", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_leaves_no_trace(question, make_optimizer, has_stepped, device):
    torch.manual_seed(0)
    model = Noisy(device)
    optimizer = make_optimizer(model.parameters())
    if has_stepped:
        model(make_batch(device)).backward()
        if optimizer is not None:
            optimizer.step()
        next(model.parameters()).grad = None
    before = state_of(model, optimizer)
    ask(question, model, optimizer, device)
    assert_equal(state_of(model, optimizer), before)


def test_asking_for_the_largest_batch_leaves_no_trace():
    torch.manual_seed(0)
    model = Noisy("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(make_batch("cpu")).backward()
    optimizer.step()
    before = state_of(model, optimizer)
    ask("largest batch", model, optimizer, "cpu")
    assert_equal(state_of(model, optimizer), before)


def test_training_goes_on_as_if_nothing_had_been_asked():
    def train(asks):
        torch.manual_seed(0)
        model, x = Noisy("cpu"), make_batch("cpu")
        step = ut.train_step(model, (x,), optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
        losses = []
        for _ in range(3):
            losses.append(step(x).item())
            if asks:
                ut.measure(step, x)
        return losses, list(model.parameters())

    assert_equal(train(True), train(False))


def test_an_error_inside_leaves_no_trace_either():
    class Failing(Noisy):
        def forward(self, x):
            super().forward(x).backward()
            raise RuntimeError("no")

    torch.manual_seed(0)
    model = Failing("cpu")
    before = state_of(model, None)
    with pytest.raises(RuntimeError, match="^no$"):
        ut.measure(model, make_batch("cpu"))
    assert_equal(state_of(model, None), before)
