"""Gradients that travel as two factors: the bits of one process, fewer bytes, and where it is not done."""

import hashlib

import pytest
import torch
from rank_processes import run_ranks
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.passes import reduction

CASES = {
    "plain": {},
    "clipped": {"clip_norm": 0.3},
    "accumulated": {"accumulate": 2},
    "at a budget": {"budget": "100MiB"},
}
PRODUCTS = {"first.weight", "middle.weight", "last.weight"}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 48), nn.BatchNorm1d(48), nn.Dropout(0.3)
        self.middle, self.twice, self.last = nn.Linear(48, 40), nn.Linear(40, 40), nn.Linear(40, 3)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).relu())
        x = self.twice(self.twice(self.middle(x).relu()).relu())
        return self.last(x)


def train(parallel, num_shards, **options):
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(1)
    # The last batch has shards of other sizes, whose gradients travel whole.
    batches = [(torch.randn(n, 8, generator=draw), torch.randint(3, (n,), generator=draw)) for n in (12, 12, 12, 13)]
    (x, y), settings = batches[0], {"loss": functional.cross_entropy, "optimizer": optimizer, "shards": num_shards}
    step = ut.train_step(model, (x,), targets=(y,), parallel=parallel, **settings, **options)
    plan = step.plan
    tensors = [step(*batch) for batch in batches]
    tensors += [*model.state_dict().values()]
    tensors += [item for key in model.parameters() for item in optimizer.state[key].values()]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest(), step, plan


def digests_with_factors(mesh):
    reduction.choose_products = lambda products, *rest: {parameter.name for parameter in products}
    found = []
    for options in CASES.values():
        digest, step, plan = train(mesh, mesh.data, **options)
        names = {node.name.rstrip("_") for node in plan.nodes}
        assert {"start_factors", "finish_factors"} <= names
        found.append((digest, set(step.link.factored)))
    return found


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.exhaustive), 3, pytest.param(4, marks=pytest.mark.exhaustive)]
)
def test_bits_of_one_process(size):
    torch.set_num_threads(1)
    expected = [train(None, size, **options)[0] for options in CASES.values()]
    for found in run_ranks(digests_with_factors, size):
        assert [digest for digest, _ in found] == expected
        assert all(names == PRODUCTS for _, names in found)  # a weight that is used twice is none of them


def choose(mesh):
    """What is chosen on a slow link and on a quick one, and where ranks hold several shards."""
    found = []
    for num_shards, duration_ns in ((2, 10**10), (2, 2000), (4, 10**10)):
        costs = {f"transfer of {size} bytes over a link": (size * duration_ns // 10**6, 0) for size in (10**3, 10**6)}
        _, step, plan = train(mesh, num_shards, costs=costs)
        sent = {node.args[1]: node.args[2] for node in plan.nodes if node.name == "start_factors"}
        found.append((sorted(step.link.factored), sorted(sent.values()), plan.sent_bytes))
    return found


def test_factors_are_sent_where_that_is_sooner():
    slow, quick, several = run_ranks(choose, 2)[0]
    # 6 examples: a factor is 6 rows. The last layer, 3 x 40, is smaller than its factors.
    assert slow[0] == ["first.weight", "middle.weight"]
    assert slow[1] == [6 * 4 * (8 + 48), 6 * 4 * (48 + 40)]
    assert quick[0] == several[0] == []
    whole = 4 * 48 * 8 + 4 * 48 * 40
    assert quick[2] - slow[2] == whole - sum(slow[1])  # on two ranks a gradient's own bytes are sent
