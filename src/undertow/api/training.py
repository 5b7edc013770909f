"""`train_step`: forward pass, loss, backward pass and update as one planned call.

The step owns the gradients: each is born in the backward pass and gone when its parameter was updated, which happens as
soon as the gradient is complete and the parameter is read no more, with the bits of a step afterwards. Where that is
not possible (clipping by norm needs all gradients, accumulation keeps them, an optimizer may mix parameters), gradients
are held and the optimizer steps at the end; the plan counts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from undertow.api.budget_planning import (
    Terms,
    held_bytes,
    make_budget_planner,
    notes_of,
    parse_terms,
    plan_for_budget,
)
from undertow.api.calls import check_call, check_clip_norm, check_training
from undertow.api.planning import derive
from undertow.api.precision import with_precision
from undertow.calls.planned import Runner, differentiable_outputs
from undertow.errors import CallError
from undertow.ir import Gradient, Node, Phase, Plan, Program, Value
from undertow.ir.structure import Slot
from undertow.memory.tables import make_plan
from undertow.ops.updates import (
    DELIVER_GRADIENT,
    OPTIMIZER,
    TRAINING,
    Training,
    is_separable,
    step_afterwards,
    update_by,
)
from undertow.passes.updates import AtEnd, Use, add_updates
from undertow.planner.curve import Curve
from undertow.record.capture import Captured, capture
from undertow.record.origins import place_of
from undertow.record.python_state import state_put_back
from undertow.runtime.cuda_graphs import is_for_graph, with_graph_memory
from undertow.runtime.step import Pattern

Loss = Callable[..., torch.Tensor]


def train_step(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    targets: tuple[Any, ...] = (),
    loss: Loss | None = None,
    budget: int | str | None = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    numerics: str = "exact",
    allow_other_bits: bool = False,
    strict: bool = False,
    costs: str | Mapping[str, tuple[int, int]] = "measured",
    time_limit_s: float = math.inf,
) -> TrainStep:
    """A callable that trains: `step(*args, *targets, **kwargs)` returns the loss, and the parameters are updated.

    The loss is `loss(model(*args, **kwargs), *targets)`, or the model's own `.loss` where `loss` is None. `clip_norm`
    clips all gradients to that norm; `accumulate` updates at every so many calls, with the sum of their gradients.
    `numerics` and `allow_other_bits` are those of `plan`; the loss is part of what runs in bfloat16, as in autocast.
    `costs` may be the `costs` of another step: the same ones give the same plan.
    """
    check_call(model, args, kwargs)
    check_training(model, optimizer, loss, targets)
    check_clip_norm(clip_norm)
    if not isinstance(accumulate, int) or accumulate < 1:
        raise CallError(f"accumulate must be a whole number of at least 1, got {accumulate!r}")
    if optimizer is None and (clip_norm is not None or accumulate > 1):
        raise CallError("clip_norm and accumulate say how the optimizer steps; give optimizer= as well")
    terms = parse_terms(
        budget=budget,
        optimizer=optimizer,
        costs=costs,
        time_limit_s=time_limit_s,
        numerics=numerics,
        allow_other_bits=allow_other_bits,
    )
    step = make_step(model, len(args), loss, optimizer, terms, clip_norm, accumulate, strict)
    step.prepare((*args, *targets), kwargs or {})
    return step


def make_step(
    model: torch.nn.Module,
    num_args: int,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    terms: Terms,
    clip_norm: float | None = None,
    accumulate: int = 1,
    is_strict: bool = False,
) -> TrainStep:
    """A step that has not seen its arguments yet; the first `num_args` of them are the model's."""
    forward = with_precision(terms.numerics, model, partial(_run_model, model, num_args, loss))
    return TrainStep(model, forward, optimizer, terms, clip_norm, accumulate, is_strict)


def _run_model(model: torch.nn.Module, num_args: int, loss: Loss | None, *values: Any, **kwargs: Any) -> Any:
    outputs = model(*values[:num_args], **kwargs)
    if loss is not None:
        return loss(outputs, *values[num_args:])
    found = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if found is None:
        raise CallError("the model returns no .loss; give loss=, a function of the model's output and the targets")
    return found


