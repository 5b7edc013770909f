"""`train_step`: forward pass, loss, backward pass and update as one planned call.

The step owns the gradients. Each is made in the backward pass and freed when its parameter has been updated. The update
runs as soon as the gradient is complete and nothing reads the parameter any more, with the bits of a later step. Where
that is not possible (see `passes/training.py`), gradients are held and the optimizer steps at the end; the plan counts
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any

import torch

from undertow.api.calls import check_call, check_clip_norm, check_training
from undertow.api.terms import parse_terms
from undertow.calls.runner import Runner
from undertow.calls.smaller_batch import offering_smaller_batch
from undertow.errors import CallError
from undertow.ir import Node, Phase, Plan
from undertow.ir.saving import SavedPlan, read_plan
from undertow.ir.structure import tensors_in
from undertow.ops.projection import Masks
from undertow.ops.updates import LATER_STEP
from undertow.passes.shards import ShardPart
from undertow.passes.training import Training
from undertow.pipeline import Request, derive, find_planner, record
from undertow.planner.curve import Curve
from undertow.ranks.mesh import Mesh
from undertow.record.losses import find_loss, is_scalar_tensor
from undertow.terms import Terms

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
    saved_plan: str | Path | None = None,
    gradient_norm: bool = False,
    masks: Masks | None = None,
    shards: int | None = None,
    seed: int = 0,
    loss_is_sum: bool = False,
    parallel: Mesh | None = None,
) -> TrainStep:
    """A callable that trains: `step(*args, *targets, **kwargs)` returns the loss, and the parameters are updated.

    The loss is `loss(model(*args, **kwargs), *targets)`. Where `loss` is None it is the model's own: the scalar that it
    returns alone, as `.loss`, or first in a tuple. `clip_norm` clips the gradients to that norm, all together.
    `accumulate` is the number of calls from one update to the next, which uses the sum of their gradients.
    `numerics` and `allow_other_bits` are as in `plan`; the loss also runs in bfloat16, as in autocast. `costs` may be
    the `costs` of another step: the same costs give the same plan. `saved_plan` is a file that `save_plan` wrote for
    the same step: it is run instead of a new plan. With `gradient_norm` the step finds the norm of all gradients, and
    has it as `.gradient_norm`; with `clip_norm` it does so anyway. `masks` says which weights are kept: the others are
    0 after every step. `shards` divides each batch into so many parts, which are computed alone (see
    `api/sharding.py`); their generators follow from `seed`. The loss of a shard is a mean over its examples, or with
    `loss_is_sum` a sum. `parallel` divides the shards over the processes of a job, which changes no bit; every process
    calls the step with the whole batch.
    """
    check_call(model, args, kwargs)
    check_training(model, optimizer, loss, targets)
    check_clip_norm(clip_norm)
    if not isinstance(accumulate, int) or accumulate < 1:
        raise CallError(f"accumulate must be a whole number of at least 1, got {accumulate!r}")
    if optimizer is None and (clip_norm is not None or accumulate > 1):
        raise CallError("clip_norm and accumulate say how the optimizer steps; give optimizer= as well")
    terms = parse_terms(
        model,
        budget=budget,
        optimizer=optimizer,
        costs=costs,
        time_limit_s=time_limit_s,
        numerics=numerics,
        allow_other_bits=allow_other_bits,
    )
    if gradient_norm and optimizer is None:
        raise CallError("gradient_norm is of a step that updates; give optimizer= as well")
    if masks is not None and optimizer is None:
        raise CallError("masks are held by a step that updates; give optimizer= as well")
    settings = (loss, optimizer, terms, clip_norm, accumulate, strict, gradient_norm, masks)
    make = partial(make_step, model, len(args), *settings)
    call, saved = ((*args, *targets), kwargs or {}), None if saved_plan is None else read_plan(saved_plan)
    if parallel is not None and shards is None:
        raise CallError(f"parallel={parallel} divides the shards of a batch over ranks; give shards= as well")
    if shards is not None:
        from undertow.api.sharding import make_sharded  # here, because a step in shards is a TrainStep

        sharded = make_sharded(make, shards, seed, loss_is_sum, parallel)
        sharded.prepare(*call, saved)
        return sharded
    step = make()
    with offering_smaller_batch(step.request, *call):
        step.prepare(*call, saved)
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
    has_norm: bool = False,
    masks: Masks | None = None,
    shards: ShardPart | None = None,
) -> TrainStep:
    """A step that has not seen its arguments yet; the first `num_args` of them are the model's."""
    training = Training(model, optimizer, clip_norm, accumulate, has_norm, masks, shards)
    return TrainStep(Request(model, partial(_run_model, model, num_args, loss), terms, training, is_strict))


def _run_model(model: torch.nn.Module, num_args: int, loss: Loss | None, *values: Any, **kwargs: Any) -> Any:
    outputs = model(*values[:num_args], **kwargs)
    if loss is not None:
        return loss(outputs, *values[num_args:])
    found = find_loss(outputs, is_scalar_tensor)
    if found is None:
        raise CallError(
            f"the model returns {_describe(outputs)}, and no loss of its own: a scalar that depends on a parameter, "
            f"alone, as .loss, or first in a tuple without a second one; give loss=, a function of the model's output "
            f"and the targets"
        )
    return found


