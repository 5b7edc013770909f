"""One rank of a contestant of `ranks.py`: it prepares a step, then runs as many as it is told to. Not a benchmark.

In: a description as JSON, and what torchrun would put into the environment. For each number on stdin it runs one step
that does not count and then so many that do. Out: lines of JSON: what the step is, then for each turn
the seconds of a step, and those of them that its processors were busy.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import undertow as ut
from undertow.models import ZOO, ZooModel, classes, gpt, mlp, normal, token_loss

CHUNK_BYTES = 1 << 20

# Networks with a batch for which a step of two ranks takes 0.1 to 2 s on a core each.
WORKLOADS: dict[str, tuple[ZooModel, int]] = {
    "mlp": (ZooModel("mlp", partial(mlp, (784, 2048, 2048, 2048, 10)), normal(784), classes(10)), 256),
    "vgg_small": (ZOO["vgg_small"], 32),
    "resnet18_small": (ZOO["resnet18_small"], 16),
    "resnet50": (ZOO["resnet50"], 4),
    "char_gpt": (ZOO["char_gpt"], 64),
    "gpt": (
        ZooModel(
            "gpt",
            partial(gpt, num_layers=6, width=384, vocabulary=16384, context=128),
            classes(16384, 128),
            classes(16384, 128),
            token_loss,
        ),
        8,
    ),
    "lstm": (ZooModel("lstm", ZOO["lstm"].build, classes(10000, 35), classes(10000, 35), token_loss), 16),
}
WITH_ADAMW = ("mlp", "char_gpt", "gpt", "lstm")
MANY_BATCH = {"resnet18_small": 64, "gpt": 16}  # for 8 ranks


@dataclass(frozen=True)
class Way:
    """How a contestant runs a workload; `name` is printed.

    `kind` is ours, ddp, fsdp, eager, computing or sending. The last two are parts of a step: what a rank computes, and
    what it sends.
    """

    name: str
    kind: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What one contestant does: a workload, on so many ranks, with so many shards on each."""

    workload: str
    batch: int
    num_ranks: int
    shards_per_rank: int
    num_threads: int
    way: Way

    def to_json(self) -> str:
        """For the command line of a rank."""
        return json.dumps(asdict(self))


def read_task(text: str) -> Task:
    """The task that `to_json` wrote."""
    found = json.loads(text)
    return Task(**found | {"way": Way(**found["way"])})


def make_optimizer(workload: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """As a user would take it for such a network."""
    if workload in WITH_ADAMW:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **options)


