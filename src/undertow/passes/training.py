"""What a whole training step does with its gradients: which optimizer uses them, and when.

In: a Program with the backward pass from a loss, a model, an optimizer or none. Out: the Program with its updates.
An optimizer that treats parameters one by one steps inside the backward pass, parameter by parameter. Clipping,
accumulation, step hooks and other optimizers need all gradients: there the optimizer steps at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from undertow.errors import CallError
from undertow.ir import Gradient, Program, Value
from undertow.ops.clipping import clip_in_blocks
from undertow.ops.communication import LINK
from undertow.ops.gradient_norms import FIND_GRADIENT_NORM, GRADIENT_NORMS, GradientNorms
from undertow.ops.projection import MASKS, PROJECT, Masks
from undertow.ops.shards import SHARDS
from undertow.ops.updates import (
    DELIVER_GRADIENT,
    LATER_STEP,
    OPTIMIZER,
    LaterStep,
    is_separable,
    step_afterwards,
    update_by,
)
from undertow.passes.shards import SHARE_SEED, ShardPart, keep_use, take_out_buffers
from undertow.passes.updates import AtEnd, Use, add_updates
from undertow.torch_internals import global_step_post_hooks, global_step_pre_hooks


@dataclass(frozen=True, eq=False)
class Training:
    """Without an optimizer, gradients are left to their parameters."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    clip_norm: float | None = None
    accumulate: int = 1
    has_norm: bool = False  # the norm of the gradients is wanted
    masks: Masks | None = None  # parameters that are projected after their updates
    shards: ShardPart | None = None  # where the step runs one shard of a batch
    live: dict[str, Any] = field(init=False)  # what the Program's updates name

    def __post_init__(self) -> None:
        live: dict[str, Any] = {}
        if self.optimizer is not None:
            later = LaterStep(self.model, self.optimizer)
            if self.has_norm or self.clip_norm is not None:
                later.norm = torch.zeros((), device=next(self.trained()).device)
            live = {OPTIMIZER.name: self.optimizer, LATER_STEP.name: later}
            if self.has_norm:
                live[GRADIENT_NORMS.name] = GradientNorms(self.trained())
        if self.masks is not None:
            live[MASKS.name] = self.masks
        if self.shards is not None:
            live[SHARDS.name] = self.shards.shards
            if self.shards.link is not None:
                live[LINK.name] = self.shards.link
            if self.optimizer is not None:
                live[LATER_STEP.name].clip = clip_in_blocks
        object.__setattr__(self, "live", live)

    @cached_property
    def updates_inside(self) -> bool:
        """Whether the optimizer steps inside the backward pass; as it was when the step was made."""
        return self.optimizer is not None and not self._why_later()

    @property
    def has_step_hooks(self) -> bool:
        """Whether the optimizer has hooks that are called when it steps."""
        if self.optimizer is None:
            return False
        own = (self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks)
        return any((*own, global_step_pre_hooks, global_step_post_hooks))

    def trained(self) -> Iterator[torch.nn.Parameter]:
        """The optimizer's parameters."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return (parameter for group in groups for parameter in group["params"])

    def notes(self) -> tuple[str, ...]:
        """Why the optimizer steps at the end, where it does."""
        if self.optimizer is None or self.updates_inside:
            return ()
        return (f"the optimizer steps after the backward pass, and gradients are held until then: {self._why_later()}",)

    def before_differentiating(self, program: Program) -> Program:
        """The forward pass as it is differentiated."""
        return program if self.shards is None else take_out_buffers(program)

    def add_to(self, program: Program) -> Program:
        """The Program with what is done with its gradients."""
        if self.shards is not None and not self.shards.is_last:
            return add_updates(program, keep_use, seed_by=SHARE_SEED)
        if self.shards is not None:
            program = self.shards.add_up_gradients(program)
        uses = self._find_uses(program.gradients)
        at_end = None
        if self.optimizer is not None and not self.updates_inside:
            # Clipping to any norm finds the norm, and changes no bit.
            clip_norm = math.inf if self.has_norm and self.clip_norm is None else self.clip_norm
            settings = (LATER_STEP, clip_norm, self.accumulate)
            at_end = AtEnd(step_afterwards(type(self.optimizer).__name__), settings)
        if self.shards is None:
            return add_updates(program, lambda item: uses[item.input], at_end)
        return self.shards.use_records(add_updates(program, lambda item: uses[item.input], at_end, SHARE_SEED))

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """The norm of all gradients of the last update, before they were clipped; None where it was not found."""
        if self.updates_inside:
            return self.live[GRADIENT_NORMS.name].total() if self.has_norm else None
        return None if self.optimizer is None else self.live[LATER_STEP.name].norm

    def norm_tensors(self) -> list[torch.Tensor]:
        """Norms of gradients, which stay all the time."""
        if self.updates_inside:
            return [*self.live[GRADIENT_NORMS.name].found.values()] if self.has_norm else []
        norm = None if self.optimizer is None else self.live[LATER_STEP.name].norm
        return [] if norm is None else [norm]

    def mask_tensors(self) -> list[torch.Tensor]:
        """Masks and hidden values, which stay all the time."""
        return [] if self.masks is None else self.masks.tensors()

    def added_up_bytes(self) -> int:
        """The gradients that stay from call to call."""
        updated = set(self.trained())
        return sum(
            item.nbytes for item in self.model.parameters() if item.requires_grad and self._is_added_up(item, updated)
        )

    def held_by_shards(self, program: Program) -> dict[str, int]:
        """What the other shards of the batch hold while one runs."""
        if self.shards is None:
            return {}
        trained = sum(item.nbytes for item in self.model.parameters() if item.requires_grad)
        return {
            "other shards of the batch": self.shards.shards.rest_bytes,
            "sums over shards": self.shards.waiting_bytes(trained),
            "records of shards": self.shards.records_bytes(program),
        }

    def _why_later(self) -> str:
        """Why the optimizer cannot step inside the backward pass; empty where it can."""
        name = type(self.optimizer).__name__
        if self.clip_norm is not None:
            return "clipping needs the norm of all gradients"
        if self.accumulate > 1:
            return "gradients are accumulated over calls"
        if self.optimizer is not None and not is_separable(self.optimizer):
            return f"{name} is not known to treat parameters one by one"
        return f"{name} has step hooks" if self.has_step_hooks else ""

    def _is_added_up(self, parameter: torch.nn.Parameter, updated: set[torch.nn.Parameter]) -> bool:
        """Whether the parameter's gradient stays from call to call, as eager's does until it is cleared."""
        return self.accumulate > 1 or (self.optimizer is not None and parameter not in updated)

    def _find_uses(self, gradients: Sequence[Gradient]) -> dict[Value, Use]:
        """What is done with the gradient of each input that has one."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        groups = self.optimizer.param_groups if self.updates_inside and self.optimizer is not None else []
        group_of = {id(item): index for index, group in enumerate(groups) for item in group["params"]}
        updated = set(self.trained())
        found: dict[Value, Use] = {}
        for gradient in gradients:
            if gradient.value is None:
                continue
            parameter = parameters.get(gradient.input.name)
            if parameter is None:
                raise CallError(f"{gradient.input} requires a gradient and is not a parameter of the model; detach it")
            after = None
            if self.masks is not None and parameter in self.masks:
                after = (PROJECT, (MASKS, self.masks.name_of(parameter), gradient.input.name))
            if id(parameter) in group_of:
                assert self.optimizer is not None
                index = group_of[id(parameter)]
                look = (FIND_GRADIENT_NORM, (GRADIENT_NORMS,)) if self.has_norm else None
                update = update_by(self.optimizer, index)
                found[gradient.input] = Use(update, True, True, (OPTIMIZER, index), (), look, after)
            else:
                is_added_up = self._is_added_up(parameter, updated)
                found[gradient.input] = Use(DELIVER_GRADIENT, is_added_up, False, (), (is_added_up,), None, after)
        return found
