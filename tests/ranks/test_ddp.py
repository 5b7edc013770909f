"""A planned module under DistributedDataParallel, in two processes: the gradients of eager's DDP."""

import copy

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import undertow as ut


def train(rank, address, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    copied = copy.deepcopy(model)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    found = []
    for module in (model, ut.plan(copied, (x,))):
        wrapped = DistributedDataParallel(module)
        torch.manual_seed(rank)
        for _ in range(2):
            wrapped(x).square().mean().backward()
        found.append([item.grad for item in module.parameters()])
    results[rank] = all(torch.equal(left, right) for left, right in zip(*found, strict=True))
    dist.destroy_process_group()


def test_same_gradients_as_eager(tmp_path):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(train, (f"file://{tmp_path}/rendezvous", results), nprocs=2)
        assert dict(results) == {0: True, 1: True}
