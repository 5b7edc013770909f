"""`undertow plan --parallel stages=4`: what the ranks would run and hold, before they are started."""

from __future__ import annotations

from typing import Any

import torch

from undertow.api.batch_division import count_examples
from undertow.api.stage_reports import report_stages
from undertow.cli.loading import Subject
from undertow.errors import CallError
from undertow.models import ZOO
from undertow.ranks.mesh import parse_mesh
from undertow.report.stages import StagesReport

SHARDS_A_STAGE = 4


def plan_stages(
    name: str,
    subject: Subject,
    parallel: str,
    shards: int | None,
    schedule: str,
    title: str,
    terms: dict[str, Any],
) -> StagesReport:
    """The report; a model of the zoo is planned with its loss."""
    mesh = parse_mesh(parallel, "--parallel")
    if mesh.stages == 1:
        raise CallError(f"--parallel {parallel} has one stage, and its ranks run the plan of one process; leave it out")
    num_examples = count_examples(subject.args, subject.kwargs)
    if shards is None:
        shards = min(num_examples, SHARDS_A_STAGE * mesh.stages * mesh.data)
    if num_examples < shards:
        raise CallError(f"--shards {shards}: the batch has {num_examples} examples; give a larger --batch")
    loss = None
    targets: tuple[Any, ...] = ()
    if name in ZOO:
        loss = ZOO[name].loss
        targets = ZOO[name].example_targets(num_examples, torch.Generator().manual_seed(0))
    return report_stages(
        subject.model,
        subject.args,
        subject.kwargs,
        mesh=mesh,
        shards=shards,
        schedule=schedule,
        loss=loss,
        targets=targets,
        title=title,
        **terms,
    )
