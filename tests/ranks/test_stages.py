"""A model divided over ranks by stages: the bits of one process with the same shards, on any mesh, by any schedule."""

import hashlib

import pytest
import torch
from rank_processes import run_ranks
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.models import SMALL
from undertow.stages.schedules import SCHEDULES

SHARDS = 4


class Skips(nn.Module):
    """Skips over several stages, a weight that the first and the last layer share, batch normalisation, dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU()) for _ in range(4))
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(12, 12)
        self.head.weight = self.first.weight

    def forward(self, x):
        h = start = self.first(x)
        kept = []
        for block in self.blocks:
            h = self.dropout(block(h)) + start[:, :12]
            kept.append(h)
        return self.head(h + kept[0] * kept[2] + start)


def mean_square(found, wanted):
    return functional.mse_loss(found, wanted)


CASES = {
    "vgg_small": {"clip_norm": 0.5},
    "resnet18_small": {},
    "unet": {"numerics": "fast"},
    "gpt": {"accumulate": 2},
    "lstm": {"gradient_norm": True},
    "skips": {"seed": 5},
}


def make(name, draw, sizes):
    if name == "skips":
        batches = [((torch.randn(n, 12, generator=draw),), (torch.randn(n, 12, generator=draw),)) for n in sizes]
        return Skips(), mean_square, batches
    entry = SMALL[name]
    batches = [(entry.example_inputs(n, draw), entry.example_targets(n, draw)) for n in sizes]
    return entry.build(), entry.loss, batches


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def train(name, parallel, **options):
    """Losses, weights, buffers and the optimizer's state after a few steps, as hashes."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(3)
    sizes = {"skips": (12, 11), "gpt": (8, 7)}.get(name, (8, 8))
    model, loss, batches = make(name, draw, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    args, targets = batches[0]
    settings = {"loss": loss, "optimizer": optimizer, "shards": SHARDS, "costs": "model", **CASES[name], **options}
    step = ut.train_step(model, args, targets=targets, parallel=parallel, **settings)
    losses, norms = [], []
    for args, targets in batches:
        losses.append(step(*args, *targets))
        norms.append(step.gradient_norm)
    step.settle()
    state = step.optimizer_state()["state"]
    tensors = [item for key in sorted(state) for item in state[key].values()]
    return digest(losses), digest(model.parameters()), digest(model.buffers()), digest(tensors), norms


def train_all(mesh, num_stages, plan):
    """What each case of the plan gives on this mesh: (name, schedule, whether within a budget)."""
    mesh = ut.Mesh(data=mesh.data // num_stages, stages=num_stages)
    return [train(name, mesh, schedule=schedule, **options) for name, schedule, options in plan]


@pytest.fixture(scope="module")
def expected():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks: bits depend on it
    yield {name: train(name, None) for name in CASES}
    torch.set_num_threads(before)


def everything(schedules):
    return [(name, schedule, {}) for name in CASES for schedule in schedules]


# Stages, rows, and which case runs by which schedule: every pair somewhere.
MESHES = [
    (2, 1, everything(["1f1b"]) + [("skips", name, {}) for name in SCHEDULES if name != "1f1b"]),
    pytest.param(
        *(3, 1, [("resnet18_small", "zero-bubble", {}), ("gpt", "gpipe", {}), ("unet", "interleaved", {})]),
        marks=pytest.mark.exhaustive,
    ),
    (2, 2, [("vgg_small", "zero-bubble", {}), ("gpt", "interleaved", {}), ("skips", "1f1b", {})]),
    pytest.param(4, 1, [("skips", "1f1b", {}), ("gpt", "zero-bubble", {})]),
    *(
        pytest.param(stages, rows, everything(list(SCHEDULES)), marks=pytest.mark.exhaustive)
        for stages, rows in ((2, 1), (3, 1), (4, 1), (2, 2))
    ),
]


@pytest.mark.parametrize(("num_stages", "num_rows", "plan"), MESHES)
def test_bits_of_one_process(expected, num_stages, num_rows, plan):
    wanted = [expected[name] for name, _, _ in plan]
    for found in run_ranks(train_all, num_stages * num_rows, num_stages, plan):
        assert found == wanted


class Wide(nn.Module):
    """Layers of equal size, whose activations are most of what a step holds."""

    def __init__(self, num_layers=8, width=96):
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.Tanh()))
        )

    def forward(self, x):
        return self.layers(x)


def within_budgets(mesh, num_stages, budgets):
    """Predicted and measured peaks, and a hash of the weights, at each budget and by each schedule."""
    mesh = ut.Mesh(data=mesh.data // num_stages, stages=num_stages)
    return [wide_step(mesh, budget, schedule) for schedule, budget in budgets]


def wide_step(mesh, budget, schedule="1f1b"):
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(2048, 96), torch.randn(2048, 96)
    settings = {"loss": mean_square, "optimizer": optimizer, "shards": SHARDS, "budget": budget}
    try:
        step = ut.train_step(model, (x,), targets=(y,), parallel=mesh, schedule=schedule, **settings)
    except (ut.InfeasibleBudget, ut.RankLost) as refusal:
        return str(refusal)
    step(x, y)
    measured = ut.measure(step, x, y).peak_bytes
    step(x, y)
    # What crosses is one activation of 512 x 96 numbers for each of 4 shards, and its cotangent on the way back.
    before = dict(step.stage_link.sent_bytes) if mesh else {}
    step(x, y)
    sent = {pair: num - before.get(pair, 0) for pair, num in step.stage_link.sent_bytes.items()} if mesh else {}
    assert all(num == 512 * 96 * 4 * SHARDS for num in sent.values())
    step.settle()
    return step.peak_bytes, measured, len(sent), digest(model.parameters())


def test_each_rank_keeps_its_budget():
    torch.set_num_threads(1)
    alone = wide_step(None, None)
    plans = [("gpipe", "6500KiB"), ("1f1b", "4050KiB"), ("zero-bubble", "4500KiB"), ("1f1b", "1MiB")]
    for found in run_ranks(within_budgets, 2, 2, plans):
        *fitting, refused = found
        assert "cannot be met by rank" in refused
        for (_, budget), (predicted, measured, num_links, weights) in zip(plans, fitting, strict=False):
            assert num_links == 1
            assert weights == alone[-1]
            assert measured <= predicted <= 1024 * int(budget.removesuffix("KiB"))


@pytest.mark.exhaustive
def test_a_network_that_fits_two_ranks_and_not_one():
    torch.set_num_threads(1)
    budget = 2_400_000
    with pytest.raises(ut.InfeasibleBudget):
        train("gpt", None, budget=budget)
    alone = train("gpt", None)
    assert run_ranks(train_all, 2, 2, [("gpt", "1f1b", {"budget": budget})]) == [[alone]] * 2
