"""Steps captured as CUDA graphs: they have the bits of steps without a graph, and leave the user's memory alone."""

from __future__ import annotations

import copy

import pytest
import torch
from exactness import same_bits
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

import undertow as ut

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def deterministic():
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    yield
    torch.backends.cudnn.deterministic = before


def make_model(dropout=0.2):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Flatten(),
        nn.Linear(8 * 64, 5),
    ).cuda()  # fmt: skip


def batches(count=6):
    generator = torch.Generator("cuda").manual_seed(1)
    images = torch.randn(count, 16, 3, 8, 8, device="cuda", generator=generator)
    return [(image, torch.randint(5, (16,), device="cuda", generator=generator)) for image in images]


def make_step(model, **settings):
    return ut.train_step(model, batches(1)[0][:1], targets=batches(1)[0][1:], loss=cross_entropy, **settings)


def train(step, model, is_cleared=True):
    """The loss, gradients, parameters and buffers of every step, and the generator's state at the end."""
    torch.manual_seed(3)
    found = []
    for batch in batches():
        if is_cleared:
            model.zero_grad(set_to_none=True)
        found.append(step(*batch))
        found += [item.grad.clone() for item in model.parameters() if item.grad is not None]
        found += [item.detach().clone() for item in (*model.parameters(), *model.buffers())]
    return [*found, torch.cuda.get_rng_state()]


def differences(found, expected):
    return [index for index, pair in enumerate(zip(found, expected, strict=True)) if not same_bits(*pair)]


def is_captured(step):
    return "\ncaptured as a CUDA graph" in str(step.plan)


def check_same_as_without(monkeypatch, is_cleared=True, make_optimizer=None, **settings):
    results = []
    for switch in ("off", "on"):
        monkeypatch.setenv("UNDERTOW_GRAPHS", switch)
        model = make_model()
        optimizer = None if make_optimizer is None else make_optimizer(model.parameters())
        step = make_step(model, optimizer=optimizer, **settings)
        results.append(train(step, model, is_cleared))
        assert is_captured(step) == (switch == "on"), step.plan.notes
    assert differences(*results) == []


@pytest.mark.parametrize("numerics", ["exact", "fast", "bf16"])
def test_the_bits_of_the_step_without_a_graph(monkeypatch, numerics):
    check_same_as_without(monkeypatch, numerics=numerics)


def test_gradients_that_are_added_up(monkeypatch):
    check_same_as_without(monkeypatch, is_cleared=False)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, capturable=True),
    ],
)
def test_updates_inside(monkeypatch, make_optimizer):
    check_same_as_without(monkeypatch, make_optimizer=make_optimizer)


def test_an_optimizer_that_counts_on_the_cpu_is_named():
    model = make_model()
    step = make_step(model, optimizer=torch.optim.Adam(model.parameters()))
    assert "not captured as a CUDA graph: Adam counts its steps on the CPU" in str(step.plan)


