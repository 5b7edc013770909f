"""Carriers of a GPU's tensors, with stand-ins for the GPU and for NCCL: what they copy, and in which order they send.

`tests/gpu/test_cuda_ranks.py` has the real ones.
"""

import contextlib
from unittest import mock

import pytest
import torch
from rank_processes import divide_into_buckets_of, run_ranks
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.hashing import hash_tensors
from undertow.ranks import nccl
from undertow.ranks.carriers import StagedCarrier
from undertow.ranks.ranks import join
from undertow.torch_internals import make_gloo_group

CPU = torch.device("cpu")


def replace_gpu():
    """Streams and events of a GPU that is always done; and memory of the host that holds nothing sensible at first."""
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = mock.MagicMock()
    torch.cuda.stream = torch.cuda.device = lambda _: contextlib.nullcontext()
    empty_like = torch.empty_like

    def make_empty(tensor, pin_memory=False, **options):
        made = empty_like(tensor, **options)
        return made.fill_(77) if pin_memory else made

    torch.empty_like = make_empty


class StandInGroup:
    """What is between start and end goes together, and only the order between two ranks tells messages apart."""

    def __init__(self, store, rank, size, timeout):
        self.group, self.works = make_gloo_group(store, rank, size, "127.0.0.1", timeout), []

    def _start_coalescing(self):
        assert not self.works

    def send(self, tensors, to, tag):
        self.works.append(self.group.send(tensors, to, tag))

    def recv(self, tensors, source, tag):
        self.works.append(self.group.recv(tensors, source, tag))

    def _end_coalescing(self):
        return self

    def wait(self):
        while self.works:
            self.works.pop(0).wait()

    def abort(self):
        pass


def train(mesh, kind, options):
    torch.set_num_threads(1)
    own = {}
    if mesh is not None:
        divide_into_buckets_of(1 << 12)
        ranks, own = join(mesh), options
        replace_gpu()
        nccl.make_nccl_group = StandInGroup
        if kind == "staged":
            ranks._carriers[CPU] = StagedCarrier(ranks.messages, CPU)
        else:
            ranks._carriers[CPU] = nccl.NcclCarrier(ranks._store, ranks.rank, ranks.size, CPU)
    torch.manual_seed(0)
    body = (nn.Linear(24, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Dropout(0.2), nn.Linear(60, 300))
    model = nn.Sequential(*body, nn.Linear(300, 300), nn.Linear(300, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(16, 24), torch.randint(3, (16,))
    clip_norm = None if options.get("late_parameters") else 0.5
    settings = {"loss": functional.cross_entropy, "optimizer": optimizer, "shards": 6, "clip_norm": clip_norm}
    step = ut.train_step(model, (x,), targets=(y,), parallel=mesh, **settings, **own)
    before = 0 if mesh is None else ranks.messages.sent_bytes
    losses = [float(step(x, y)) for _ in range(3)]
    step.settle()
    if kind == "nccl":  # nothing went by gloo
        assert ranks._carriers[CPU]._messages.sent_bytes > 3 * 400_000
        assert ranks.messages.sent_bytes == before
    return losses, hash_tensors(model.state_dict())


@pytest.fixture
def expected(request):
    num_threads = torch.get_num_threads()
    yield lambda options: train(None, "", options)
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("kind", ["staged", "nccl"])
@pytest.mark.parametrize("options", [{}, {"shard_state": True, "late_parameters": True}])
def test_bits_of_one_process(expected, kind, options):
    assert run_ranks(train, 3, kind, options) == [expected(options)] * 3
