"""What a step sends: the formula, what was given to gloo, and what the interface of a link has counted."""

import sys
from pathlib import Path

import pytest
import torch
from rank_processes import divide_into_buckets_of, run_ranks
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.ops.clipping import BLOCK
from undertow.passes import reduction
from undertow.ranks.reduction import cut_bucket

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from rank_bytes import count
from rank_links import why_not

WIDTH = 150


def count_payload(mesh, num_shards, options):
    """What this rank sends in a step, what the formula says, and the bytes of all gradients and of a shard's record."""
    torch.set_num_threads(1)
    divide_into_buckets_of(1 << 15)
    reduction.choose_products = lambda *given: set()  # the formula is that of whole gradients
    model = nn.Sequential(nn.Linear(20, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 20), torch.randn(16, WIDTH)
    settings = {"loss": functional.mse_loss, "optimizer": optimizer, "shards": num_shards, **options}
    step = ut.train_step(model, (x,), targets=(y,), parallel=mesh, **settings)
    step(x, y)
    messages, division = step.link.ranks.messages, step.link.division
    before = messages.sent_bytes
    step(x, y)
    step.settle()
    sizes = {name: item.numel() for name, item in model.named_parameters()}
    record_bytes = 4 + 2 * 4 * WIDTH  # the loss, and two statistics
    expected = record_bytes * len(division.spans[messages.rank]) * (mesh.data - 1)
    for names in step.link.buckets:
        cuts = cut_bucket([sizes[name] for name in names], mesh.data, BLOCK)
        own = cuts[messages.rank + 1] - cuts[messages.rank]
        num_blocks = len(division.blocks[messages.rank])
        expected += 4 * ((cuts[-1] - own) * num_blocks + own * (mesh.data - 1))
    return messages.sent_bytes - before, expected, 4 * sum(sizes.values()), record_bytes


@pytest.mark.parametrize("options", [{}, {"shard_state": True}])
@pytest.mark.parametrize(("num_shards", "size"), [(4, 4), (8, 3)])
def test_the_payload_of_a_step(num_shards, size, options):
    found = run_ranks(count_payload, size, num_shards, options)
    for sent, expected, _, _ in found:
        assert sent == expected
    if num_shards == size:  # a block on each rank: a ring
        _, _, gradients, record = found[0]
        assert sum(sent for sent, *_ in found) == 2 * (size - 1) * gradients + num_shards * (size - 1) * record


@pytest.mark.skipif(why_not() is not None, reason=f"no link of its own: {why_not()}")
def test_the_interface_counts_no_more():
    found = count("mlp", 0, num_steps=3)
    # Gradients that travel as factors are fewer bytes.
    assert all(0 < given <= 1.001 * found["gradients"] for given in found["given_to_gloo"])
    assert all(1 <= ratio <= 1.02 for ratio in found["interface_over_given"])