def test_a_learning_rate_that_changes():
    results = []
    for is_planned in (False, True):
        model = make_model(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = make_step(model, optimizer=optimizer) if is_planned else None
        for index, (image, target) in enumerate(batches(8)):
            optimizer.param_groups[0]["lr"] = 0.1 if index < 5 else 0.01
            if step is not None:
                step(image, target)
            else:
                optimizer.zero_grad()
                cross_entropy(model(image), target).backward()
                optimizer.step()
        results.append([item.detach() for item in model.parameters()])
    assert differences(*results) == []


def test_what_the_user_still_has_is_not_written_over():
    model = make_model(dropout=0.0)
    step = make_step(model)
    results, copies = [], []
    for batch in batches():
        model.zero_grad(set_to_none=True)
        results.append([step(*batch), *(item.grad for item in model.parameters())])
        copies.append([item.clone() for item in results[-1]])
    for result, before in zip(results, copies, strict=True):
        assert differences(result, before) == []


def test_parameters_that_are_moved_are_found():
    model = make_model(dropout=0.0)
    step = make_step(model)
    train(step, model)
    assert is_captured(step)
    for item in model.parameters():
        item.data = item.data.clone() * 1.5
    twin = copy.deepcopy(model)
    for batch in batches():
        model.zero_grad(set_to_none=True)
        twin.zero_grad(set_to_none=True)
        expected = cross_entropy(twin(batch[0]), batch[1])
        expected.backward()
        assert same_bits(step(*batch), expected)
        assert differences(*([item.grad for item in network.parameters()] for network in (model, twin))) == []
    assert is_captured(step)


def test_other_shapes_release_the_graph():
    model = make_model(dropout=0.0)
    step = make_step(model)
    train(step, model)
    assert is_captured(step)
    image, target = batches(1)[0]
    model.zero_grad(set_to_none=True)
    step(image[:8], target[:8])
    assert not is_captured(step)
    assert len(train(step, model)) > 0 and is_captured(step)


def test_what_cannot_be_captured_runs_and_says_why():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            return (y if y.sum() > 0 else -y).square().mean()

    model = Branching().cuda()
    x = torch.randn(8, 4, device="cuda")
    step = ut.train_step(model, (x,), loss=lambda loss: loss)
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        step(x)
    assert "not captured as a CUDA graph: a branch on a tensor's value" in str(step.plan)


def test_versions_rise():
    model = make_model(dropout=0.0)
    step = make_step(model)
    train(step, model)
    mean = model[1].running_mean
    before = mean._version
    model.zero_grad(set_to_none=True)
    step(*batches(1)[0])
    assert is_captured(step) and mean._version > before


@pytest.mark.parametrize("numerics", ["exact", "bf16"])
def test_a_transformer_that_drops_out(monkeypatch, numerics):
    results = []
    for switch in ("off", "on"):
        monkeypatch.setenv("UNDERTOW_GRAPHS", switch)
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True).cuda()
        x = torch.randn(6, 8, 32, 64, device="cuda")
        step = ut.train_step(model, (x[0],), loss=lambda y: y.float().square().mean(), numerics=numerics)
        torch.manual_seed(3)
        results.append([])
        for batch in x:
            model.zero_grad(set_to_none=True)
            results[-1] += [step(batch), *(item.grad.clone() for item in model.parameters())]
        results[-1].append(torch.cuda.get_rng_state())
    assert differences(*results) == []
    assert is_captured(step) or "not captured as a CUDA graph: " in str(step.plan)


@pytest.mark.parametrize("kind", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_without_dropout_draws_nothing(kind):
    x = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.get_rng_state()
    with sdpa_kernel(getattr(SDPBackend, kind)):
        nn.functional.scaled_dot_product_attention(x, x, x)
    assert same_bits(torch.cuda.get_rng_state(), before)


def test_attention_that_is_run_again():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.TransformerEncoderLayer(128, 2, 512, dropout=0.0, batch_first=True) for _ in range(4)])
    model.cuda()
    x = torch.randn(32, 512, 128, device="cuda")
    settings = {"loss": lambda y: y.float().square().mean(), "numerics": "bf16"}
    most = ut.train_step(model, (x,), **settings, budget="1GiB").plan.peak_bytes
    step = ut.train_step(model, (x,), **settings, budget=int(0.7 * most))
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        step(x)
    assert len(step.plan.recomputed) > 0
    assert is_captured(step) or "over the budget" in str(step.plan), step.plan.notes


def test_release_frees_the_memory():
    model = make_model(dropout=0.0)
    step = make_step(model)
    train(step, model)
    model.zero_grad(set_to_none=True)
    assert is_captured(step)
    assert ut.measure(step, *batches(1)[0]).peak_bytes >= 0.9 * step.plan.peak_bytes
    pools = {item["segment_pool_id"] for item in torch.cuda.memory_snapshot()}
    model.zero_grad(set_to_none=True)
    step.release()
    torch.cuda.empty_cache()
    assert len({item["segment_pool_id"] for item in torch.cuda.memory_snapshot()}) == len(pools) - 1
