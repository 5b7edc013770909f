"""`numerics="bf16"`: what autocast computes, from float32 weights, into float32 gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import undertow as ut
from undertow.models import SMALL

NAMES = ["lenet5", "vgg_small", "resnet50", "char_gpt", "mlp"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))


@pytest.mark.parametrize("name", [name for name in NAMES if name in SMALL])
def test_a_step_is_one_captured_inside_autocast(name):
    entry = SMALL[name]
    torch.manual_seed(0)
    model = entry.build()
    args, targets = entry.example_inputs(3), entry.example_targets(3)
    found = []
    for numerics, is_inside in (("bf16", False), ("bf16", True), ("fast", True)):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(twin.parameters())
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            step = ut.train_step(twin, args, targets=targets, loss=entry.loss, optimizer=optimizer, numerics=numerics)
            losses = [step(*args, *targets) for _ in range(2)]
        assert all(loss.dtype is torch.float32 for loss in losses)
        assert all(item.dtype is torch.float32 for item in twin.parameters())
        moments = [item for state in optimizer.state.values() for item in state.values()]
        assert all(item.dtype is torch.float32 for item in moments)
        found.append([*losses, *twin.state_dict().values()])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_bits_are_eagers_where_no_other_kernel_is_chosen():
    eager, x, y = network(), torch.randn(32, 16), torch.randint(4, (32,))
    planned = ut.plan(copy.deepcopy(eager), (x,), numerics="bf16")
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = cross_entropy(eager(x), y)
    expected.backward()
    torch.manual_seed(1)
    output = planned(x)
    assert output.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        found = cross_entropy(output, y)
    found.backward()
    assert torch.equal(found, expected)
    for ours, theirs in zip(planned.parameters(), eager.parameters(), strict=True):
        assert ours.grad.dtype is torch.float32
        assert torch.equal(ours.grad, theirs.grad)


def test_training_reaches_about_the_loss_of_float32():
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    y = torch.sin(x @ torch.randn(16, 1))
    finals = {}
    for numerics in ("exact", "bf16"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        step = ut.train_step(model, (x,), targets=(y,), loss=mse_loss, optimizer=optimizer, numerics=numerics)
        first = float(step(x, y))
        for _ in range(300):
            last = float(step(x, y))
        assert last < first / 5
        finals[numerics] = last / first
    # bfloat16 has 8 bits: the loss that is left is of the order of its rounding squared, or of float32's loss.
    assert abs(finals["bf16"] - finals["exact"]) < 2**-7


def test_a_budget_is_kept_with_the_same_bits():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    x, y = torch.randn(512, 64), torch.randn(512, 64)

    def make(budget):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        step = ut.train_step(
            twin, (x,), targets=(y,), loss=mse_loss, optimizer=optimizer, numerics="bf16", budget=budget
        )
        return twin, step

    with pytest.raises(ut.InfeasibleBudget) as refusal:
        make(1)
    least = refusal.value.minimum_bytes
    assert 'numerics="bf16"' not in str(refusal.value)
    found = []
    for budget in (least, "1GiB"):
        twin, step = make(budget)
        step(x, y)
        measured = ut.measure(step, x, y)
        assert measured.peak_bytes <= step.plan.peak_bytes
        found.append(list(twin.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_refusal_names_it():
    with pytest.raises(ut.InfeasibleBudget, match='numerics="bf16", with float32 weights'):
        ut.plan(network(), (torch.randn(64, 16),), budget=1)


def test_a_region_inside_the_model_wins():
    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return self.inner(x)

    x = torch.randn(4, 8)
    assert ut.plan(Guarded(), (x,), numerics="bf16")(x).dtype is torch.float32


def test_a_region_around_the_call_does_not():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    planned = ut.plan(model, (x,), numerics="bf16")
    for kind in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", kind):
            assert planned(x).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_that_are_not_float32_are_refused(dtype):
    with pytest.raises(ut.CallError, match=f"0.weight is {dtype}"):
        ut.plan(network().to(dtype), (torch.randn(4, 16, dtype=dtype),), numerics="bf16")


def test_an_error_of_the_model_is_eagers():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ut.plan(nn.Linear(8, 8), (torch.randn(4, 7),), numerics="bf16")


def test_a_copy_computes_in_bfloat16_too():
    x = torch.randn(4, 16)
    assert copy.deepcopy(ut.plan(network(), (x,), numerics="bf16"))(x).dtype is torch.bfloat16
