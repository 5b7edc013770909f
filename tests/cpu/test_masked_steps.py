"""Steps that hold masks, and steps that train shared values: bits beside eager PyTorch, bytes by the allocator."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.coding.tensors import CodedTensor
from undertow.ops.looking_up import LOOK_UP, SUM_BY_CODE
from undertow.shrink.network import SharedNetwork, write_back


class Tied(nn.Module):
    """Two layers with one weight, whose mask is known by the first name."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def make_plain():
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))


STEPS = {
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {}),
    "clipped": (torch.optim.SGD, {"clip_norm": 0.5}),
    "accumulated": (torch.optim.SGD, {"accumulate": 2}),
}


def run_eager(model, kept, make_optimizer, options, x, wanted, num_steps):
    """The same by hand: an update, then what it did to removed weights goes to their hidden values."""
    hidden = {name: torch.zeros_like(mask, dtype=torch.float32) for name, mask in kept.items()}
    named = dict(model.named_parameters())
    optimizer = make_optimizer(model.parameters(), lr=0.05)
    losses = []
    with torch.no_grad():
        for name, mask in kept.items():
            named[name].mul_(mask)
    every = options.get("accumulate", 1)
    for number in range(num_steps):
        loss = functional.mse_loss(model(x), wanted)
        loss.backward()
        losses.append(loss.detach())
        if (number + 1) % every:
            continue
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, mask in kept.items():
                hidden[name] += torch.where(mask, 0.0, named[name])
                named[name].masked_fill_(~mask, 0.0)
    return losses, hidden


@pytest.mark.parametrize("make", [make_plain, Tied])
@pytest.mark.parametrize("name", STEPS)
def test_masks_hold_with_the_bits_of_a_projection_by_hand(name, make):
    make_optimizer, options = STEPS[name]
    torch.manual_seed(0)
    model = make()
    x, wanted = torch.randn(32, 64), torch.randn(32, 64)
    kept = {name: torch.rand(item.shape) < 0.3 for name, item in model.named_parameters() if item.dim() > 1}
    eager = copy.deepcopy(model)
    losses, hidden = run_eager(eager, kept, make_optimizer, options, x, wanted, 6)

    masks = ut.Masks(model, kept)
    optimizer = make_optimizer(model.parameters(), lr=0.05)
    step = ut.train_step(
        model, (x,), targets=(wanted,), loss=functional.mse_loss, optimizer=optimizer, masks=masks, **options
    )
    assert "project_on_mask" in str(step.plan)
    for loss in losses:
        assert torch.equal(step(x, wanted), loss)
    for name, item in eager.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], item), name
    for name, mask in kept.items():
        assert not dict(model.named_parameters())[name][~mask].any()
        assert torch.equal(masks.hidden[name], hidden[name]), name


