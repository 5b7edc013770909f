"""Workers that share parameters without locks: what they share, lose, count and join, and how they end."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from rank_processes import run_ranks, start_ranks
from spread_cases import spread
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.api.hogwild import complete_state
from undertow.ranks.mesh import parse_mesh
from undertow.ranks.ranks import join
from undertow.ranks.shared_memory import SharedMemory
from undertow.train.feeding import Share
from undertow.train.folder import RunFolder


def minus_sum(outputs):
    return -outputs.sum()


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingBag(1000, 1, mode="sum", sparse=True)
        nn.init.zeros_(self.rows.weight)

    def forward(self, rows):
        return self.rows(rows)


def add_ones(mesh, locking, num_updates):
    """Each update adds 1 to all elements of a vector, and to the worker's own rows of a table."""
    rank, size = int(os.environ["RANK"]), mesh.num_ranks
    torch.manual_seed(rank)  # the parameters of rank 0 count
    vector, table = nn.Linear(64, 1, bias=False), Table()
    if rank == 0:
        nn.init.zeros_(vector.weight)
    else:
        nn.init.constant_(vector.weight, 1e9)
    found = []
    for model, x in ((vector, torch.ones(1, 64)), (table, torch.arange(rank, 1000, size)[None])):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {"loss": minus_sum, "optimizer": optimizer, "locking": locking}
        step = ut.train_step(model, (x,), parallel=ut.Mesh(hogwild=size), **options)
        for _ in range(num_updates):
            step(x)
        step.join_buffers()
        step.ranks.gather_texts("here")
        found.append([parameter.detach().clone().numpy() for parameter in model.parameters()][0])
        locks = [node for node in step.plan.nodes if node.operation.name.startswith("locked_")]
        assert bool(locks) == (locking in ("one", "parameter"))
    return found


@pytest.mark.parametrize("locking", spread(["none", "one", "parameter", "step"], str, every=2))
def test_additions_of_all_workers_arrive(locking):
    (vector, table), (other_vector, other_table) = run_ranks(add_ones, 2, locking, 100)
    assert (vector == other_vector).all() and (table == other_table).all()  # one memory
    assert (table == 100).all()  # workers that touch different rows never lose anything
    if locking in ("one", "parameter"):
        assert (vector == 200).all()
    else:
        assert (vector > 100).all() and (vector <= 200).all()


