"""Groups for a GPU, run on the CPU one operation after another: what is joined, what is kept, and the results."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from spread_cases import spread

import undertow as ut
from undertow import pipeline
from undertow.fast.groups import Group
from undertow.ir import Program
from undertow.ir.check import check_program
from undertow.ir.cost import signature
from undertow.models import SMALL
from undertow.passes.fusion import fuse

NAMES = sorted(SMALL)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Steps made in the test are fused; before and after, pairwise."""
    found: list[Program] = []
    plain = pipeline.compact_oversized  # the last pass before updates are added

    def compact_and_fuse(program: Program) -> Program:
        before = plain(program)
        after = check_program(fuse(before))
        found.extend((before, after))
        return after

    monkeypatch.setattr(pipeline, "compact_oversized", compact_and_fuse)
    return found


def _workload(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], tuple[Any, ...], Any]:
    """In float64, where another order of additions changes far less than a wrong formula would."""
    zoo = SMALL[name]
    torch.manual_seed(0)
    model = zoo.build().double()
    args = tuple(item.double() if item.is_floating_point() else item for item in zoo.example_inputs(4))
    return model, args, zoo.example_targets(4), zoo.loss


def _groups(program: Program) -> list[Group]:
    return [node.operation.run for node in program.nodes if isinstance(node.operation.run, Group)]


def _check_same(step: Any, model: Any, eager: Any, args: Any, targets: Any, loss: Any) -> None:
    torch.manual_seed(1)
    expected = loss(eager(*args), *targets)
    expected.backward()
    torch.manual_seed(1)
    found = step(*args, *targets)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        scale = theirs.grad.abs().max()
        assert (ours.grad - theirs.grad).abs().max() <= 1e-11 * scale + 1e-15
    for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_fused_step_computes_what_eager_does(programs: list[Program], name: str) -> None:
    model, args, targets, loss = _workload(name)
    eager = copy.deepcopy(model)
    step = ut.train_step(model, args, targets=targets, loss=loss)
    _check_same(step, model, eager, args, targets, loss)
    assert _groups(programs[1])


@pytest.mark.parametrize("name", spread(["gpt", "resnet50", "unet"], str, every=3))
def test_fused_step_at_its_least_memory(programs: list[Program], name: str) -> None:
    model, args, targets, loss = _workload(name)
    settings: dict[str, Any] = {"targets": targets, "loss": loss, "costs": "model"}
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.train_step(model, args, **settings, budget=1)
    eager = copy.deepcopy(model)
    step = ut.train_step(model, args, **settings, budget=refusal.value.minimum_bytes)
    assert step.plan.recomputed
    _check_same(step, model, eager, args, targets, loss)


def test_norm_activation_and_sum_are_one_group(programs: list[Program]) -> None:
    model, args, targets, loss = _workload("resnet50")
    ut.train_step(model, args, targets=targets, loss=loss)
    before, after = programs
    assert len(after.nodes) < len(before.nodes)
    convolutions = [node for node in after.first_pass if node.name == "convolution"]
    # One group after each convolution, and the groups of pooling and loss.
    assert len([node for node in after.first_pass if node.name.startswith("fused")]) <= len(convolutions) + 3


def test_weights_in_another_precision_are_not_kept(programs: list[Program]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    x, y = torch.randn(256, 64), torch.randn(256, 64)
    with torch.autocast("cpu", torch.bfloat16):
        step = ut.train_step(model, (x,), targets=(y,), loss=torch.nn.functional.mse_loss)
    kept = {item.value.tensor_type.shape for item in step.plan.kept}
    assert kept and (64, 64) not in kept


def test_levels_of_a_deep_sum_do_not_grow(programs: list[Program]) -> None:
    """What is passed from layer to layer is read from memory, and not summed again from the first layer."""

    class Residual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x

    ut.train_step(Residual(), (torch.randn(8, 16),), targets=(torch.randn(8, 16),), loss=torch.nn.functional.mse_loss)
    assert max(len(group.fragment.reads) for group in _groups(programs[1])) <= 6


def test_the_same_step_is_fused_the_same_way(programs: list[Program]) -> None:
    """Sets of values are ordered by addresses, which differ from recording to recording."""
    for _ in range(4):
        model, args, targets, loss = _workload("vgg_small")
        ut.train_step(model, args, targets=targets, loss=loss)
    fused = [[signature(node) for node in program.nodes] for program in programs[1::2]]
    assert all(names == fused[0] for names in fused)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler for the CPU")
def test_compiled_groups_compute_the_same(programs: list[Program]) -> None:
    model, args, targets, loss = _workload("lenet300")
    eager = copy.deepcopy(model)
    step = ut.train_step(model, args, targets=targets, loss=loss)
    for group in _groups(programs[1]):
        group.compile()
    _check_same(step, model, eager, args, targets, loss)


def test_groups_hold_neither_products_nor_draws(programs: list[Program]) -> None:
    model, args, targets, loss = _workload("gpt")
    ut.train_step(model, args, targets=targets, loss=loss)
    names = {node.name for group in _groups(programs[1]) for node in group.fragment.nodes if not node.operation.is_view}
    assert not [name for name in names if name.startswith(("mm", "addmm", "bmm", "convolution", "bernoulli"))]
