"""Plans of stages without any ranks: what crosses, what is held, the command, and what is refused."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.api import stage_planning
from undertow.api.stage_reports import report_stages
from undertow.cli.commands import main
from undertow.models import SMALL
from undertow.ranks.mesh import Mesh
from undertow.stages.cutting import judge


def chain(num_layers=6, width=32):
    return nn.Sequential(*(layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.Tanh())))


def report(model, x, **options):
    settings = {"shards": 4, "costs": "model", "mesh": Mesh(stages=2), **options}
    return report_stages(model, (x,), **settings)


def test_bytes_over_a_boundary():
    found = report(chain(), torch.randn(32, 32))
    shard = 8 * 32 * 4
    assert [(item.source, item.target, item.num_bytes) for item in found.links] == [(0, 1, shard), (1, 0, shard)]


class Skip(nn.Module):
    """The first layer's output is read by the last one, and half of a concatenation comes back."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(64, 32)
        self.middle = chain(4)

    def forward(self, x):
        first = torch.tanh(self.first(x))
        return self.last(torch.cat([self.middle(first), first], 1))


def test_a_skip_over_a_stage_is_sent_once_each_way(monkeypatch):
    def cut_at_layers(profile, schedule, *unused):
        return judge(profile, schedule, [profile.names.index(name) for name in ("middle.0", "cat")])

    monkeypatch.setattr(stage_planning, "find_cut", cut_at_layers)
    found = report(Skip(), torch.randn(32, 32), mesh=Mesh(stages=3))
    links = {(item.source, item.target): item.num_bytes for item in found.links}
    shard = 8 * 32 * 4
    # Both halves of the concatenation's cotangent come to stage 1, which adds its own to the one of the skip.
    assert links == {(0, 1): shard, (0, 2): shard, (1, 2): shard, (2, 1): 2 * shard, (1, 0): shard}


def test_tied_weights_are_held_twice_and_sent_back():
    entry = SMALL["gpt"]
    tokens = entry.example_inputs(8, torch.Generator().manual_seed(0))
    targets = entry.example_targets(8, torch.Generator().manual_seed(1))
    found = report_stages(
        entry.build(), tokens, mesh=Mesh(stages=2), shards=4, costs="model", loss=entry.loss, targets=targets
    )
    whole = sum(item.nbytes for item in entry.build().parameters())
    tied = 97 * 64 * 4
    assert sum(row.parameter_bytes for row in found.stages) == whole + tied
    assert sum(item.num_bytes for item in found.links if item.source == 1) >= tied


def test_early_stages_hold_more_and_a_budget_is_kept():
    x = torch.randn(2048, 96)
    free = report(chain(8, 96), x)
    budget = int(0.9 * max(free.peak_bytes))
    planned = report(chain(8, 96), x, budget=budget)
    assert max(planned.peak_bytes) <= budget < max(free.peak_bytes)
    assert free.held[0]["other shards in flight"] > free.held[1].get("other shards in flight", 0)
    with pytest.raises(ut.InfeasibleBudget, match="cannot be met by rank") as refusal:
        report(chain(8, 96), x, budget=1 << 20)
    assert refusal.value.minimum_bytes > 1 << 20


def test_the_command(capsys, tmp_path):
    page = tmp_path / "stages.html"
    words = ["plan", "lenet5", "--batch", "8", "--parallel", "stages=2", "--costs", "model"]
    assert main([*words, "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "stage 1 is" in text
    assert main([*words, "--json", "--stage-schedule", "zero-bubble"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["shards"] == 8
    assert len(data["ranks"]) == 2
    assert sum(len(pieces) for pieces in data["pieces"]) == 2 * 3 * 8
    content = page.read_text()
    assert content.count("<rect") == 2 * 2 * 8
    assert "<script" not in content


def branch(x):
    return x * 2 if x.sum() > 0 else x


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.second(branch(self.first(x)))


class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        self.kept = self.first(x)
        return self.second(self.kept)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (chain(1), {"mesh": Mesh(stages=8)}, "8 stages are more than the"),
        (Branch(), {}, "branches on a tensor's value"),
        (Keeper(), {}, "the forward pass assigns kept"),
        (chain(), {"shards": 2, "mesh": Mesh(data=4, stages=2)}, "2 shards cannot be divided over 4 rows"),
        (chain(), {"schedule": "fifo"}, "schedule must be one of"),
    ],
)
def test_refusals(model, options, message):
    with pytest.raises((ut.CallError, ut.CaptureError), match=message):
        report(model, torch.randn(32, 32), **options)


def test_few_shards_are_said():
    with pytest.warns(UserWarning, match="2 shards run through the stages of 4 ranks, which wait 60%"):
        report(chain(), torch.randn(32, 32), shards=2, mesh=Mesh(stages=4))


def test_one_process_refuses():
    x = torch.randn(8, 32)
    with pytest.raises(ut.CallError, match="give shards= as well"):
        ut.train_step(chain(), (x,), loss=lambda y: functional.mse_loss(y, y), parallel=ut.Mesh(stages=2))
