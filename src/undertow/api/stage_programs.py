"""The Programs of the stages of one kind of call: recorded, cut, divided, planned.

In: a request, the shards of a batch, the mesh and a schedule. Out: for each stage of a rank and each kind of shard a
plan, and what the stages send each other. Everything follows from the recorded model, the cut and the costs, so ranks
that share these derive the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from undertow.errors import CallError
from undertow.ir import Program, Value
from undertow.ops.communication import Link
from undertow.ops.gradient_norms import GRADIENT_NORMS
from undertow.ops.shards import Shards
from undertow.ops.updates import LATER_STEP
from undertow.passes.shards import ShardPart
from undertow.passes.stages import StagePart, divide, with_end
from undertow.passes.training import Training
from undertow.pipeline import Request, derive_gradients, record
from undertow.record.capture import Captured
from undertow.stages.arrivals import Route
from undertow.stages.schedules import Schedule
from undertow.terms import Terms


class Kind(NamedTuple):
    """Shards of one stage that run by one plan."""

    stage: int
    num_examples: int
    is_last: bool

    def __str__(self) -> str:
        which = "the last" if self.is_last else "an earlier"
        return f"stage {self.stage}, {which} shard of {self.num_examples} examples"


@dataclass(eq=False)
class StageContext:
    """One stage of this rank: what it knows of its shards, and its link to those who have the same stage."""

    training: Training
    shards: Shards
    link: Link | None

    def training_of(self, is_last: bool) -> Training:
        """What is done with the gradients of a shard."""
        part = ShardPart(self.shards, is_last, self.link, is_staged=True)
        found = replace(self.training, shards=part)
        for name in (LATER_STEP.name, GRADIENT_NORMS.name):
            if name in self.training.live:
                found.live[name] = self.training.live[name]
        return found


@dataclass(eq=False)
class Recorded:
    """A shard's model, recorded. It is differentiated when rank 0's costs are known, since kernels depend on them."""

    request: Request
    captured: Captured

    @cached_property
    def program(self) -> Program:
        """The forward pass and its derivative."""
        return derive_gradients(self.request, self.captured.program, ())


def record_shard(request: Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded:
    """Record a shard."""
    with torch.enable_grad():
        captured = record(request, args, kwargs)
    if captured.assignments or len(captured.program.outputs) > 1:
        what = captured.assignments[0].path if captured.assignments else "a second output"
        raise CallError(
            f"the forward pass assigns {what}, and stages hand nothing on but what their layers compute; remove "
            f"the assignment, or train with data= alone"
        )
    return Recorded(request, captured)


@dataclass(eq=False)
class Parts:
    """The parts of all stages for shards of one size."""

    recorded: Recorded
    parts: tuple[StagePart, ...]

    @cached_property
    def routes(self) -> list[Route]:
        """What crosses, in the order in which it is sent."""
        found: dict[int, Route] = {}
        for part in self.parts:
            for item in part.crossings:
                if item.source == part.stage:
                    found[item.number] = Route(item.number, item.source, item.target, item.which, item.num_bytes)
        return list(found.values())

    @cached_property
    def values(self) -> dict[int, Value]:
        """What travels on each route."""
        return {item.number: item.value for part in self.parts for item in part.crossings}


def divide_recorded(recorded: Recorded, starts: Sequence[int], schedule: Schedule) -> Parts:
    """The parts of the stages."""
    return Parts(recorded, divide(recorded.program, starts, schedule.is_in_halves))


def stage_program(part: StagePart, training: Training, terms: Terms) -> Program:
    """The Program of a stage, with what is done with its gradients."""
    return with_end(part, training.add_to(part.program, terms))


@dataclass(eq=False)
class Sources:
    """Where the inputs of a stage's Program are found at every call."""

    captured: Captured
    program: Program
    modules: dict[str, torch.nn.Module]

    def find(self, tensors: list[torch.Tensor]) -> list[Any]:
        """The inputs, of a shard with these tensors."""
        return [self.captured.tensor_behind(item, tensors, self.modules) for item in self.program.inputs]
