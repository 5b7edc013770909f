"""Which kernels `fast` chooses by a given table, what they compute, and what happens where the fastest do not fit."""

import copy

import pytest
import torch
from spread_cases import spread
from torch import nn
from torch.nn.functional import cross_entropy

import undertow as ut
from undertow.ir import Value
from undertow.ir.cost import Cost


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def make_step(model, args, targets, loss, costs="measured", **options):
    return ut.train_step(model, args, targets=targets, loss=loss, numerics="fast", costs=costs, **options)


def prefer(costs, is_preferred):
    """The table, with the operations that `is_preferred` names as the fastest."""
    return {key: (1 if is_preferred(key) else 10**9, workspace) for key, (_, workspace) in costs.items()}


def is_own(key):
    return key.startswith(("max_pool", "layer_norm", "cross_entropy")) and ".fused" in key


class Windows(nn.Module):
    """Pools of several geometries; the second one's input is read by something else as well."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.pools = nn.ModuleList(
            [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 2, ceil_mode=True), nn.MaxPool2d(2, 1, dilation=2)]
        )

    def forward(self, x):
        x = self.convolution(x)
        y = self.pools[1](x.relu()) + self.pools[0](x)
        return self.pools[3](self.pools[2](y)).flatten(1)


CASES = {
    "pools": (Windows, torch.randn(2, 3, 20, 20), None),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 5)),
        torch.randn(3, 4, 6),
        None,
    ),
    "mean": (lambda: nn.Linear(6, 40), torch.randn(7, 6), cross_entropy),
    "sum": (lambda: nn.Linear(6, 40), torch.randn(7, 6), lambda y, t: cross_entropy(y, t, reduction="sum")),
    "ignored": (lambda: nn.Linear(6, 40), torch.randn(7, 6), lambda y, t: cross_entropy(y, t, ignore_index=1)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("budget", [None, "1MiB"])
def test_own_kernels_take_both_passes(name, budget):
    torch.manual_seed(0)
    build, x, loss = CASES[name]
    model = build()
    targets = () if loss is None else (torch.randint(40, (len(x),)).fill_(1).scatter_(0, torch.tensor([0]), 3),)
    loss = loss or (lambda y: y.square().mean())
    exact = copy.deepcopy(model).double()
    expected = loss(exact(x.double()), *targets)
    expected.backward()
    costs = make_step(copy.deepcopy(model), (x,), targets, loss).costs
    step = make_step(model, (x,), targets, loss, prefer(costs, is_own), budget=budget)
    names = [node.name for node in step.plan.program.nodes]
    kind = {"pools": "max_pool", "layer norm": "layer_norm"}.get(name, "cross_entropy")
    assert f"{kind}.fused" in names and f"{kind}_backward.fused" in names
    assert not any(word in item for item in names for word in ("native_layer_norm", "nll_loss", "pool2d", "softmax"))
    # A few dozen roundings of float32 on numbers of about one.
    torch.testing.assert_close(step(x, *targets).double(), expected.detach(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_pytorchs_kernels_stay_where_they_are_faster():
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 40)), torch.randn(7, 6), torch.randint(40, (7,))
    costs = make_step(copy.deepcopy(model), (x,), (y,), cross_entropy).costs
    step = make_step(model, (x,), (y,), cross_entropy, prefer(costs, lambda key: not is_own(key)))
    assert not any(is_own(node.name) for node in step.plan.program.nodes)


@pytest.mark.parametrize("loss", ["weights", "smoothing", "returned"])
def test_other_losses_stay_as_they_are(loss):
    torch.manual_seed(0)
    x, y = torch.randn(7, 6), torch.randint(5, (7,))
    losses = {
        "weights": lambda out, y: cross_entropy(out, y, weight=torch.arange(1.0, 6.0)),
        "smoothing": lambda out, y: cross_entropy(out, y, label_smoothing=0.1),
        "returned": lambda out, y: nn.functional.nll_loss(p := out.log_softmax(1), y) + p.square().mean(),
    }
    model = nn.Linear(6, 5)
    eager = copy.deepcopy(model)
    costs = make_step(copy.deepcopy(model), (x,), (y,), losses[loss]).costs
    step = make_step(model, (x,), (y,), losses[loss], prefer(costs, is_own))
    assert not any(is_own(node.name) for node in step.plan.program.nodes)
    expected = losses[loss](eager(x), y)
    torch.testing.assert_close(step(x, y), expected.detach())


def convolutions():
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(32, 4, 3, padding=1))


def test_a_refusal_names_other_bits_and_they_are_planned_with_when_allowed():
    x = torch.randn(2, 8, 16, 16)

    def loss(y):
        return y.square().mean()

    measured = make_step(convolutions(), (x,), (), loss).costs
    # The more workspace a convolution takes, the faster it is said to be.
    costs = {key: (10**9 - workspace, workspace) for key, (_, workspace) in measured.items()}
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        make_step(convolutions(), (x,), (), loss, costs, budget=1)
    least, other = refusal.value.minimum_bytes, refusal.value.other_bits_minimum_bytes
    assert other < least
    with pytest.raises(ut.InfeasibleBudget, match="allow_other_bits=True"):
        make_step(convolutions(), (x,), (), loss, costs, budget=other)
    step = make_step(convolutions(), (x,), (), loss, costs, budget=other, allow_other_bits=True)
    assert step.plan.peak_bytes <= other
    assert any("least workspace" in note for note in step.plan.notes)
    assert ut.measure(step, x).peak_bytes <= other
    with pytest.raises(ut.InfeasibleBudget):
        make_step(convolutions(), (x,), (), loss, costs, budget=1, allow_other_bits=True)


@pytest.mark.parametrize("algorithm", spread(["winograd_f(4x4,3x3)", "blocked_im2col"], str, every=2))
def test_a_mask_is_held_at_one_bit_per_element_with_the_same_bits(algorithm):
    x = torch.randn(2, 8, 96, 96)

    def loss(y):
        return y.square().mean()

    costs = prefer(make_step(convolutions(), (x,), (), loss).costs, lambda key: algorithm in key)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        make_step(convolutions(), (x,), (), loss, costs, budget=1)
    found = []
    for budget in (None, refusal.value.minimum_bytes):
        model = convolutions()
        step = make_step(model, (x,), (), loss, costs, budget=budget)
        step(x)
        found.append([parameter.grad for parameter in model.parameters()])
        masks = [node.args[-1] for node in step.plan.program.nodes if node.name.startswith("convolution_backward")]
        kinds = [mask.tensor_type.dtype for mask in masks if isinstance(mask, Value)]
        assert kinds and (torch.uint8 in kinds) == (budget is not None)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_other_bits_are_not_taken_where_the_fastest_fit():
    x = torch.randn(2, 8, 16, 16)
    found = []
    for options in ({}, {"budget": "64MiB"}, {"budget": "64MiB", "allow_other_bits": True}):
        planned = ut.plan(convolutions(), (x,), numerics="fast", **options)
        planned(x).square().mean().backward()
        found.append([parameter.grad for parameter in planned.parameters()])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_exact_has_no_other_bits():
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(convolutions(), (torch.randn(2, 8, 16, 16),), budget=1, allow_other_bits=True)
    assert refusal.value.other_bits_minimum_bytes is None


ONE_CHANNEL = {
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(16, 1, 5, padding=2), nn.LeakyReLU(0.1), nn.Conv2d(1, 64, 3, padding=1), nn.Conv2d(64, 64, 3)
    ),
    "transposed": lambda: nn.Sequential(
        nn.Conv2d(16, 1, 5), nn.Sigmoid(), nn.ConvTranspose2d(1, 64, 3), nn.Conv2d(64, 8, 3), nn.BatchNorm2d(8)
    ),
    "pooled": lambda: nn.Sequential(
        nn.Conv2d(16, 1, 3), nn.Tanh(), nn.ConvTranspose2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_CHANNEL)
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
def test_one_channel_lies_in_both_layouts(name, is_training, monkeypatch):
    """What PyTorch makes from it may have the other layout; our own kernels read both correctly."""
    pytest.importorskip("numba")

    def cost_of(node):
        is_native = node.name in ("convolution", "convolution_backward") and 1 in node.args[1].tensor_type.shape[:2]
        is_own = any(part in node.name for part in ("winograd_f(4x4", ".fused", ".evaluate"))
        return Cost(1 if is_native or is_own else 1000, 0)

    monkeypatch.setattr("undertow.pipeline.find_costs", lambda nodes, terms, live: cost_of)
    torch.manual_seed(0)
    model, x = ONE_CHANNEL[name](), torch.randn(2, 16, 20, 20)
    exact = copy.deepcopy(model).double()
    for module in (model, exact):
        module.train(is_training)
    with torch.set_grad_enabled(is_training):
        planned = ut.plan(model, (x,), numerics="fast")
        assert any(part in node.name for node in planned.plan.nodes for part in ("winograd", ".fused"))
        y, expected = planned(x), exact(x.double())
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-4 * float(expected.detach().abs().max()))
    if is_training:
        weights = torch.randn(y.shape)
        (y * weights).sum().backward()
        (expected * weights).sum().backward()
        scale = max(float(item.grad.abs().max()) for item in exact.parameters())
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=1e-3 * scale)


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
def test_a_value_added_to_itself(is_training):
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            h = self.norm(self.convolution(x))
            return (h + h).relu()

    torch.manual_seed(0)
    model, x = Doubled().train(is_training), torch.randn(2, 8, 12, 12)
    expected = copy.deepcopy(model)(x)
    with torch.set_grad_enabled(is_training):
        torch.testing.assert_close(ut.plan(model, (x,), numerics="fast")(x), expected, rtol=1e-3, atol=1e-3)
