"""What one process of `benchmarks/hogwild.py` does: some updates, as fast as it can, and what came of them.

In: a task and its settings, and who this process is. Out: seconds, updates, losses, as plain data. All processes of a
run start their clocks together. Each task is a function of a team: how many workers there are and how they share.

`plain_pytorch` is written from the description of PyTorch's example `mnist_hogwild`: a model in shared memory, and in
each process its own SGD with momentum, which steps without a lock.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.data.idx import read_idx
from undertow.models import ZOO

CONTEXT = multiprocessing.get_context("spawn")

# RCV1 (Lewis et al. 2004): 47,236 features, 0.16 % of them in a document. How often a feature occurs follows a power
# law; the first ones are flattened, since the published vectors leave stop words out.
NUM_FEATURES, NUM_PER_DOCUMENT, FLAT = 47_236, 76, 50


@dataclass(frozen=True)
class Team:
    """How the processes of a run share: `kind` is one of hogwild, in_step, plain_pytorch, alone."""

    kind: str
    size: int = 1
    locking: str = "none"
    has_one_gradient: bool = False

    @property
    def mesh(self) -> ut.Mesh | None:
        """For `train_step`."""
        if self.kind == "hogwild":
            return ut.Mesh(hogwild=self.size)
        return ut.Mesh(data=self.size) if self.kind == "in_step" else None

    def options(self) -> dict[str, Any]:
        """Of `train_step`."""
        if self.kind == "hogwild":
            return {"parallel": self.mesh, "locking": self.locking, "shared_gradients": self.has_one_gradient}
        return {"parallel": self.mesh, "shards": self.size} if self.kind == "in_step" else {}


class Documents(nn.Module):
    """A linear classifier of sparse vectors: its weights are a table of rows with one element."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(NUM_FEATURES, 1, mode="sum", sparse=True)
        nn.init.zeros_(self.weights.weight)

    def forward(self, features: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self.weights(features, per_sample_weights=values).squeeze(1)


def draw_features(num_documents: int, draw: torch.Generator) -> torch.Tensor:
    """Features by the power law; a document may have one twice."""
    chances = 1.0 / torch.arange(FLAT, NUM_FEATURES + FLAT, dtype=torch.float64)
    drawn = torch.rand(num_documents, NUM_PER_DOCUMENT, generator=draw, dtype=torch.float64)
    ends = chances.cumsum(0)
    return torch.searchsorted(ends, drawn * ends[-1]).clamp_(max=NUM_FEATURES - 1)


def make_documents(num_documents: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, values and labels of documents; the same at every call."""
    draw = torch.Generator().manual_seed(0)
    features = draw_features(num_documents, draw)
    values = torch.rand(num_documents, NUM_PER_DOCUMENT, generator=draw)
    values /= values.norm(dim=1, keepdim=True)
    truth = torch.randn(NUM_FEATURES, generator=draw)
    scores = (truth[features] * values).sum(1) + 0.3 * torch.randn(num_documents, generator=draw)
    return features, values, (scores > 0).float()


def read_images(folder: str | None, num_images: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train and to test on: MNIST where its folder is given, else drawn ones of the same size."""
    if folder is None:
        draw = torch.Generator().manual_seed(0)
        centers = torch.randn(10, 1, 28, 28, generator=draw)
        labels = torch.randint(10, (num_images + 1000,), generator=draw)
        x = centers[labels] + 2 * torch.randn(len(labels), 1, 28, 28, generator=draw)
        return x[:num_images], labels[:num_images], x[num_images:], labels[num_images:]
    found = []
    for part in ("train", "t10k"):
        x = read_idx(Path(folder) / f"{part}-images-idx3-ubyte.gz", 3).unsqueeze(1).float() / 255
        found += [(x - 0.1307) / 0.3081, read_idx(Path(folder) / f"{part}-labels-idx1-ubyte.gz", 1).long()]
    return found[0][:num_images], found[1][:num_images], found[2], found[3]


def train_documents(team: Team, rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Logistic regression of documents; every worker takes its part of an order that follows from the seed."""
    features, values, labels = make_documents(settings["num_documents"])
    model, batch = Documents(), settings["batch"]
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"])
    loss = functional.binary_cross_entropy_with_logits
    first = features[:batch], values[:batch], labels[:batch]
    step = ut.train_step(model, first[:2], targets=first[2:], loss=loss, optimizer=optimizer, **team.options())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(settings["seed"])).split(batch)
    own = [part for part in order[rank :: team.size] if len(part) == batch]
    # Batches are made before the clock runs: an update takes no longer than reading one.
    calls = [(features[part], values[part], labels[part]) for part in own]
    warm_up(step, optimizer, calls[0])
    meet(step)
    start = time.perf_counter()
    for call in calls:
        step(*call)
    seconds = time.perf_counter() - start
    meet(step)
    with torch.no_grad():
        final = float(loss(model(features, values), labels))
    return {"seconds": seconds, "updates": len(calls), "loss": final}


def train_images(team: Team, rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """LeNet on images. In step, a batch of all workers together is one update; else each has its own."""
    x, y, x_test, y_test = read_images(settings["data"], settings["num_images"])
    torch.manual_seed(settings["seed"])
    model = settings.get("model") or ZOO["lenet5"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=0.5)
    batch = settings["batch"] * (team.size if team.kind == "in_step" else 1)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(settings["seed"])).split(batch)
    own = order if team.kind == "in_step" else order[rank :: team.size]
    calls = [part for part in own if len(part) == batch]
    if team.kind == "plain_pytorch":
        step = make_plain_step(model, optimizer)
    else:
        part = calls[0]
        options = {"targets": (y[part],), "loss": functional.cross_entropy, "optimizer": optimizer}
        step = ut.train_step(model, (x[part],), accumulate=settings.get("accumulate", 1), **options, **team.options())
    warm_up(step, optimizer, (x[calls[0]], y[calls[0]]))
    meet(step, settings.get("barrier"))
    start = time.perf_counter()
    for part in calls:
        step(x[part], y[part])
    seconds = time.perf_counter() - start
    meet(step, settings.get("barrier"))
    with torch.no_grad():
        accuracy = float((model.eval()(x_test).argmax(1) == y_test).float().mean())
    examples = len(calls) * batch // (team.size if team.kind == "in_step" else 1)
    return {
        "seconds": seconds,
        "updates": len(calls),
        "examples": examples,
        "accuracy": accuracy,
        "proportional_bytes": proportional_bytes(),
        "shared": str(getattr(step, "shared", "")),
    }


def make_plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """A step of PyTorch's own; the model's parameters are in shared memory."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def count_lost(team: Team, rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Every update adds 1, to all elements of a vector, or to some rows of a table by the power law."""
    num_updates, num_elements = settings["num_updates"], settings["num_elements"]
    if num_elements:
        model: nn.Module = nn.Linear(num_elements, 1, bias=False)
        inputs = [torch.ones(1, num_elements)] * num_updates
    else:
        model = nn.EmbeddingBag(NUM_FEATURES, 1, mode="sum", sparse=True)
        draw = torch.Generator().manual_seed(rank)
        inputs = list(draw_features(num_updates, draw).unsqueeze(1))
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = ut.train_step(model, (inputs[0],), loss=minus_sum, optimizer=optimizer, **team.options())
    meet(step)
    start = time.perf_counter()
    for item in inputs:
        step(item)
    seconds = time.perf_counter() - start
    meet(step)
    per_update = num_elements or NUM_PER_DOCUMENT
    return {"seconds": seconds, "added": num_updates * per_update, "found": float(model.weight.detach().double().sum())}


def minus_sum(outputs: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is -1 for each element of the table that was read."""
    return -outputs.sum()


def warm_up(step: Any, optimizer: torch.optim.Optimizer, call: tuple[torch.Tensor, ...]) -> None:
    """Two calls that change no parameter; kernels are compiled in the first one. A worker alone need not wait."""
    (rate,) = {group["lr"] for group in optimizer.param_groups}
    for wanted in (0.0, 0.0, rate):
        for group in optimizer.param_groups:
            group["lr"] = wanted
        if not wanted:
            step(*call)
    # Momentum begins at nothing, for everybody.
    for entry in optimizer.state.values():
        if entry.get("momentum_buffer") is not None:
            entry["momentum_buffer"].zero_()


def meet(step: Any, barrier: Any = None) -> None:
    """Wait until all workers are here."""
    if barrier is not None:
        barrier.wait()
    elif hasattr(step, "leave"):
        step.leave()
        step.ranks.gather_texts("here")
    elif getattr(step, "link", None) is not None:
        step.link.ranks.gather_texts("here")


def proportional_bytes() -> int:
    """The memory of this process, where pages that several processes have count by their share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def run_worker(task: Any, team: Team, rank: int, port: int, settings: dict[str, Any], results: Any) -> None:
    """One process."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(team.size, 2)))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(team.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    results.put((rank, task(team, rank, settings)))


def run_team(task: Any, team: Team, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What each worker found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # the store of rank 0 ends with it, which the others would report
    results = CONTEXT.Queue()
    if team.kind == "plain_pytorch":
        torch.manual_seed(settings["seed"])
        settings = {**settings, "model": ZOO["lenet5"].build().share_memory(), "barrier": CONTEXT.Barrier(team.size)}
    processes = [
        CONTEXT.Process(target=run_worker, args=(task, team, rank, port, settings, results))
        for rank in range(team.size)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a worker of {team} ended with exit code {process.exitcode}")
    return [found[rank] for rank in range(team.size)]