def learn(mesh, kind, options):
    """Two workers on other batches, whose optimizer has state."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(64, 8, generator=draw)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    shared = {"parallel": ut.Mesh(hogwild=2), **options}
    step = ut.train_step(model, (x,), targets=(y,), loss=functional.cross_entropy, optimizer=optimizer, **shared)
    own_mean = model[1].running_mean
    losses = [float(step(x, y)) for _ in range(60)]
    before = own_mean.clone()
    step.join_buffers()
    step.ranks.gather_texts("here")
    state = [item for entry in optimizer.state.values() for item in entry.values() if isinstance(item, torch.Tensor)]
    steps = [float(entry["step"]) for entry in optimizer.state.values() if "step" in entry]
    tensors = [item.detach().clone().numpy() for item in (*model.parameters(), *model.buffers(), *state)]
    step.ranks.gather_texts("copied")
    peaks = ut.measure(step, x, y).peak_bytes <= step.peak_bytes
    step.ranks.gather_texts("measured")
    return losses[0], losses[-1], tensors, before.numpy(), steps, str(step.shared), peaks


@pytest.mark.parametrize(
    ("kind", "options"),
    [("Adam", {}), ("Adagrad", {"locking": "one"}), ("SGD", {"accumulate": 2, "shared_gradients": True})],
)
def test_workers_learn_together(kind, options):
    first, second = run_ranks(learn, 2, kind, options)
    assert isinstance(first, tuple), first
    for loss_before, loss_after, *_ in (first, second):
        assert loss_after < 0.7 * loss_before
    parameters_and_buffers = 6 + 3
    for one, other in zip(first[2][:parameters_and_buffers], second[2][:parameters_and_buffers], strict=True):
        assert numpy.array_equal(one, other)
    joined = first[2][6]
    assert not numpy.array_equal(first[3], second[3])  # statistics were each worker's own
    assert numpy.allclose(joined, (first[3] + second[3]) / 2)
    if kind == "Adam":  # steps of both are counted; some counts are lost without a lock
        assert all(60 < count <= 120 for count in first[4])
    if "accumulate" in options:
        assert "of gradients (one for each worker would take" in first[5]
    assert first[6] and second[6]


def test_state_that_the_first_step_would_make():
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.Adagrad(p),
    ):
        results = []
        for is_completed in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(4, 3)
            optimizer = make(model.parameters())
            if is_completed:
                complete_state(optimizer)
                assert all(len(optimizer.state[item]) > 0 for item in model.parameters())
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
            results.append([item.detach().clone() for item in model.parameters()])
        assert all(map(torch.equal, *results))


def share_wrong(mesh):
    """Rank 0 offers a file that is not sealed, or has another size."""
    ranks = join(mesh)
    file = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 4096)
    messages = []
    for num_bytes in (4096, 8192):
        if ranks.rank == 0:
            ranks.send_bytes(json.dumps([os.getpid(), file]).encode())
        else:
            try:
                SharedMemory(ranks, num_bytes)
            except ut.CallError as error:
                messages.append(str(error))
        ranks.gather_texts("here")
        if ranks.rank == 0:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return messages


def test_memory_from_another_process_is_checked():
    _, messages = run_ranks(share_wrong, 2)
    assert len(messages) == 2
    assert all(message.startswith("what rank 0 shares is not a sealed memory file") for message in messages)


def hold_lock(mesh):
    ranks = join(mesh)
    memory = SharedMemory(ranks, 4096)
    if ranks.rank == 1:
        with memory.lock(0):
            memory.words[0] = 1
            os.kill(os.getpid(), signal.SIGKILL)
    while not memory.words[0]:
        time.sleep(0.01)
    with memory.lock(0):
        return "went on"


def test_a_killed_worker_leaves_its_lock():
    processes, results = start_ranks(hold_lock, 2)
    assert results.get(timeout=60) == (0, "went on")
    for process in processes:
        process.join(60)
    assert processes[1].exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 2}, "workers of hogwild have batches of their own"),
        ({"locking": "all"}, "locking is how updates are kept apart"),
        ({"parallel": None, "locking": "one"}, "about workers that share parameters"),
    ],
)
def test_refusals(options, message):
    model = nn.Linear(4, 2)
    given = {"parallel": ut.Mesh(hogwild=2), "optimizer": torch.optim.SGD(model.parameters()), **options}
    with pytest.raises(ut.CallError, match=message):
        ut.train_step(model, (torch.ones(2, 4),), loss=torch.sum, **given)


def test_a_mesh_has_one_kind_of_workers():
    assert parse_mesh("hogwild=3", "here").num_ranks == 3
    assert str(ut.Mesh(hogwild=2).with_ranks(5)) == "hogwild=5"
    for other in ({"data": 2}, {"stages": 2}):
        with pytest.raises(ut.CallError, match="give one of them"):
            ut.Mesh(hogwild=2, **other)


def test_shares_have_each_batch_once():
    for num_workers, group in ((2, 1), (3, 2)):
        shares = [Share(worker, num_workers, group) for worker in range(num_workers)]
        assert all(sum(share.has(position) for share in shares) == 1 for position in range(30))
        ended = [replace(share, num_groups=5) for share in shares]
        assert [sum(share.has(position) for share in ended) for position in range(30)].count(1) == 5 * group


MODELS = """
from torch import nn
def make():
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
"""
TRAIN = ["train", "models.py:make", "--data", "data.npz", "--batch", "10", "--seed", "1", "--device", "cpu"]
TRAIN += ["--parallel", "hogwild=2", "--lost-after", "20"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hogwild")
    (path / "models.py").write_text(MODELS)
    draw = numpy.random.default_rng(0)
    x = draw.standard_normal((220, 8)).astype("float32")
    y = (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)
    numpy.savez(path / "data.npz", x_train=x[:150], y_train=y[:150], x_test=x[150:], y_test=y[150:])
    return path


def call(folder, *words, code=0):
    command = [sys.executable, "-m", "undertow", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder)
    assert result.returncode == code, result.stderr
    return result


def test_a_run_and_how_it_goes_on(folder):
    first = call(folder, *TRAIN, "--epochs", "2", "--out", "run", "--json", "--max-steps", "20")
    assert json.loads(first.stdout)["steps"] == 20
    assert "2 workers share" in first.stderr and "gradients are used up one by one" in first.stderr
    progress = RunFolder(folder / "run").read_checkpoint().progress
    assert (progress.epoch, progress.step, progress.batch) == (1, 20, 5)
    records = [item for item in RunFolder(folder / "run").read_metrics() if item["kind"] == "train"]
    assert 0 < len(records) < 20  # rank 0 records its own updates
    num_threads = RunFolder(folder / "run").read_checkpoint().about["environment"]["num_threads"]
    assert num_threads == max(1, len(os.sched_getaffinity(0)) // 2)
    call(folder, "train", "--resume", "run", "--max-steps", "1000", "--epochs", "4")
    progress = RunFolder(folder / "run").read_checkpoint().progress
    assert (progress.epoch, progress.step, progress.batch) == (4, 60, 0)
    last = call(folder, "train", "--resume", "run", "--parallel", "hogwild=1", "--epochs", "5", "--json")
    assert json.loads(last.stdout)["test_loss"] < 1.0


def test_a_budget_that_cannot_be_met_is_said_once(folder):
    errors = call(folder, *TRAIN, "--budget", "1KiB", "--out", "small", code=1).stderr
    assert errors.count("cannot be met") == 1 and "rank" not in errors.partition("undertow: the budget")[2]


def find_workers(name):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"--out={name}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return sorted(found)


def test_a_killed_worker_is_named_and_nothing_is_left(folder):
    command = [sys.executable, "-m", "undertow", *TRAIN, "--epochs", "100000", "--out", "killed"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)
    deadline = time.monotonic() + 120
    checkpoint = folder / "killed" / "checkpoint.safetensors"
    while not checkpoint.exists() or RunFolder(folder / "killed").read_checkpoint().progress.step < 30:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    workers = find_workers("killed")
    for worker in workers:  # what they share has no name that could be left over
        mapped = [line.split()[5:] for line in Path(f"/proc/{worker}/maps").read_text().splitlines()]
        assert any(words[:1] == ["/memfd:undertow"] for words in mapped)
        assert not any(words and words[0].startswith("/dev/shm") and words[-1] != "(deleted)" for words in mapped)
    os.kill(workers[1], signal.SIGKILL)
    killed_s = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 6 and time.monotonic() - killed_s < 20  # the bound that was given
    assert "rank 1 was killed by SIGKILL" in errors and "go on with: undertow train --resume killed" in errors
    assert not find_workers("killed")
    steps = RunFolder(folder / "killed").read_checkpoint().progress.step
    ended = call(folder, "train", "--resume", "killed", "--max-steps", str(steps + 4), "--json")
    assert json.loads(ended.stdout)["steps"] == steps + 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shards", "2"], "shards cannot be had with parallel=hogwild=2: a worker computes whole batches"),
        (["--ema", "0.9"], "ema cannot be had with parallel=hogwild=2"),
        (["--save-every", "3"], "a checkpoint is written after each epoch"),
        (["--shared-gradients"], "give --accumulate"),
        (["--parallel", "data=1", "--locking", "one"], "are about parallel=hogwild=2"),
        (["--locking", "some"], "locking 'some' is not known"),
        (["--parallel", "hogwild=2,data=2"], "give one of them"),
    ],
)
def test_options_that_make_no_sense(folder, words, message, capsys, monkeypatch):
    from training_commands import refuse

    monkeypatch.chdir(folder)
    refuse(capsys, 2, message, *TRAIN, *words)
