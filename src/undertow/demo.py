"""What `scripts/demo` shows: a convnet trained eagerly and planned, with the same bits, and what its plan says.

In: nothing. Out: text on the terminal; everything but the times repeats exactly on the same machine. `main` returns
the exit code: 0 if all that should agree agrees, 1 if not.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import time

import torch
from torch import nn

import undertow as ut
from undertow.models import SMALL, ZooModel

NUM_STEPS = 3
BATCH = 16
NUM_PLAN_LINES = 8  # of each pass
MAX_COLUMNS = 120


def main() -> int:
    """Run the demonstration."""
    entry = SMALL["vgg_small"]
    torch.manual_seed(0)
    model = entry.build()
    inputs, targets = entry.example_inputs(BATCH), entry.example_targets(BATCH)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"A small VGG with BatchNorm and dropout, {num_parameters:,} parameters, batch {BATCH}.\n")

    eager, copied = copy.deepcopy(model), copy.deepcopy(model)
    start = time.perf_counter()
    planned = ut.plan(copied, inputs)
    print(f"Recorded it, derived its backward pass: {time.perf_counter() - start:.1f} s.")
    print(f"{NUM_STEPS} steps of SGD; sha256 of every loss, gradient, buffer and generator state:")
    hashes = [hash_training(subject, entry, inputs, targets) for subject in (eager, planned)]
    print(f"  eager    {hashes[0]}\n  planned  {hashes[1]}")
    is_same = hashes[0] == hashes[1]
    print("  the same bits\n" if is_same else "  DIFFERENT\n")

    print("The planned step, operation by operation (print(planned.plan) shows all of it):")
    print(shorten_plan(str(planned.plan)))

    print("\nThe derived gradients against central differences in float64, along random directions:")
    start = time.perf_counter()
    try:
        result = ut.check_gradients(model, inputs)
    except ut.GradientCheckFailed as failure:
        result = failure.result
    print(f"  {result}\n  {time.perf_counter() - start:.1f} s")
    return 0 if is_same and result.ok else 1


def hash_training(
    model: nn.Module, entry: ZooModel, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]
) -> str:
    """The sha256 of everything that can be observed of a few steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    digest = hashlib.sha256()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = entry.loss(model(*inputs), *targets)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for tensor in (loss.detach(), *gradients, *model.buffers(), torch.get_rng_state()):
            digest.update(tensor.contiguous().numpy().tobytes())
        optimizer.step()
    return digest.hexdigest()


def shorten_plan(text: str) -> str:
    """The first operations of the forward and of the backward pass, and the summary behind them."""
    program, _, summary = text.rpartition("\n\n")
    heads = []
    for part in program.split("\nbackward\n"):
        lines = [cut(line) for line in part.splitlines() if line.startswith("%") and " = " in line]
        heads.append("\n".join([*lines[:NUM_PLAN_LINES], f"... and {len(lines) - NUM_PLAN_LINES} more"]))
    return "\nbackward\n".join(heads) + f"\n\n{summary}"


def cut(line: str) -> str:
    """The line as far as the screen goes."""
    return line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 3] + "..."


if __name__ == "__main__":
    sys.exit(main())
