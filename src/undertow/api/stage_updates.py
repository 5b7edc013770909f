"""What a step in stages does when all gradients are there: a norm of all of them, the optimizer's step, the loss.

In: on each rank of a row the gradients of its own stages. Out: the same bits as in one process. A norm is taken by
blocks (`ops/clipping.py`), and each rank sends the norms of its blocks to the others, so that all find one norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from undertow.api.stage_tensors import StageTensors
from undertow.ops.clipping import BLOCK, block_norms, in_memory_order, norm_of_blocks
from undertow.ops.updates import LATER_STEP
from undertow.passes.training import Training
from undertow.ranks.lane import Steps
from undertow.ranks.ranks import Ranks

if TYPE_CHECKING:
    from undertow.api.stage_planning import StagePlans
    from undertow.api.staged_step import Layout

RESULT_TAGS = (1 << 21) + (3 << 19)  # of norms and losses; parameters have smaller tags


def step_later(training: Training, tensors: StageTensors, with_gradient: Sequence[str]) -> bool:
    """The optimizer's own step on this rank's parameters, once in `accumulate` calls; whether it was made."""
    later = training.live[LATER_STEP.name]
    later.num_calls += 1
    if later.num_calls % training.accumulate:
        return False
    if training.clip_norm is not None or training.has_norm:
        parameters = dict(tensors.model.named_parameters())
        own = {
            name: block_norms(in_memory_order(gradient))
            for name in with_gradient
            if tensors.is_own(name) and (gradient := parameters[name].grad) is not None
        }
        norm = find_norm(tensors, with_gradient, own)
        if training.clip_norm is not None:
            factor = torch.clamp(training.clip_norm / (norm + 1e-6), max=1.0)
            for parameter in tensors.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        later.norm.copy_(norm)
    later.optimizer.step()
    later.optimizer.zero_grad(set_to_none=True)
    return True


def find_norm(tensors: StageTensors, with_gradient: Sequence[str], own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The norm of the gradients of all ranks of the row, in the model's order; `own` are the norms of own blocks."""
    parameters = dict(tensors.model.named_parameters())
    found = dict(own)
    for place in range(len(tensors.row)):
        theirs = [name for name in with_gradient if tensors.readers[name][0] == place]
        if not theirs:
            continue
        dtype = parameters[theirs[0]].dtype
        counts = [-(-parameters[name].numel() // BLOCK) for name in theirs]
        is_own = place == tensors.place
        row = torch.cat([own[name] for name in theirs]) if is_own else torch.empty(sum(counts), dtype=dtype)
        pass_round(tensors.ranks, tensors.row, place, row, RESULT_TAGS + place)
        found.update(zip(theirs, row.split(counts), strict=True))
    return norm_of_blocks([found[name] for name in with_gradient])


def exchange_loss(layout: Layout, plans: StagePlans, results: dict[int, Any]) -> torch.Tensor:
    """The loss of the batch, from the stage that has it to all ranks of the row."""
    stage = plans.loss_stage
    place = plans.schedule.rank_of(stage)
    kind = plans.loss_type
    loss = results[stage] if place == layout.place else torch.empty(kind.shape, dtype=kind.dtype)
    pass_round(layout.ranks, layout.row, place, loss, RESULT_TAGS + len(layout.row))
    return loss


def pass_round(ranks: Ranks, row: Sequence[int], place: int, tensor: torch.Tensor, tag: int) -> None:
    """A tensor from one place of a row to all others."""
    ranks.finish(ranks.lane.start("a result of a stage", _pass_round(ranks, row, place, tensor, tag)))


def _pass_round(ranks: Ranks, row: Sequence[int], place: int, tensor: torch.Tensor, tag: int) -> Steps:
    flat = in_memory_order(tensor.detach()).view(torch.uint8)
    if ranks.rank != row[place]:
        yield ranks.messages.receive(flat, row[place], tag, 0)
    else:
        yield [item for other in row if other != ranks.rank for item in ranks.messages.send(flat, other, tag, 0)]
