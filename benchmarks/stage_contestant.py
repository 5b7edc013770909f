"""One rank of a contestant of `stages.py`: it prepares a step in stages, then runs as many as told. Not a benchmark.

In: a task as JSON, of which `shards_per_rank` is the number of shards of a step. Out: lines of JSON, as those of
`rank_contestant.py`. For the task `cuts` each turn runs all cuts, one after the other, and answers with their times.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rank_contestant import Task, begin
from torch import distributed, nn
from torch.nn import functional

import undertow as ut
from undertow.api import stage_planning
from undertow.models import ZOO, gpt, resnet18_small, token_loss, unet, vgg_small
from undertow.stages.cutting import judge

NUM_BLOCKS = 8
MAX_CUTS = 40


def make_blocks(kind: str) -> tuple[nn.Sequential, tuple[int, ...]]:
    """Blocks of equal time, which every contestant can divide, and the sizes of an example."""
    if kind == "mlp":
        blocks = [nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(NUM_BLOCKS)]
        return nn.Sequential(*blocks), (512,)
    layers = [nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(NUM_BLOCKS)]
    return nn.Sequential(*layers), (64, 128)


CUT_MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[int], Any], Callable[[int], Any]]] = {
    "vgg": (vgg_small, ZOO["vgg_small"].loss, ZOO["vgg_small"].example_inputs, ZOO["vgg_small"].example_targets),
    "resnet": (
        resnet18_small,
        ZOO["resnet18_small"].loss,
        ZOO["resnet18_small"].example_inputs,
        ZOO["resnet18_small"].example_targets,
    ),
    "unet": (
        partial(unet, width=8, depth=3),
        functional.cross_entropy,
        lambda batch: (torch.randn(batch, 1, 64, 64),),
        lambda batch: (torch.randint(2, (batch, 64, 64)),),
    ),
    "gpt": (
        partial(gpt, num_layers=4, num_heads=4, width=192, vocabulary=2048, context=64),
        token_loss,
        lambda batch: (torch.randint(2048, (batch, 64)),),
        lambda batch: (torch.randint(2048, (batch, 64)),),
    ),
}


class Turns:
    """A step that runs on request."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank
        self.facts: dict[str, Any] = {}
        torch.manual_seed(0)
        self.runs = getattr(self, f"_make_{task.way.kind}")()

    def _blocks(self) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
        model, sizes = make_blocks(self.task.workload)
        return model, torch.randn(self.task.batch, *sizes), torch.randn(self.task.batch, *sizes)

    def _make_ours(self) -> list[Callable[[], Any]]:
        model, x, y = self._blocks()
        step = self._staged(model, (x,), (y,), functional.mse_loss, self.task.way.options["schedule"])
        self._measure_idle(step, x, y)
        return [lambda: step(x, y)]

    def _staged(self, model: nn.Module, args: Any, targets: Any, loss: Any, schedule: str) -> Any:
        step = ut.train_step(
            model,
            args,
            targets=targets,
            loss=loss,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            shards=self.task.shards_per_rank,
            parallel=ut.Mesh(stages=self.task.num_ranks),
            schedule=schedule,
        )
        step(*args, *targets)
        return step

    def _measure_idle(self, step: Any, *batch: Any) -> None:
        """What this rank computes during a step, beside the whole step."""
        samples = []
        for _ in range(7):
            start = time.perf_counter_ns()
            step(*batch)
            samples.append((step.busy_ns, time.perf_counter_ns() - start))
        samples.sort(key=lambda pair: pair[1])
        self.facts["busy_ns"], self.facts["step_ns"] = samples[len(samples) // 2]
        found = step.plans
        self.facts["starts"] = list(found.starts)
        if found.cut is not None:
            self.facts["idle_planned"] = found.cut.timing.idle_share
            self.facts["bound"] = found.bound

    def _make_pipelining(self) -> list[Callable[[], Any]]:
        """torch.distributed.pipelining, with the blocks divided evenly, as its pages show it."""
        from torch.distributed import pipelining

        distributed.init_process_group("gloo")
        name, stages_a_rank = self.task.way.options["schedule"], self.task.way.options["stages_a_rank"]
        model, x, y = self._blocks()
        num_stages = self.task.num_ranks * stages_a_rank
        is_v = name == "ScheduleZBVZeroBubble"
        own = [self.rank + self.task.num_ranks * place for place in range(stages_a_rank)]
        if is_v:
            own = [self.rank, num_stages - 1 - self.rank]
        size = NUM_BLOCKS // num_stages
        parts = {stage: model[stage * size : (stage + 1) * size] for stage in own}
        stages = [
            pipelining.PipelineStage(part, stage, num_stages, torch.device("cpu")) for stage, part in parts.items()
        ]
        kind = getattr(pipelining.schedules, name)
        schedule = kind(stages if stages_a_rank > 1 else stages[0], self.task.shards_per_rank, functional.mse_loss)
        optimizer = torch.optim.SGD([item for part in parts.values() for item in part.parameters()], lr=1e-3)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            args = (x,) if 0 in own else ()
            if num_stages - 1 in own:
                schedule.step(*args, target=y, losses=[])
            else:
                schedule.step(*args)
            optimizer.step()

        return [step]

    def _make_cuts(self) -> list[Callable[[], Any]]:
        """The cut that is found comes first; then a cut at the beginning of each layer."""
        build, loss, inputs, wanted = CUT_MODELS[self.task.workload]
        model = build()
        args, targets = inputs(self.task.batch), wanted(self.task.batch)
        profiles: list[Any] = []
        find_cut = stage_planning.find_cut

        def remember(profile: Any, *rest: Any) -> Any:
            profiles.append(profile)
            return find_cut(profile, *rest)

        stage_planning.find_cut = remember  # type: ignore[assignment]
        steps = [self._staged(copy.deepcopy(model), args, targets, loss, "1f1b")]
        self.facts["starts"] = [list(steps[0].plans.starts)]
        if self.rank == 0:
            profile = profiles[0]
            first: dict[str, int] = {}
            for place in profile.places:
                first.setdefault(profile.names[place], place)
            places = list(first.values())
        else:
            places = []
        ranks = steps[0].layout.ranks
        data = ranks.send_bytes(json.dumps(places).encode() if self.rank == 0 else None)
        places = json.loads(data)
        for place in places[:: -(-len(places) // MAX_CUTS)]:
            forced = [place]

            def take(profile: Any, schedule: Any, *rest: Any, forced: list[int] = forced) -> Any:
                return judge(profile, schedule, forced)

            stage_planning.find_cut = take  # type: ignore[assignment]
            steps.append(self._staged(copy.deepcopy(model), args, targets, loss, "1f1b"))
            self.facts["starts"].append(forced)
        return [partial(step, *args, *targets) for step in steps]


def main() -> None:
    """Serve turns until stdin ends."""
    task, rank = begin()
    turns = Turns(task, rank)
    print(json.dumps(turns.facts), flush=True)
    for line in sys.stdin:
        num_steps = int(line)
        answers = []
        for run in turns.runs:
            run()
            start = time.perf_counter()
            for _ in range(num_steps):
                run()
            answers.append((time.perf_counter() - start) / num_steps)
        print(answers[0] if task.way.kind != "cuts" else json.dumps(answers), flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