class Turns:
    """A step that runs on request; `finish` is called when a turn has ended, before the clock is read."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank
        self.entry = WORKLOADS[task.workload][0]
        torch.manual_seed(0)
        self.model = self.entry.build().train()
        self.args, self.targets = self.entry.example_inputs(task.batch), self.entry.example_targets(task.batch)
        self.finish: Callable[[], None] = lambda: None
        self.facts: dict[str, Any] = {
            "parameter_bytes": sum(item.nbytes for item in self.model.parameters() if item.requires_grad)
        }
        self.step = getattr(self, f"_make_{task.way.kind}")()

    def own_part(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """This rank's part of the batch, as other libraries divide it."""
        first, end = (self.task.batch * (self.rank + more) // self.task.num_ranks for more in (0, 1))
        args, targets = (tuple(item[first:end] for item in items) for items in (self.args, self.targets))
        return args, targets

    def _make_ours(self) -> Callable[[], None]:
        num_ranks, options = self.task.num_ranks, self.task.way.options
        step = ut.train_step(
            self.model,
            self.args,
            targets=self.targets,
            loss=self.entry.loss,
            optimizer=make_optimizer(self.task.workload, self.model),
            shards=num_ranks * self.task.shards_per_rank,
            parallel=ut.Mesh(data=num_ranks) if num_ranks > 1 else None,
            **(options if num_ranks > 1 else {}),
        )
        self.finish = step.settle
        step(*self.args, *self.targets)
        if num_ranks > 1:
            messages = step.link.ranks.messages
            before = messages.sent_bytes
            step(*self.args, *self.targets)
            step.settle()
            self.facts["sent_bytes"] = messages.sent_bytes - before
        self.facts["planned_peak_bytes"] = step.peak_bytes
        return lambda: step(*self.args, *self.targets)

    def _make_computing(self) -> Callable[[], None]:
        args, targets = self.own_part()
        optimizer = make_optimizer(self.task.workload, self.model)
        shards = self.task.shards_per_rank
        step = ut.train_step(
            self.model, args, targets=targets, loss=self.entry.loss, optimizer=optimizer, shards=shards
        )
        return lambda: step(*args, *targets)

    def _make_eager(self) -> Callable[[], None]:
        return self._plain_step(self.model)

    def _make_ddp(self) -> Callable[[], None]:
        distributed.init_process_group("gloo")
        return self._plain_step(DistributedDataParallel(self.model, **self.task.way.options))

    def _make_fsdp(self) -> Callable[[], None]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        distributed.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (self.task.num_ranks,))
        for block in blocks_of(self.model):
            fully_shard(block, mesh=mesh, **self.task.way.options)
        fully_shard(self.model, mesh=mesh, **self.task.way.options)
        return self._plain_step(self.model)

    def _plain_step(self, network: Any) -> Callable[[], None]:
        """The loop of a user; where there are more shards, each is a pass of its own and the last one is sent."""
        args, targets = self.own_part()
        optimizer = make_optimizer(self.task.workload, network, fused=True)
        num_passes = self.task.shards_per_rank
        parts = list(zip(*(item.chunk(num_passes) for item in (*args, *targets)), strict=True))

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            for place, part in enumerate(parts):
                is_earlier = place < len(parts) - 1
                if self.task.way.kind == "fsdp":
                    network.set_requires_gradient_sync(not is_earlier)
                with network.no_sync() if is_earlier and self.task.way.kind == "ddp" else nullcontext():
                    loss = self.entry.loss(network(*part[: len(args)]), *part[len(args) :])
                    (loss / len(parts)).backward()
            optimizer.step()

        return step

    def _make_sending(self) -> Callable[[], None]:
        """The bytes of a ring, in large chunks both ways at once, and nothing else."""
        distributed.init_process_group("gloo")
        num_ranks = self.task.num_ranks
        others = [rank for rank in range(num_ranks) if rank != self.rank]
        num_bytes = 2 * self.facts["parameter_bytes"] // num_ranks
        rows = {other: [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)] for other in others}

        def send() -> None:
            works = []
            for other, (out, into) in rows.items():
                for place, chunk in enumerate(into.split(CHUNK_BYTES)):
                    works.append(distributed.irecv(chunk, other, tag=place))
                for place, chunk in enumerate(out.split(CHUNK_BYTES)):
                    works.append(distributed.isend(chunk, other, tag=place))
            for work in works:
                work.wait()

        return send


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """What FSDP gathers and frees together: the members of lists and of sequences that are no members themselves."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            for member in child:
                if isinstance(member, nn.ModuleList | nn.Sequential):
                    yield from (item for item in member if any(True for _ in item.parameters()))
                elif any(True for _ in member.parameters()):
                    yield member


def next_line() -> str:
    """The next line of stdin; empty at its end. This moves, since who does nothing for a minute is taken for lost."""
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        pass
    return sys.stdin.readline()


def begin() -> tuple[Task, int]:
    """What is to be run, and as which rank. From now on this process runs on its own cores."""
    task, rank = read_task(sys.argv[1]), int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    first = rank * task.num_threads % len(cores)
    os.sched_setaffinity(0, cores[first : first + task.num_threads])
    torch.set_num_threads(task.num_threads)
    return task, rank


def main() -> None:
    """Serve turns until stdin ends."""
    task, rank = begin()
    turns = Turns(task, rank)
    turns.step()  # what cannot run ends here, before the others wait for it
    turns.finish()
    print(json.dumps(turns.facts), flush=True)
    while line := next_line():
        turns.step()
        turns.finish()
        num_steps = int(line)
        start, busy_s = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            turns.step()
        turns.finish()
        wall_s, busy_s = time.perf_counter() - start, time.process_time() - busy_s
        print(json.dumps([wall_s / num_steps, busy_s / num_steps]), flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
