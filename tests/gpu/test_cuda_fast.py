"""Fast numerics on a GPU: compiled groups agree with eager, also within budgets."""

from __future__ import annotations

import copy

import pytest
import torch

import undertow as ut
from undertow.models import SMALL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def full_precision():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def workload(name):
    zoo = SMALL[name]
    torch.manual_seed(0)
    model = zoo.build().cuda()
    args, targets = (tuple(item.cuda() for item in items) for items in (zoo.example_inputs(4), zoo.example_targets(4)))
    return model, args, targets, zoo.loss


def check_near_eager(step, model, eager, args, targets, loss):
    torch.manual_seed(1)
    expected = loss(eager(*args), *targets)
    expected.backward()
    torch.manual_seed(1)
    torch.testing.assert_close(step(*args, *targets), expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-4 * theirs.grad.norm() + 1e-7
    for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "lenet5", "gpt", "resnet50", "unet", "vgg_small"])
def test_groups_compute_what_eager_does(name):
    model, args, targets, loss = workload(name)
    eager = copy.deepcopy(model)
    step = ut.train_step(model, args, targets=targets, loss=loss, numerics="fast")
    assert any(node.name.startswith("fused") for node in step.plan.nodes)
    check_near_eager(step, model, eager, args, targets, loss)


@pytest.mark.parametrize("name", ["gpt", "resnet50"])
def test_groups_at_the_least_memory(name):
    model, args, targets, loss = workload(name)
    settings = {"targets": targets, "loss": loss, "numerics": "fast", "costs": "model"}
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.train_step(model, args, **settings, budget=1)
    eager = copy.deepcopy(model)
    step = ut.train_step(model, args, **settings, budget=refusal.value.minimum_bytes)
    check_near_eager(step, model, eager, args, targets, loss)


def test_odd_sizes_are_padded():
    model = torch.nn.Linear(64, 50_257, bias=False).cuda().bfloat16()
    x = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(50_257, (128,), device="cuda")
    eager = copy.deepcopy(model)
    step = ut.train_step(model, (x,), targets=(targets,), loss=torch.nn.functional.cross_entropy, numerics="fast")
    shapes = [node.named_outputs[0].tensor_type.shape for node in step.plan.nodes if node.name == "mm"]
    assert all(size % 8 == 0 for shape in shapes for size in shape)
    loss = torch.nn.functional.cross_entropy(eager(x), targets)
    loss.backward()
    torch.testing.assert_close(step(x, targets), loss, rtol=1e-2, atol=1e-2)
    assert (model.weight.grad - eager.weight.grad).norm() <= 0.02 * eager.weight.grad.norm()
