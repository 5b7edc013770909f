"""Budgets on CUDA: eager's gradients at every budget, and a peak that the prediction meets.

The caching allocator hands out blocks of more than a MiB without splitting off less than a MiB, and counts them whole.
What that adds depends on which blocks are free; it is less than a MiB for each such block that is alive.
"""

import copy
import gc

import pytest
import torch
from exactness import same_bits
from torch import nn
from torch.nn.functional import cross_entropy

import undertow as ut
from undertow.models import ZOO
from undertow.runtime.cuda_graphs import GRAPH_EXTRA, idle_graph_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MIB = 1 << 20


def most_large_blocks(plan):
    """The most blocks of over a MiB that are alive at the same time: storages, and a kernel's workspace.

    PyTorch's allocator may give each of them up to a MiB more than it asks for.
    """
    tables = plan.tables
    storage, sizes = tables.storage, tables.storage_bytes
    alive, most = set(), 0
    for node, frees, workspace_bytes in zip(plan.nodes, tables.frees, tables.workspace_bytes, strict=True):
        alive |= {storage[value] for value in node.named_outputs if sizes[storage[value]] > MIB}
        most = max(most, len(alive) + (workspace_bytes > MIB))
        alive -= set(frees)
    return most


def test_the_gradients_are_eagers_at_every_budget(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UNDERTOW_GRAPHS", "off")
    torch.manual_seed(0)
    model = ZOO["resnet50"].build().cuda()
    x, y = torch.randn(16, 3, 128, 128).cuda(), torch.randint(1000, (16,)).cuda()
    eager = copy.deepcopy(model)
    cross_entropy(eager(x), y).backward()

    def make(budget):
        return ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, budget=budget)

    with pytest.raises(ut.InfeasibleBudget) as refusal:
        make(1)
    most = make("100GiB").plan.peak_bytes
    least = refusal.value.minimum_bytes
    for budget in (least, (least + most) // 2, most):
        step = make(budget)
        model.zero_grad(set_to_none=True)
        step(x, y)
        expected = dict(eager.named_parameters())
        assert [name for name, item in model.named_parameters() if not same_bits(item.grad, expected[name].grad)] == []
        model.zero_grad(set_to_none=True)
        gc.collect()
        before = torch.cuda.memory_allocated()
        measured_bytes = ut.measure(step, x, y).peak_bytes - before + sum(step.plan.held.values())
        assert abs(measured_bytes - step.plan.peak_bytes) <= MIB * most_large_blocks(step.plan)


def test_a_graph_stays_within_the_budget(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)
    model = ZOO["resnet50"].build().cuda()
    x, y = torch.randn(16, 3, 128, 128).cuda(), torch.randint(1000, (16,)).cuda()
    most = ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, budget="100GiB").plan.peak_bytes
    for share in (0.6, 0.8, 1.0):
        budget = int(share * most)
        step = ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, budget=budget)
        gc.collect()
        others = torch.cuda.memory_allocated() + idle_graph_bytes() - sum(step.plan.held.values())
        others += step.plan.held[GRAPH_EXTRA]
        for _ in range(3):
            measured = ut.measure(step, x, y)
        model.zero_grad(set_to_none=True)
        assert "\ncaptured as a CUDA graph" in str(step.plan)
        assert measured.peak_bytes - others <= budget
        step.release()


def test_a_step_on_the_cpu_is_measured_there():
    network, x = nn.Linear(100, 100), torch.randn(50, 100)
    step = ut.train_step(network, (x,), loss=lambda y: y.square().mean(), budget="10MiB")
    assert ut.measure(step, x).peak_bytes == pytest.approx(step.plan.peak_bytes, rel=0.005)


class Attention(nn.Module):
    """Attention in float32 with dropout, whose kernel reads its seed on the CPU."""

    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x):
        heads = self.inward(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, dropout_p=0.2)
        return x + self.outward(mixed.transpose(1, 2).flatten(2))


def test_attention_that_drops_out_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UNDERTOW_GRAPHS", "off")
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention() for _ in range(3))).cuda()
    x = torch.randn(4, 256, 256).cuda()

    def mean_square(y):
        return y.square().mean()

    def make(budget):
        return ut.train_step(model, (x,), loss=mean_square, budget=budget)

    eager = copy.deepcopy(model)
    torch.cuda.manual_seed(1)
    mean_square(eager(x)).backward()
    expected = {name: item.grad for name, item in eager.named_parameters()}
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        make(1)
    for budget in (None, refusal.value.minimum_bytes):
        step = make(budget)
        assert any("efficient_attention_backward" in node.name for node in step.plan.nodes)
        assert step.plan.has_measured_costs
        model.zero_grad(set_to_none=True)
        torch.cuda.manual_seed(1)
        step(x)
        assert all(same_bits(item.grad, expected[name]) for name, item in model.named_parameters())
        model.zero_grad(set_to_none=True)
        gc.collect()
        before = torch.cuda.memory_allocated()
        measured_bytes = ut.measure(step, x).peak_bytes - before + sum(step.plan.held.values())
        assert abs(measured_bytes - step.plan.peak_bytes) <= MIB * most_large_blocks(step.plan)