def _describe(outputs: Any) -> str:
    if isinstance(outputs, torch.Tensor):
        return f"a tensor of shape {list(outputs.shape)}"
    shapes = ", ".join(str(list(tensor.shape)) for _, tensor in tensors_in(outputs))
    return f"a {type(outputs).__name__} with tensors of shapes {shapes}" if shapes else f"a {type(outputs).__name__}"


class TrainStep:
    """A planned training step of one model with one optimizer; without one, gradients are left to their parameters."""

    def __init__(self, request: Request) -> None:
        assert request.training is not None
        self.request, self.training = request, request.training
        self.model, self.optimizer = request.model, request.training.optimizer
        self.runner = Runner(request)
        self._bound = self._list_parameters()
        self._updated = set(self.training.trained())

    @property
    def plan(self) -> Plan:
        """The plan of the step that was last prepared or run; a call that was refused leaves it as it was."""
        return self.runner.plan

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of the step that was last prepared or run."""
        return self.plan.peak_bytes

    @property
    def gradient_norm(self) -> float | None:
        """The norm of all gradients at the last update, before clipping; None unless it was asked for."""
        norm = self.training.gradient_norm
        return None if norm is None else float(norm)

    @property
    def costs(self) -> dict[str, tuple[int, int]]:
        """What the plans were made from: nanoseconds and bytes of workspace of each measured operation."""
        return {key: (cost.duration_ns, cost.workspace_bytes) for key, cost in self.request.terms.table.items()}

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: SavedPlan | None = None) -> None:
        """Capture and plan the step for such arguments, or take the plan that was saved; runs nothing."""
        with torch.enable_grad():
            self.runner.prepare(args, kwargs, saved)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._follow_parameters()
        self._check_untouched()
        with torch.enable_grad():
            loss = self.runner(*args, **kwargs)
        if self.optimizer is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedules ask for it
        return loss

    def start_at(self, num_calls: int) -> None:
        """Go on as if the step had been called so often; for a run that is resumed."""
        if self.optimizer is not None:
            self.training.live[LATER_STEP.name].num_calls = num_calls
        if self.training.shards is not None:
            self.training.shards.shards.num_calls = num_calls

    def _list_parameters(self) -> list[torch.nn.Parameter]:
        return [*self.runner.parameters(), *self.training.trained()]

    def _follow_parameters(self) -> None:
        """Plans name the parameters that they update: if model or optimizer have other ones now, plan again."""
        found = self._list_parameters()
        if len(found) != len(self._bound) or not all(map(is_, found, self._bound)):
            self.runner.forget()
            self._bound, self._updated = found, set(self.training.trained())

    def _check_untouched(self) -> None:
        """Refuse what the step would silently ignore: hooks, and gradients that other code left."""
        if self.training.updates_inside and self.training.has_step_hooks:
            raise CallError(
                "the optimizer got a step hook after train_step was made, and its updates run inside the backward "
                "pass; register the hook first, and the optimizer steps afterwards"
            )
        for parameter in self.runner.parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise CallError(
                    f"parameter {self._name_of(parameter)} has a gradient hook, which train_step does not call; remove "
                    f"it, or train with ut.plan, loss.backward() and optimizer.step()"
                )
            if self.training.updates_inside and parameter.grad is not None and parameter in self._updated:
                raise CallError(
                    f"parameter {self._name_of(parameter)} has a .grad from elsewhere, to which this step would not "
                    f"add; call zero_grad() first, or accumulate with train_step(accumulate=)"
                )

    def _name_of(self, parameter: torch.nn.Parameter) -> str:
        return next(name for name, item in self.model.named_parameters() if item is parameter)

    def release(self) -> None:
        """Free what the step holds between calls: its arena, until the next call, and its CUDA graph, which is captured
        again after a few more calls.
        """
        self.runner.release_memory()

    def release_arena(self) -> None:
        """Free the arena until the next call. A measurement does not see that memory is freed which was allocated
        before it began.
        """
        self.request.memory.release()

    def walk(self, *args: Any, **kwargs: Any) -> Iterator[tuple[Node, list[Any]]]:
        """Run a step one operation at a time, giving each with its outputs; no update is made."""
        with torch.enable_grad():
            yield from self.runner.walk(args, kwargs, lambda node: node.phase is not Phase.UPDATE)

    def drop_gradients(self) -> None:
        """Drop gradients: without an optimizer they stay with their parameters, and the next call would add to them."""
        if self.optimizer is None:
            self.model.zero_grad(set_to_none=True)

    def persistent_tensors(self) -> list[torch.Tensor]:
        """What the step holds between calls: parameters, buffers, gradients, the optimizer's state, its arena."""
        entries = self.optimizer.state.values() if self.optimizer is not None else ()
        state = [item for entry in entries for item in entry.values()]
        found = [*self.model.parameters(), *self.model.buffers(), *self.runner.persistent_tensors()]
        found += [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        found += [*self.training.norm_tensors(), *self.training.mask_tensors()]
        return found + [item for item in state if isinstance(item, torch.Tensor)]

    def find_curve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Curve:
        """The time/memory curve of the step for such arguments; runs nothing of the model."""
        with torch.enable_grad():
            captured = record(self.request, args, kwargs)
        program = derive(self.request, captured.program, ())
        return find_planner(self.request, program, {**captured.live, **self.request.live}).curve
