"""What is sent between ranks: buckets that change no bit, predicted times, bytes."""

import hashlib
from dataclasses import replace

import pytest
import torch
from rank_processes import run_ranks
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.errors import PlanError
from undertow.ir.check_plan import check_plan
from undertow.passes import reduction

DIVISIONS = {
    "as planned": None,
    "each alone": lambda gradients, *rest: [1] * len(gradients),
    "all together": lambda gradients, *rest: [len(gradients)],
    "three and the others": lambda gradients, *rest: [3, len(gradients) - 3],
}


def make(parallel, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Dropout(0.2), nn.Linear(200, 64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(12, 8), torch.randint(3, (12,))
    settings = {"loss": functional.cross_entropy, "optimizer": optimizer, "shards": 4, "parallel": parallel}
    step = ut.train_step(model, (x,), targets=(y,), **settings, **options)
    return step, x, y


def train(parallel, **options):
    step, x, y = make(parallel, **options)
    losses = [step(x, y) for _ in range(3)]
    step.settle()
    digest = hashlib.sha256()
    for tensor in (*losses, *step.model.state_dict().values()):
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest(), step, x, y


def train_with_buckets(mesh):
    found = []
    chosen = reduction.choose_sizes
    for choose in DIVISIONS.values():
        reduction.choose_sizes = choose or chosen
        for options in ({"clip_norm": 0.3}, {"shard_state": True, "late_parameters": True}):
            digest, step, _, _ = train(mesh, **options)
            found.append((digest, len(step.link.buckets)))
    reduction.choose_sizes = chosen
    return found


@pytest.mark.parametrize("size", [3])
def test_buckets_change_no_bit(size):
    torch.set_num_threads(1)
    expected = [train(None, clip_norm=0.3)[0], train(None)[0]] * len(DIVISIONS)
    for found in run_ranks(train_with_buckets, size):
        assert [digest for digest, _ in found] == expected
        assert [number for _, number in found][2:] == [8, 8, 1, 1, 2, 2]


def describe(mesh):
    found = []
    for options in ({}, {"budget": "100MiB"}, {"shard_state": True}, {"shard_state": True, "late_parameters": True}):
        digest, step, x, y = train(mesh, **options)
        plan = check_plan(step.plan)
        with pytest.raises(PlanError, match="bound"):
            check_plan(replace(plan, lower_bound_ns=plan.times.step_ns + 1))
        before = step.link.ranks.messages.sent_bytes
        step(x, y)
        step.settle()
        sent_bytes = step.link.ranks.messages.sent_bytes - before
        busy, times = plan.times.busy_ns, plan.times
        found.append((digest, sent_bytes, plan.sent_bytes, busy, times.step_ns, plan.lower_bound_ns, str(plan)))
    return found


def test_predicted_times_and_bytes():
    torch.set_num_threads(1)
    expected, _, _, _ = train(None)
    for found in run_ranks(describe, 2):
        digests, sent, planned, busy, steps, bounds, texts = zip(*found, strict=True)
        assert set(digests) == {expected}
        for sent_bytes, most_bytes in zip(sent, planned, strict=True):
            assert 0.9 * most_bytes < sent_bytes <= most_bytes
        for lanes, step_ns, bound_ns, text in zip(busy, steps, bounds, texts, strict=True):
            assert list(lanes) == ["computing", "link"] and min(lanes.values()) > 0
            assert max(lanes.values()) <= step_ns <= sum(lanes.values())
            assert bound_ns <= step_ns
            assert "lanes: " in text and "sent; computing " in text
        assert bounds[0] == 0  # nothing is searched without a budget
        assert bounds[1] >= busy[1]["link"]
