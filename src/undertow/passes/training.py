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

from undertow.costs.optimizer_state import count_part_state
from undertow.errors import CallError
from undertow.ir import Gradient, Program, Value
from undertow.ops.clipping import clip_in_blocks
from undertow.ops.communication import LINK, Link
from undertow.ops.gradient_norms import FIND_GRADIENT_NORM, GRADIENT_NORMS, GradientNorms
from undertow.ops.locks import TEAM, HasLocks, under_lock
from undertow.ops.own_parts import OwnParts
from undertow.ops.projection import MASKS, PROJECT, Masks
from undertow.ops.row_gradients import find_chain, update_rows_by, why_refused
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
from undertow.passes.own_parts import Updating
from undertow.passes.shards import SHARE_SEED, ShardPart, keep_use, take_out_buffers
from undertow.passes.updates import AtEnd, Use, add_updates
from undertow.terms import Terms
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
    team: HasLocks | None = None  # where other workers update the same parameters
    live: dict[str, Any] = field(init=False)  # what the Program's updates name

    def __post_init__(self) -> None:
        live: dict[str, Any] = {}
        if self.optimizer is not None:
            later = LaterStep(self.model, self.optimizer)
            if self.has_norm or self.clip_norm is not None:
                later.norm = torch.zeros((), device=next(self.trained()).device)
            live = {OPTIMIZER.name: self.optimizer, LATER_STEP.name: later}
            if self.has_norm:
                live[GRADIENT_NORMS.name] = self._make_norms()
        if self.team is not None:
            live[TEAM.name] = self.team
        if self.masks is not None:
            live[MASKS.name] = self.masks
        if self.shards is not None:
            live[SHARDS.name] = self.shards.shards
            if self.shards.link is not None:
                live[LINK.name] = self.shards.link
            if self.optimizer is not None:
                live[LATER_STEP.name].clip = clip_in_blocks
        object.__setattr__(self, "live", live)

    def _make_norms(self) -> GradientNorms:
        """In shards a norm is one of blocks, in the model's order."""
        trained = list(self.trained())
        if self.shards is None:
            return GradientNorms(trained)
        wanted = set(trained)
        return GradientNorms([item for item in self.model.parameters() if item in wanted], in_blocks=True)

    @property
    def link(self) -> Link | None:
        """What the ranks of a job are bound by."""
        return None if self.shards is None else self.shards.link

    @property
    def own(self) -> OwnParts | None:
        """Which elements each rank updates, where the optimizer's state is divided."""
        return None if self.shards is None else self.shards.own

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

    def notes(self, program: Program) -> tuple[str, ...]:
        """Which parameters are divided, and why the optimizer steps at the end, where it does."""
        found = () if self.shards is None else self.shards.describe_buckets(program)
        if self.optimizer is None or self.updates_inside:
            return found
        later = "the optimizer steps after the backward pass, and gradients are held until then"
        return (*found, f"{later}: {self._why_later()}")

    def before_differentiating(self, program: Program) -> Program:
        """The forward pass as it is differentiated."""
        return program if self.shards is None else take_out_buffers(program)

    def add_to(self, program: Program, terms: Terms) -> Program:
        """The Program with what is done with its gradients, and with how it gets its parameters.

        Costs say which gradients are sent together.
        """
        self._check_rows(program.gradients)
        if self.shards is None:
            return self._add_uses(program, terms)
        return self.shards.keep_own_elements(self._add_uses(self.shards.read_parameters(program), terms))

    def _add_uses(self, program: Program, terms: Terms) -> Program:
        if self.shards is not None and not self.shards.is_last:
            return add_updates(program, keep_use, seed_by=SHARE_SEED)
        # Clipping to any norm finds the norm, and changes no bit.
        clip_norm = math.inf if self.has_norm and self.clip_norm is None else self.clip_norm
        if self.own is not None and self.shards is not None and self.optimizer is not None:
            updating = Updating(self.optimizer, not self.updates_inside, clip_norm, self.accumulate)
            program = self.shards.update_own_parts(program, updating, terms)
        elif self.shards is not None:
            program = self.shards.add_up_gradients(program, terms)
        uses = self._find_uses(program)
        at_end = None
        is_staged = self.shards is not None and self.shards.is_staged
        if self.optimizer is not None and not self.updates_inside and self.own is None and not is_staged:
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

    def own_tensors(self) -> list[torch.Tensor]:
        """What this rank keeps of its own parts: gradients that are added up from call to call, divided parameters."""
        return [] if self.own is None else [*self.own.sums.values(), *self.own.divided.own.values()]

    def added_up_bytes(self) -> int:
        """The gradients that stay from call to call."""
        if self.own is not None:
            return self.own.own_bytes() if self.accumulate > 1 else 0
        updated = set(self.trained())
        return sum(
            item.nbytes for item in self.model.parameters() if item.requires_grad and self._is_added_up(item, updated)
        )

    def held_by_shards(self, program: Program) -> dict[str, int]:
        """What the other shards of the batch hold while one runs."""
        if self.shards is None:
            return {}
        trained = sum(item.nbytes for item in self.model.parameters() if item.requires_grad)
        of_own: dict[str, int] = {}
        if self.own is not None and self.optimizer is not None:
            of_own = {
                "optimizer state": count_part_state(self.optimizer, self.own.own_elements()),
                "small parameters on their way": self.own.packed_bytes(),
            }
            if self.own.divided.pieces or self.own.divided.own:
                of_own["parameters"] = self.own.parameter_bytes()
        return {
            **of_own,
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
        if self.has_norm and self.own is not None:
            return "the norm of all gradients is wanted, of which this rank has a part"
        if self.optimizer is not None and not is_separable(self.optimizer):
            return f"{name} is not known to treat parameters one by one"
        return f"{name} has step hooks" if self.has_step_hooks else ""

    def _is_added_up(self, parameter: torch.nn.Parameter, updated: set[torch.nn.Parameter]) -> bool:
        """Whether the parameter's gradient stays from call to call, as eager's does until it is cleared."""
        return self.accumulate > 1 or (self.optimizer is not None and parameter not in updated)

    def _check_rows(self, gradients: Sequence[Gradient]) -> None:
        """Refuse gradients in rows where the optimizer cannot take them, and dense ones where it takes no others."""
        if self.optimizer is None:
            return
        is_in_rows = {item.input.name: item.is_in_rows for item in gradients if item.value is not None}
        if not any(is_in_rows.values()) and not isinstance(self.optimizer, torch.optim.SparseAdam):
            return
        updated, kind = set(self.trained()), type(self.optimizer).__name__
        for name, parameter in self.model.named_parameters():
            if is_in_rows.get(name):
                why = self._why_not_in_rows() if parameter in updated else "is not the optimizer's"
                if why:
                    raise CallError(f"{name} has a sparse gradient, and {why}; make its embedding with sparse=False")
        names = {item: name for name, item in self.model.named_parameters() if name in is_in_rows}
        for index, group in enumerate(self.optimizer.param_groups):
            kinds = {is_in_rows[names[item]]: names[item] for item in group["params"] if item in names}
            for is_sparse, name in kinds.items():
                if why := why_refused(self.optimizer, index, is_sparse):
                    raise CallError(
                        f"{kind} does not take the gradient of {name}, which is {'sparse' if is_sparse else 'dense'}: "
                        f"{why}; SGD without momentum and weight_decay and Adagrad take both, SparseAdam sparse ones"
                    )

    def _why_not_in_rows(self) -> str:
        """Why the step cannot have sparse gradients, whatever the optimizer; empty where it can."""
        if self.shards is not None:
            return "gradients of shards are added up in dense memory"
        if self.masks is not None:
            return "masks hold whole parameters"
        if self.has_norm or self.clip_norm is not None:
            return "PyTorch finds no norm of sparse gradients"
        if self.accumulate > 1:
            return "sparse gradients that are accumulated grow with every call"
        if self.optimizer is not None and any(group.get("momentum") for group in self.optimizer.param_groups):
            return "momentum keeps the rows of all steps, which have no bound in bytes"
        return f"the optimizer steps at the end: {self._why_later()}" if self._why_later() and self.is_separable else ""

    @property
    def is_separable(self) -> bool:
        """Whether the optimizer is known to treat parameters one by one."""
        return self.optimizer is not None and is_separable(self.optimizer)

    def _find_uses(self, program: Program) -> dict[Value, Use]:
        """What is done with the gradient of each input that has one."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        groups = self.optimizer.param_groups if self.updates_inside and self.optimizer is not None else []
        group_of = {id(item): index for index, group in enumerate(groups) for item in group["params"]}
        updated = set(self.trained())
        numbers = {id(item): number for number, item in enumerate(self.trained())}
        found: dict[Value, Use] = {}
        for gradient in program.gradients:
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
                chain = find_chain(program, gradient.value) if gradient.is_in_rows else []
                update = update_rows_by(self.optimizer, index, chain) if chain else update_by(self.optimizer, index)
                before: tuple[Any, ...] = (OPTIMIZER, index)
                if self.team is not None and self.team.has_locks:
                    update, before = under_lock(update), (TEAM, numbers[id(parameter)], *before)
                found[gradient.input] = Use(update, True, True, before, (), look, after, chain)
            else:
                is_added_up = self._is_added_up(parameter, updated)
                found[gradient.input] = Use(DELIVER_GRADIENT, is_added_up, False, (), (is_added_up,), None, after)
        return found
