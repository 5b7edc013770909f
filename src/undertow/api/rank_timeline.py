"""A recorded step: what every rank did when, beside what was planned.

In: a step over ranks, and a batch. Out: the loss of a step that was made as always, and its `StepOfRanks` on every
rank. All ranks call this. Nothing is recorded in other steps.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from undertow.ir.operation import COMPUTING
from undertow.ir.step_times import Row, outline
from undertow.ranks.lane import Recorded
from undertow.report.rank_times import RankTimes, StepOfRanks, measured_times, predict_ranks, read_rank

if TYPE_CHECKING:
    from undertow.api.sharding import ShardedStep


def record_step(
    step: ShardedStep, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, StepOfRanks | None]:
    """Make a step and record it; None beside the loss where the step has one rank."""
    if step.link is None:
        return step(*args, **kwargs), None
    ranks = step.link.ranks
    step.wait_for_parameters()
    ranks.send_number(0)  # from here on the clocks of all ranks run
    sent_before = ranks.messages.sent_bytes
    ranks.lane.recorded = recorded = Recorded()
    start_ns = time.perf_counter_ns()
    try:
        loss = step(*args, **kwargs)
        end_ns = time.perf_counter_ns()
    finally:
        ranks.lane.recorded = None
    step.wait_for_parameters()
    measured = _measured(recorded, start_ns, end_ns, ranks.messages.sent_bytes - sent_before)
    own = {
        "rows": [
            [row.lane, row.duration_ns, row.waits, row.about, row.is_joint] for row in _outline(step, args, kwargs)
        ],
        "planned_bytes": step.plan.sent_bytes,
        "measured": StepOfRanks((), (measured,)).to_dict()["measured"][0],
    }
    found = [json.loads(text) for text in ranks.gather_texts(json.dumps(own))]
    outlines = [
        [Row(lane, duration, tuple(waits), *rest) for lane, duration, waits, *rest in item["rows"]] for item in found
    ]
    predicted = predict_ranks(outlines, [item["planned_bytes"] for item in found])
    return loss, StepOfRanks(predicted, tuple(read_rank(item["measured"]) for item in found))


def _measured(recorded: Recorded, start_ns: int, end_ns: int, sent_bytes: int) -> RankTimes:
    def since(time_ns: int) -> float:
        return max(0, time_ns - start_ns) / 1e3

    waits = [(about, since(start), since(end)) for about, start, end in recorded.waits]
    sends = [(item.about, since(item.started_ns), since(item.ended_ns)) for item in recorded.transfers]
    return measured_times(since(end_ns), waits, sends, sent_bytes)


def _outline(step: ShardedStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Row]:
    """The rows of this rank's plans: its shards, one after the other."""
    earlier, last = step.plans_of_call(args, kwargs)
    rows = [Row(COMPUTING, plan.times.step_ns, (), "") for plan in earlier]
    number = len(rows)
    found = outline(last.nodes, last.tables.duration_ns)
    return rows + [replace(row, waits=tuple(place + number for place in row.waits)) for row in found]
