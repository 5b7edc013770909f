"""Shapes that change: the same bits at every length, captures within their memory, one warning."""

import copy
import gc
import logging
import random
import tracemalloc
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import undertow as ut
from undertow.calls import runner
from undertow.models.gpt import char_gpt
from undertow.models.lstm import lstm
from undertow.pipeline import NEAR_NOTE, Request, record
from undertow.planner import plan
from undertow.record.capture import capture
from undertow.record.traced_tensor import TracedTensor
from undertow.terms import Terms

MODELS = {
    "gpt": lambda: char_gpt(vocabulary=17, context=128, num_layers=1, width=32),
    "lstm": lambda: lstm(vocabulary=17, width=16, num_layers=2),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def make_tokens(length):
    return torch.randint(17, (2, length), generator=torch.Generator().manual_seed(length))


def loss_of(logits, tokens):
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


def shuffled(lengths):
    return random.Random(0).sample(list(lengths), len(lengths))


@pytest.mark.filterwarnings("ignore:.*different types of arguments")
@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_every_length_has_eagers_bits(make_model):
    torch.manual_seed(0)
    model = make_model()
    eager, stepped = copy.deepcopy(model), copy.deepcopy(model)
    planned = ut.plan(model, (make_tokens(5),))
    step = ut.train_step(stepped, (make_tokens(5),), targets=(make_tokens(5),), loss=loss_of)
    for length in shuffled([*range(1, 40), 5, 128]):
        tokens, found = make_tokens(length), []
        for network in (eager, planned, stepped):
            torch.manual_seed(length)
            network.zero_grad()
            if network is stepped:
                loss = step(tokens, tokens)
            else:
                loss = loss_of(network(tokens), tokens)
                loss.backward()
            found.append([loss.detach(), *(item.grad for item in network.parameters()), torch.get_rng_state()])
        assert all(all(map(torch.equal, found[0], other)) for other in found[1:]), length


class Branching(nn.Module):
    """Branches on the length; its constants, its operations and the sizes among their arguments change with it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(17, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, tokens):
        x, length = self.embedding(tokens), tokens.shape[1]
        for index, layer in enumerate(self.layers):
            y = layer(x) * (1 / length if index else -0.0 if length % 2 else 0.0)
            x = x + (y.tanh() if length % 3 == index else y.sigmoid())
        if length > 10:
            x = x.flip(1) if length % 2 else x.roll(length // 2, 1)
        x = x[:, length // 3 :] * torch.arange(length - length // 3)[:, None].float()
        return self.layers[length % 3](x) if length % 4 else self.layers[0](x).cumsum(1)


@pytest.mark.parametrize("kind", ["plan", "train_step"])
def test_a_model_that_does_something_else_at_each_length_has_eagers_bits(kind):
    torch.manual_seed(0)
    model = Branching()
    eager, tokens = copy.deepcopy(model), make_tokens(7)

    def value_of(outputs):
        return outputs.square().mean()

    step = ut.plan(model, (tokens,)) if kind == "plan" else ut.train_step(model, (tokens,), loss=value_of)
    for length in shuffled([*range(3, 27), *range(3, 9)]):
        tokens = make_tokens(length)
        expected = value_of(eager(tokens))
        expected.backward()
        loss = step(tokens)
        if kind == "plan":
            loss = value_of(loss)
            loss.backward()
        assert torch.equal(loss, expected), length
        for item, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert (item.grad is None) == (other.grad is None), length
            assert item.grad is None or bits(item.grad) == bits(other.grad), length
        model.zero_grad(), eager.zero_grad()


def bits(tensor):
    return tensor.contiguous().numpy().tobytes()


def test_a_saved_tensor_does_not_keep_the_recording_alive():
    def count_twins():
        gc.collect()
        return sum(type(item) is TracedTensor for item in gc.get_objects())

    planned = ut.plan(MODELS["gpt"](), (make_tokens(4),))
    before = count_twins()
    planned(make_tokens(5)).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        planned(make_tokens(6)).sum().backward()
    assert count_twins() == before


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collections_are_on_again_as_they_were(is_enabled):
    class Failing(nn.Module):
        def forward(self, x):
            assert gc.isenabled() is False
            if x.shape[0] > 2:
                raise ZeroDivisionError
            return x.exp()

    assert gc.isenabled()
    try:
        if not is_enabled:
            gc.disable()
        captured = capture(lambda x: x.exp(), (torch.randn(2),), {})
        assert gc.isenabled() is is_enabled and captured.program.nodes
        request = planned_request(Failing())
        record(request, (torch.randn(2),), {})
        assert gc.isenabled() is is_enabled
        with pytest.raises(ZeroDivisionError):
            record(request, (torch.randn(3),), {})
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()


def planned_request(model):
    return Request(model, model.__call__, Terms())


def test_captures_stay_within_their_memory(monkeypatch):
    monkeypatch.setattr(runner, "LEAST_CAPTURES", 3)
    model = MODELS["gpt"]()
    planned = ut.plan(model, (make_tokens(4),))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for length in range(4, 9):
            planned(make_tokens(length)).sum().backward()
        captures = planned.undertow_runner._variants
        assert len(captures) == 5 and not seen
        (first, *_) = captures.values()
        monkeypatch.setattr(runner, "CAPTURES_BYTES", 4 * first[0].num_bytes)
        for length in (4, 9, 10, 11, 12):  # 4 was used last, and stays longer than 5
            planned(make_tokens(length)).sum().backward()
            assert len(captures) <= 5
    (warning,) = [item for item in seen if "ut.buckets" in str(item.message)]
    assert "types of arguments were recorded" in str(warning.message) and "tokens i64[2,9]" in str(warning.message)
    lengths = [
        int(variants[0].captured.program.inputs[-1].value.tensor_type.shape[1]) for variants in captures.values()
    ]
    assert lengths[-3:] == [10, 11, 12]


def test_many_shapes_are_warned_of_once(monkeypatch):
    monkeypatch.setattr(runner, "MANY_CAPTURES", 3)
    planned = ut.plan(nn.Linear(4, 4), (torch.randn(1, 4),))
    with pytest.warns(UserWarning, match=r"3 different types of arguments .* f32\[3,4\].* see ut.buckets") as seen:
        for length in range(1, 7):
            planned(torch.randn(length, 4))
    assert len(seen) == 1


def test_a_slow_replan_is_announced(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="undertow")
    planned = ut.plan(nn.Linear(4, 4), (torch.randn(1, 4),))
    planned(torch.randn(2, 4))
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    monkeypatch.setattr(runner, "SLOW_PLANNING_S", 0.0)
    planned(torch.randn(3, 4))
    assert caplog.records[-1].levelno == logging.WARNING
    assert "arguments or a model of new types (input f32[3,4])" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_the_bytes_of_captures_are_not_counted_too_low(make_model):
    model = make_model()
    planned = ut.plan(model, (make_tokens(3),))

    def run(length):
        planned(make_tokens(length)).sum().backward()
        model.zero_grad()

    run(3), run(4)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for length in range(5, 11):
            run(length)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    captures = list(planned.undertow_runner._variants.values())[-6:]
    assert taken <= sum(variant.num_bytes for variants in captures for variant in variants)


@pytest.fixture
def searches(monkeypatch):
    """The instances that were searched."""
    found = []
    original = plan.find_curve

    def find_curve(instance, **others):
        found.append(instance)
        return original(instance, **others)

    monkeypatch.setattr(plan, "find_curve", find_curve)
    return found


@pytest.mark.parametrize("costs", ["measured", pytest.param("model", marks=pytest.mark.exhaustive)])
def test_a_new_length_is_planned_from_a_near_one(costs, searches):
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    free = ut.train_step(model, (make_tokens(48),), targets=(make_tokens(48),), loss=loss_of)
    budget = int(0.85 * free.plan.peak_bytes)
    eager = copy.deepcopy(model)
    tokens = make_tokens(40)
    step = ut.train_step(model, (tokens,), targets=(tokens,), loss=loss_of, budget=budget, costs=costs)
    assert len(searches) == 1 and NEAR_NOTE not in step.plan.notes
    for length in (48, 36, 44, 30):
        tokens = make_tokens(length)
        torch.manual_seed(1)
        loss = step(tokens, tokens)
        torch.manual_seed(1)
        eager.zero_grad()
        expected = loss_of(eager(tokens), tokens)
        expected.backward()
        gradients = [item.grad for item in eager.parameters()]
        assert torch.equal(loss, expected) and all(map(torch.equal, (p.grad for p in model.parameters()), gradients))
        model.zero_grad()
        assert len(searches) == 1 and NEAR_NOTE in step.plan.notes
        assert step.plan.peak_bytes <= budget and step.plan.gap >= 0
        if costs == "measured":
            assert ut.measure(step, tokens, tokens).peak_bytes <= budget
        if length == 48:
            assert step.plan.recomputed or step.plan.peak_bytes < free.plan.peak_bytes


def test_where_no_near_schedule_fits_the_step_is_searched_and_the_least_is_stated(searches):
    tokens, others = make_tokens(20), make_tokens(30)
    arguments = {"loss": loss_of, "costs": "model"}
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.train_step(MODELS["gpt"](), (others,), targets=(others,), budget=1, **arguments)
    least = refusal.value.minimum_bytes
    step = ut.train_step(MODELS["gpt"](), (tokens,), targets=(tokens,), budget=least - 1, **arguments)
    del searches[:]
    with pytest.raises(ut.InfeasibleBudget) as refused:
        step(others, others)
    assert refused.value.minimum_bytes == least and len(searches) == 1


def test_a_step_of_other_operations_or_far_sizes_is_searched(searches):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x).tanh()
            return (y.exp() if len(x) > 50 else y).sum()

    step = ut.train_step(Growing(), (torch.randn(40, 8),), budget="1MiB", costs="model")
    for length, num_searches in ((45, 1), (55, 2), (60, 2), (400, 3), (41, 3)):
        step(torch.randn(length, 8))
        step.drop_gradients()
        assert len(searches) == num_searches
