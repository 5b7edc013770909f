"""Shards over ranks: the bits of one process on any number of ranks, and errors that name the rank."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks, start_ranks
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.api import shared_plans
from undertow.models import SMALL
from undertow.ranks.ranks import join

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "several_workers.py")
CASES = {
    "lenet5": {"clip_norm": 0.5},
    "resnet50": {},
    "unet": {"numerics": "fast"},
    "gpt": {"accumulate": 2},
    "lstm": {"seed": 5},
}


def digests(parallel, num_shards):
    """A hash of losses, weights, buffers and the optimizer's state after a few steps of each case."""
    found = {}
    for name, options in CASES.items():
        entry = SMALL[name]
        torch.manual_seed(0)
        model = entry.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        draw = torch.Generator().manual_seed(3)
        batches = [(entry.example_inputs(size, draw), entry.example_targets(size, draw)) for size in (10, 10, 9)]
        (args, targets), settings = batches[0], {"shards": num_shards, "parallel": parallel, **options}
        step = ut.train_step(model, args, targets=targets, loss=entry.loss, optimizer=optimizer, **settings)
        tensors = [step(*args, *targets) for args, targets in batches]
        tensors += [*model.parameters(), *model.buffers()]
        tensors += [item for key in model.parameters() for item in optimizer.state[key].values()]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        found[name] = digest.hexdigest()
    return found


@pytest.fixture(scope="module")
def expected():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks: bits depend on it
    yield {num_shards: digests(None, num_shards) for num_shards in (8, 6)}
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("num_shards", "size"),
    [(8, 3), (6, 4), *(pytest.param(8, size, marks=pytest.mark.exhaustive) for size in (2, 4, 5, 8))],
)
def test_bits_of_one_process(expected, num_shards, size):
    assert run_ranks(digests, size, num_shards) == [expected[num_shards]] * size


@pytest.mark.exhaustive
def test_the_example_under_torchrun():
    def run(size):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), EXAMPLE]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    alone = subprocess.run([sys.executable, EXAMPLE], check=True, capture_output=True, text=True, timeout=120).stdout
    assert alone.startswith("loss 0x")
    assert run(2) == alone


def make_step(mesh, num_shards=4, width=8, budget=None, num_examples=8, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(num_examples, 6), torch.randint(3, (num_examples,))
    settings = {"loss": functional.cross_entropy, "optimizer": optimizer, "budget": budget}
    step = ut.train_step(model, (x,), targets=(y,), shards=num_shards, parallel=mesh, **settings)
    return step, x, y


def train_with_weights(mesh, weights):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(10, 6), torch.randint(3, (10,))
    settings = {"loss": functional.cross_entropy, "optimizer": optimizer, "shards": 8}
    step = ut.train_step(model, (x,), targets=(y,), parallel=mesh, weights=weights, **settings)
    losses = [float(step(x, y)) for _ in range(3)]
    return str(step.shards.held), losses, [item.tolist() for item in model.parameters()]


def test_a_faster_rank_takes_more_shards():
    torch.set_num_threads(1)
    _, *expected = train_with_weights(None, None)
    found = run_ranks(train_with_weights, 3, (2, 1, 1))
    assert [held for held, *_ in found] == ["0 to 3", "4 to 5", "6 to 7"]
    assert [rest for _, *rest in found] == [expected] * 3


def differ_in_weights(mesh):
    train_with_weights(mesh, (1, 1 + int(os.environ["RANK"])))


def differ_in_width(mesh):
    make_step(mesh, width=8 + int(os.environ["RANK"]))


def differ_in_shards(mesh):
    make_step(mesh, num_shards=4 + int(os.environ["RANK"]))


def differ_in_values(mesh):
    make_step(mesh, seed=int(os.environ["RANK"]))


def differ_in_version(mesh):
    shared_plans.__version__ = f"0.{os.environ['RANK']}"
    make_step(mesh)


def ask_for_too_little(mesh):
    make_step(mesh, budget=64)


def ask_for_few_shards(mesh):
    make_step(mesh, num_shards=1)


def give_another_mesh(mesh):
    make_step(ut.Mesh(data=3))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (differ_in_width, "the ranks differ in the names and shapes of its tensors"),
        (differ_in_values, "the ranks differ in the weights: rank 0 has"),
        (differ_in_version, 'the ranks differ in the version of Undertow: rank 0 has "0.0", rank 1 has "0.1"'),
        (differ_in_shards, "the ranks differ in the number of shards: rank 0 has 4, rank 1 has 5"),
        (differ_in_weights, "the ranks differ in the shards of each rank"),
        (ask_for_too_little, "cannot be met"),
        (ask_for_few_shards, "1 shards cannot be divided over 2 ranks"),
        (give_another_mesh, "the mesh data=3 has 3 ranks, and 2 processes were started"),
    ],
)
def test_refusals(function, words):
    for message in run_ranks(function, 2):
        assert words in message


def fail_in_one_rank(mesh):
    step, x, y = make_step(mesh)
    step(x, y)
    if os.environ["RANK"] == "1":
        y = y + 5
    for _ in range(3):
        step(x, y)


def test_an_error_is_told_to_all():
    found = run_ranks(fail_in_one_rank, 2)
    assert "rank 1 failed with IndexError" in found[0]
    assert "call 2 of the step" in found[0]


def vanish(mesh, number):
    step, x, y = make_step(mesh)
    step(x, y)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)
    for _ in range(3):
        step(x, y)


def stand_still(mesh, number):
    join(mesh, bound_s=4)
    vanish(mesh, number)


@pytest.mark.parametrize(
    ("function", "number", "words"),
    [(vanish, signal.SIGKILL, "is gone"), (stand_still, signal.SIGSTOP, "has not moved for")],
)
def test_a_lost_rank_is_named(function, number, words):
    processes, results = start_ranks(function, 2, number)
    start = time.monotonic()
    rank, message = results.get(timeout=120)
    assert rank == 0
    assert "RankLost: rank 1" in message
    assert words in message
    # The fault was injected, and the other rank ends by itself.
    processes[0].join(60)
    assert processes[0].exitcode == 0
    if number == signal.SIGKILL:
        assert processes[1].exitcode == -signal.SIGKILL
    else:
        assert processes[1].is_alive()
        processes[1].kill()
    assert time.monotonic() - start < 120