def test_masks_that_change_between_steps_hold_in_the_next_without_a_new_plan():
    model, x, wanted = make_plain(), torch.randn(8, 64), torch.randn(8, 64)
    masks = ut.Masks(model, {"0.weight": torch.ones(96, 64, dtype=torch.bool)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ut.train_step(model, (x,), targets=(wanted,), loss=functional.mse_loss, optimizer=optimizer, masks=masks)
    step(x, wanted)
    plan = step.plan
    masks.kept["0.weight"][:, ::2] = False
    step(x, wanted)
    assert step.plan is plan
    assert not model[0].weight[:, ::2].any() and model[0].weight[:, 1::2].all()


def test_a_budget_counts_masks_and_is_kept():
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model, x, wanted = nn.Sequential(*layers), torch.randn(512, 64), torch.randn(512, 64)
    kept = {name: torch.rand(item.shape) < 0.3 for name, item in model.named_parameters() if item.dim() > 1}
    masks = ut.Masks(model, kept)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = {"targets": (wanted,), "loss": functional.mse_loss, "optimizer": optimizer, "masks": masks}
    whole = ut.train_step(model, (x,), **asked)
    # A byte for each mask's element, four for its hidden value.
    assert whole.plan.held["masks"] == 5 * 64 * 64 * 5
    budget = int(whole.plan.peak_bytes * 0.85)
    step = ut.train_step(model, (x,), budget=budget, **asked)
    assert ut.measure(step, x, wanted).peak_bytes <= budget
    step(x, wanted)
    assert all(not item[~kept[name]].any() for name, item in model.named_parameters() if name in kept)


def test_a_saved_plan_holds_its_masks(tmp_path):
    torch.manual_seed(0)
    first, x, wanted = make_plain(), torch.randn(8, 64), torch.randn(8, 64)
    second, kept = copy.deepcopy(first), {"0.weight": torch.rand(96, 64) < 0.5}

    def make(model, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        asked = {"targets": (wanted,), "loss": functional.mse_loss, "optimizer": optimizer, "costs": "model"}
        return ut.train_step(model, (x,), **asked, **options)

    step = make(first, masks=ut.Masks(first, kept))
    ut.save_plan(step, tmp_path / "plan.json")
    read = make(second, masks=ut.Masks(second, kept), saved_plan=tmp_path / "plan.json")
    for _ in range(3):
        assert torch.equal(step(x, wanted), read(x, wanted))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    with pytest.raises(ut.PlanError, match="another step"):
        make(second, saved_plan=tmp_path / "plan.json")


def test_wrong_masks_are_refused():
    model = make_plain()
    with pytest.raises(ut.CallError, match="no parameter 'nothing'"):
        ut.Masks(model, {"nothing": torch.ones(1, dtype=torch.bool)})
    with pytest.raises(ut.CallError, match=r"boolean, \[96, 64\]"):
        ut.Masks(model, {"0.weight": torch.ones(96, 64)})


def make_coded(shape, num, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < 0.5
    codes = torch.randint(num, (int(mask.sum()),), generator=generator, dtype=torch.int32)
    return CodedTensor(tuple(shape), mask, codes, torch.randn(num, generator=generator) * 0.1)


def test_shared_values_are_trained_by_the_sum_of_their_weights_gradients():
    torch.manual_seed(0)
    model, x, wanted = make_plain(), torch.randn(16, 64), torch.randn(16, 64)
    coded = {"0.weight": make_coded((96, 64), 6), "2.weight": make_coded((64, 96), 9, seed=1)}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    network = SharedNetwork(model, coded)
    optimizer = torch.optim.SGD(network.codebooks.parameters(), lr=0.5)
    step = ut.train_step(network, (x,), targets=(wanted,), loss=functional.mse_loss, optimizer=optimizer, strict=True)
    assert "look_up" in str(step.plan) and "sum_by_code" in str(step.plan)
    assert not step.plan.without_rule

    # The same with PyTorch alone: gradients of plain weights, added up by code in float64.
    plain = copy.deepcopy(model)
    write_back(plain, coded)
    weights = [plain[0].weight, plain[2].weight]
    for weight in weights:
        weight.requires_grad_()
    gradients = torch.autograd.grad(functional.mse_loss(plain(x), wanted), weights)
    step(x, wanted)
    for codebook, tensor, gradient in zip(network.codebooks, coded.values(), gradients, strict=True):
        sums = torch.zeros(len(tensor.codebook), dtype=torch.float64)
        sums.index_add_(0, tensor.codes, gradient[tensor.mask].double())
        assert torch.equal(codebook.detach(), tensor.codebook - 0.5 * sums.float())


def test_looking_up_on_other_paths_gives_the_same():
    codes = torch.randint(4, (5, 7))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        codebook = torch.randn(3, dtype=torch.float64).to(dtype)
        weights = LOOK_UP(codebook, codes)
        assert torch.equal(weights, torch.cat([torch.zeros(1, dtype=dtype), codebook])[codes])
        sums = SUM_BY_CODE(weights, codes, 3)
        wanted = torch.stack([weights[codes == code].double().sum() for code in (1, 2, 3)]).to(dtype)
        assert torch.equal(sums, wanted)