class TrainStep:
    """A planned training step of one model with one optimizer; without one, gradients are left to their parameters."""

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        terms: Terms,
        clip_norm: float | None,
        accumulate: int,
        is_strict: bool,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._terms, self._is_strict, self._accumulate = terms, is_strict, accumulate
        is_plain = clip_norm is None and accumulate == 1
        self.updates_inside = (
            optimizer is not None and is_plain and is_separable(optimizer) and not _has_step_hooks(optimizer)
        )
        self._clip_norm = clip_norm
        live = {} if optimizer is None else {OPTIMIZER.name: optimizer, TRAINING.name: Training(model, optimizer)}
        expect: Callable[[Any], Pattern] = lambda captured: ()  # noqa: E731  the step differentiates its loss itself
        self._runner = Runner(model, forward, self._capture, self._plan, place_of, state_put_back, expect, live)
        self._bound = self._list_parameters()
        self._updated = set(self._trained())

    @property
    def plan(self) -> Plan:
        """The plan of the step that was last prepared or run; a call that was refused leaves it as it was."""
        return self._runner.plan

    @property
    def costs(self) -> dict[str, tuple[int, int]]:
        """What the plans were made from: nanoseconds and bytes of workspace of each measured operation."""
        return {key: (cost.duration_ns, cost.workspace_bytes) for key, cost in self._terms.table.items()}

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture and plan the step for such arguments; runs nothing."""
        with torch.enable_grad():
            self._runner.prepare(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._follow_parameters()
        self._check_untouched()
        with torch.enable_grad():
            loss = self._runner(*args, **kwargs)
        if self.optimizer is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedules ask for it
        return loss

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return (parameter for group in groups for parameter in group["params"])

    def _list_parameters(self) -> list[torch.nn.Parameter]:
        return [*self._runner.parameters(), *self._trained()]

    def _follow_parameters(self) -> None:
        """Plans name the parameters that they update: where model or optimizer have others, they are made anew."""
        found = self._list_parameters()
        if len(found) != len(self._bound) or not all(map(is_, found, self._bound)):
            self._runner.forget()
            self._bound, self._updated = found, set(self._trained())

    def _check_untouched(self) -> None:
        """What the step would pass over in silence is refused: hooks, and gradients that somebody else left."""
        if self.updates_inside and self.optimizer is not None and _has_step_hooks(self.optimizer):
            raise CallError(
                "the optimizer got a step hook after train_step was made, and its updates run inside the backward "
                "pass; register the hook first, and the optimizer steps afterwards"
            )
        for parameter in self._runner.parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise CallError(
                    f"parameter {self._name_of(parameter)} has a gradient hook, which train_step does not call; remove "
                    f"it, or train with ut.plan, loss.backward() and optimizer.step()"
                )
            if self.updates_inside and parameter.grad is not None and parameter in self._updated:
                raise CallError(
                    f"parameter {self._name_of(parameter)} has a .grad from elsewhere, to which this step would not "
                    f"add; call zero_grad() first, or accumulate with train_step(accumulate=)"
                )

    def _name_of(self, parameter: torch.nn.Parameter) -> str:
        return next(name for name, item in self.model.named_parameters() if item is parameter)

    def release(self) -> None:
        """Give back what the step holds between calls: its arena, until the next one, and its CUDA graph, which is
        captured anew when the step has run a few times more.
        """
        self._runner.release_memory()

    def walk(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Node, list[Any]]]:
        """Run a step one operation at a time, giving each with its outputs; no update is made."""
        with torch.enable_grad():
            yield from self._runner.walk(args, kwargs, lambda node: node.phase is not Phase.UPDATE)

    def drop_gradients(self) -> None:
        """Without an optimizer gradients stay with their parameters, and the next call would add to them."""
        if self.optimizer is None:
            self.model.zero_grad(set_to_none=True)

    def persistent_tensors(self) -> list[torch.Tensor]:
        """What the step holds between calls: parameters, buffers, gradients, the optimizer's state, its arena."""
        entries = self.optimizer.state.values() if self.optimizer is not None else ()
        state = [item for entry in entries for item in entry.values()]
        found = [*self.model.parameters(), *self.model.buffers(), *self._runner.persistent_tensors()]
        found += [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return found + [item for item in state if isinstance(item, torch.Tensor)]

    def _capture(self, *arguments: Any) -> Any:
        captured = capture(*arguments)
        places = differentiable_outputs(captured.program)
        slot = captured.skeleton
        is_scalar = (
            isinstance(slot, Slot)
            and slot.index in places
            and captured.program.outputs[slot.index].tensor_type.num_elements == 1
        )
        if not is_scalar:
            raise CallError("the loss must be one scalar tensor that depends on a parameter; sum it, or take its mean")
        return captured

    def find_curve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Curve:
        """The time/memory curve of the step for such arguments; runs nothing of the model."""
        with torch.enable_grad():
            captured = self._capture(self._runner.forward, args, kwargs, self.model)
        program, held = self._derive(captured.program, self._terms)
        return make_budget_planner(program, held, self._terms, {**captured.live, **self._runner.live}).curve

    def _plan(self, captured: Captured, pattern: Any) -> Plan:
        if self._terms.budget_bytes is None:
            program, held = self._derive(captured.program, self._terms)
            notes = (*notes_of(program), *self._notes())
            plan = make_plan(program, held=held, table=self._terms.table, notes=notes)
            return with_graph_memory(plan) if is_for_graph(plan) else plan
        live = {**captured.live, **self._runner.live}
        plan, _ = plan_for_budget(partial(self._derive, captured.program), self._terms, live)
        return replace(plan, notes=(*plan.notes, *self._notes()))

    def _notes(self) -> tuple[str, ...]:
        if self.optimizer is None or self.updates_inside:
            return ()
        name = type(self.optimizer).__name__
        reason = f"{name} is not known to treat parameters one by one"
        if self._clip_norm is not None:
            reason = "clipping needs the norm of all gradients"
        elif self._accumulate > 1:
            reason = "gradients are accumulated over calls"
        elif is_separable(self.optimizer):
            reason = f"{name} has step hooks"
        return (f"the optimizer steps after the backward pass, and gradients are held until then: {reason}",)

    def _derive(self, program: Program, terms: Terms) -> tuple[Program, dict[str, int]]:
        """The whole step as one Program, and what it holds throughout."""
        places = differentiable_outputs(program)
        pattern = tuple(place == 0 for place in places)
        program = derive(program, pattern, terms, is_strict=self._is_strict)
        uses = self._find_uses(program.gradients)
        at_end = None
        if self.optimizer is not None and not self.updates_inside:
            settings = (TRAINING, self._clip_norm, self._accumulate)
            at_end = AtEnd(step_afterwards(type(self.optimizer).__name__), settings)
        program = add_updates(program, lambda item: uses[item.input], at_end)
        held = held_bytes(self.model, program, self.optimizer)
        held["gradients"] = sum(
            item.nbytes for item in self.model.parameters() if item.requires_grad and self._is_added_up(item)
        )
        return program, {name: size for name, size in held.items() if size}

    def _is_added_up(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the parameter's gradient stays from call to call, as eager's does until somebody clears it."""
        return self._accumulate > 1 or (self.optimizer is not None and parameter not in self._updated)

    def _find_uses(self, gradients: Sequence[Gradient]) -> dict[Value, Use]:
        """What is done with the gradient of each input that has one."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        groups = self.optimizer.param_groups if self.updates_inside and self.optimizer is not None else []
        group_of = {id(item): index for index, group in enumerate(groups) for item in group["params"]}
        found: dict[Value, Use] = {}
        for gradient in gradients:
            if gradient.value is None:
                continue
            parameter = parameters.get(gradient.input.name)
            if parameter is None:
                raise CallError(f"{gradient.input} requires a gradient and is no parameter of the model; detach it")
            if id(parameter) in group_of:
                assert self.optimizer is not None
                index = group_of[id(parameter)]
                found[gradient.input] = Use(update_by(self.optimizer, index), True, True, (OPTIMIZER, index))
            else:
                is_added_up = self._is_added_up(parameter)
                found[gradient.input] = Use(DELIVER_GRADIENT, is_added_up, False, after=(is_added_up,))
        return found


def _has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return any(hooks)
