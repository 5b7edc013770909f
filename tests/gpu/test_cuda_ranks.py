"""Ranks with tensors on a GPU: the bits of one process, within budgets, and errors that name the rank.

One GPU is enough: two ranks share it, and send by gloo. NCCL, which takes a GPU for each rank, is tried with one rank
that sends to itself.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rank_processes import divide_into_buckets_of, run_ranks, start_ranks
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.hashing import hash_tensors
from undertow.ranks.lane import Lane

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

OPTIONS = [
    {},
    {"clip_norm": 0.5},
    {"shard_state": True, "clip_norm": 0.5, "accumulate": 2},
    {"shard_state": True, "late_parameters": True},
]


def make_step(mesh, options):
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 300))
    model = nn.Sequential(*body, nn.Dropout(0.3), nn.Linear(300, 5)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = [(torch.randn(12, 3, 8, 8).cuda(), torch.randint(5, (12,)).cuda()) for _ in range(4)]
    x, y = batches[0]
    settings = {"loss": functional.cross_entropy, "optimizer": optimizer, "shards": 4, **options}
    return ut.train_step(model, (x,), targets=(y,), parallel=mesh, **settings), model, batches


def train(mesh, options):
    """Losses, weights and the optimizer's state after some steps; and how tensors were carried."""
    if mesh is not None:
        divide_into_buckets_of(1 << 18)
    else:
        options = {name: item for name, item in options.items() if name not in ("shard_state", "late_parameters")}
    step, model, batches = make_step(mesh, options)
    losses = [float(step(*batch)) for batch in batches]
    step.settle()
    state = step.optimizer_state()["state"]
    tensors = {f"{name} {key}": item for name, entry in state.items() for key, item in entry.items()}
    carrier = None if mesh is None else type(step.link.ranks._carriers[torch.device("cuda", 0)]).__name__
    return losses, hash_tensors(model.state_dict()), hash_tensors(tensors), carrier


@pytest.mark.parametrize("options", OPTIONS)
def test_two_ranks_on_one_gpu_have_the_bits_of_one_process(options, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    *expected, _ = train(None, options)
    assert run_ranks(train, 2, options) == [(*expected, "StagedCarrier")] * 2


def vanish(mesh):
    step, _, batches = make_step(mesh, {})
    step(*batches[0])
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    for batch in batches:
        step(*batch)


def test_a_lost_rank_is_named():
    processes, results = start_ranks(vanish, 2)
    start = time.monotonic()
    rank, message = results.get(timeout=180)
    assert rank == 0
    assert "RankLost: rank 1" in message
    processes[0].join(60)
    assert processes[0].exitcode == 0
    assert processes[1].exitcode == -signal.SIGKILL
    assert time.monotonic() - start < 180


def test_a_model_on_two_devices_has_no_divided_state():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).cuda())
    settings = {"loss": functional.mse_loss, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "shards": 2}
    with pytest.raises(ut.CallError, match="the parameters lie on cpu and cuda:0, and shard_state is for"):
        ut.train_step(
            model, (torch.randn(4, 4),), targets=(torch.randn(4, 2),), parallel=ut.Mesh(1), shard_state=True, **settings
        )


def test_stages_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).cuda()
    x, y = torch.randn(4, 4).cuda(), torch.randn(4, 2).cuda()
    with pytest.raises(ut.CallError, match="stages send from memory of the CPU"):
        ut.train_step(model, (x,), targets=(y,), loss=functional.mse_loss, shards=2, parallel=ut.Mesh(stages=2))


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this PyTorch has no NCCL")
def test_one_rank_by_nccl():
    from undertow.ranks.nccl import NcclCarrier

    device = torch.device("cuda", torch.cuda.current_device())
    carrier, lane = NcclCarrier(torch.distributed.HashStore(), 0, 1, device), Lane(lambda: None)
    sent = torch.randn(3_000_000, device=device)
    found, doubled = torch.zeros_like(sent), torch.zeros_like(sent)

    def exchange(messages, at):
        yield [*messages.receive(at(found), 0, 0, 0), *messages.send(at(sent), 0, 0, 0)]
        total = found + sent
        yield [*messages.receive(at(doubled), 0, 0, -1), *messages.send(total, 0, 0, -1)]

    lane.finish(lane.start("a test", carrier.carry(exchange, [sent], [found, doubled])))
    assert torch.equal(found, sent)
    assert torch.equal(doubled, 2 * sent)
    carrier.close()
    lane.close(1)


MODELS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def make():
    hidden = [nn.Linear(12, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(512, 4))

def pairs():
    x = torch.randn(128, 12, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :4].argmax(1))
    return DataLoader(data, 16, shuffle=True), DataLoader(data, 16)
"""


def call(folder, *words):
    result = subprocess.run(
        [sys.executable, "-m", "undertow", "train", *words, "--json"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(ut.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_job_goes_on_with_other_ranks_within_its_budget(tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    words = ["models.py:make", "--data", "models.py:pairs", "--device", "cuda", "--epochs", "2", "--shards", "4"]
    words += ["--optimizer", "adamw", "--clip-norm", "1", "--threads", "1", "--budget", "200MiB"]
    expected = call(tmp_path, *words, "--out", "one")
    call(tmp_path, *words, "--out", "two", "--parallel", "data=2", "--max-steps", "5")
    found = call(tmp_path, "--resume", "two", "--max-steps", "11")
    assert found["steps"] == 11
    found = call(tmp_path, "--resume", "two", "--parallel", "data=1", "--max-steps", "1000")
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert max(item["measured_peak_bytes"] for item in (expected, found)) <= 200 << 20
