"""Data parallel training by several processes, with the bits of one.

torchrun --nproc-per-node 4 examples/several_workers.py
"""

import os

import torch
from torch import nn
from torch.nn import functional

import undertow as ut


def main() -> None:
    """Train for five steps; rank 0 prints the loss and a weight, bit for bit."""
    torch.manual_seed(0)  # all ranks begin with the same weights and the same data
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(64, 16), torch.randint(4, (64,))
    step = ut.train_step(
        model,
        (x,),
        targets=(y,),
        loss=functional.cross_entropy,
        optimizer=optimizer,
        shards=8,
        parallel=ut.Mesh(data=int(os.environ.get("WORLD_SIZE", "1"))),
    )
    for _ in range(5):
        loss = step(x, y)
    if os.environ.get("RANK", "0") == "0":
        print(f"loss {float(loss).hex()}, first weight {float(model[0].weight[0, 0]).hex()}")


if __name__ == "__main__":
    main()
