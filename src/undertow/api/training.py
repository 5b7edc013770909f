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
from undertow.ops.divided_parameters import DividedParameter
from undertow.ops.locks import HasLocks
from undertow.ops.own_parts import OwnParts
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
    weights: tuple[float, ...] | None = None,
    shard_state: bool = False,
    late_parameters: bool = False,
    schedule: str = "1f1b",
    locking: str = "none",
    shared_gradients: bool = False,
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
    calls the step with the whole batch. `weights` says how fast the ranks are: `(2, 1, 1)` gives the first about twice
    as many shards, never larger ones, so it changes no bit. With `shard_state` each rank updates a part of the
    parameters and keeps the optimizer's state of that part alone, which changes no bit either; all of it is
    `step.optimizer_state()`. With `late_parameters` as well, updated parameters may still be on their way when a call
    returns. The next call waits for each where it is first read; before anything else reads them, call `step.settle()`.
    `parallel=Mesh(stages=2)` divides the layers as well; `schedule` says in which order the stages run the shards:
    "gpipe", "1f1b", "interleaved" or "zero-bubble". Then a rank holds its own layers between calls, and
    `step.settle()`, which all ranks call, brings all of them to all ranks.

    With `parallel=Mesh(hogwild=2)` the processes are workers of one machine that share parameters and the optimizer's
    state, and each calls the step with batches of its own (see `api/hogwild.py`): no bits are promised. `locking` is
    "none", "one" lock for all updates, one for each "parameter", or "step", where nobody begins a step before the
    others have begun theirs. With `shared_gradients` the gradients that `accumulate` adds up are shared as well.
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
    if parallel is not None and parallel.hogwild > 1:
        if shards is not None:
            raise CallError(f"parallel={parallel} and shards={shards}: workers of hogwild have batches of their own")
        if saved_plan is not None or masks is not None:
            raise CallError(f"parallel={parallel} takes neither saved_plan= nor masks=; leave them out")
        from undertow.api.hogwild import make_hogwild  # here, because a step of a worker is a TrainStep

        return make_hogwild(make, parallel, locking, shared_gradients, call)
    if locking != "none" or shared_gradients:
        raise CallError("locking and shared_gradients are about workers that share parameters; give parallel= as well")
    if parallel is not None and parallel.num_ranks > 1 and shards is None:
        raise CallError(f"parallel={parallel} divides the shards of a batch over ranks; give shards= as well")
    if weights is not None and parallel is None:
        raise CallError("weights says how many shards each rank takes; give parallel= as well")
    if late_parameters and not shard_state:
        raise CallError("late_parameters is about parameters that other ranks update; give shard_state=True as well")
    if shard_state and parallel is None:
        raise CallError("shard_state divides the optimizer's state over ranks; give parallel= as well")
    if parallel is not None and parallel.stages > 1:
        if weights is not None or shard_state:
            raise CallError("weights and shard_state are for ranks that have all layers; leave them out with stages")
        if any(parameter.is_cuda for parameter in model.parameters()):
            raise CallError(
                "stages send from memory of the CPU, and the model is on a GPU; move it, or use data= alone"
            )
        from undertow.api.staged_step import make_staged  # here, because such a step is a TrainStep

        staged = make_staged(make, shards, seed, loss_is_sum, parallel, schedule)
        staged.prepare(*call, saved)
        return staged
    if shards is not None:
        from undertow.api.sharding import make_sharded  # here, because a step in shards is a TrainStep

        own = OwnParts(model, late_parameters) if shard_state else None
        sharded = make_sharded(make, shards, seed, loss_is_sum, parallel, weights, own)
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
    team: HasLocks | None = None,
) -> TrainStep:
    """A step that has not seen its arguments yet; the first `num_args` of them are the model's."""
    training = Training(model, optimizer, clip_norm, accumulate, has_norm, masks, shards, team)
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
        norm = self.norm
        return None if norm is None else float(norm)

    @property
    def norm(self) -> torch.Tensor | None:
        """The same as a tensor, which a GPU need not be waited for."""
        return self.training.gradient_norm

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
        is_never_stepped = self.training.updates_inside or self.training.own is not None
        if is_never_stepped and self.training.has_step_hooks:
            raise CallError(
                "the optimizer got a step hook after train_step was made, and its own step() is not called, because "
                "parameters are updated one by one; register the hook first"
            )
        for parameter in self.runner.parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise CallError(
                    f"parameter {self._name_of(parameter)} has a gradient hook, which train_step does not call; remove "
                    f"it, or train with ut.plan, loss.backward() and optimizer.step()"
                )
            if is_never_stepped and parameter.grad is not None and parameter in self._updated:
                raise CallError(
                    f"parameter {self._name_of(parameter)} has a .grad from elsewhere, to which this step would not "
                    f"add; call zero_grad() first, or accumulate with train_step(accumulate=)"
                )

    def _name_of(self, parameter: torch.nn.Parameter) -> str:
        return next(name for name, item in self.model.named_parameters() if item is parameter)

    def settle(self) -> None:
        """Make all parameters whole, until the next call. With `shard_state` all ranks call it.

        A call leaves some on their way with `late_parameters`, and some divided where its budget has no room for them.
        """
        if self.training.own is not None:
            self.training.own.settle()

    def divide_parameters(self) -> None:
        """Leave each rank its part of the parameters that its plan divides, as every call does when it begins."""

    def optimizer_state(self) -> dict[str, Any]:
        """The whole state of the optimizer, as its `state_dict()`. Where ranks keep parts of it, all call this."""
        return self._given_optimizer().state_dict()

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Take a whole state, of a step on any number of ranks; a rank that keeps a part of it cuts that out."""
        self._given_optimizer().load_state_dict(dict(state))

    def _given_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise CallError("the step has no optimizer; give optimizer= to train_step")
        return self.optimizer

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

    def decide_together(self, answer: bool) -> bool:
        """One answer for all ranks of the step: that of rank 0."""
        return answer

    def drop_gradients(self) -> None:
        """Drop gradients: without an optimizer they stay with their parameters, and the next call would add to them."""
        if self.optimizer is None:
            self.model.zero_grad(set_to_none=True)

    def persistent_tensors(self) -> list[torch.Tensor]:
        """What the step holds between calls: parameters, buffers, gradients, the optimizer's state, its arena."""
        entries = self.optimizer.state.values() if self.optimizer is not None else ()
        state = [item for entry in entries for item in entry.values()]
        whole = [item for item in self.model.parameters() if not isinstance(item, DividedParameter)]
        found = [*whole, *self.model.buffers(), *self.runner.persistent_tensors()]
        found += [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        found += [*self.training.norm_tensors(), *self.training.mask_tensors(), *self.training.own_tensors()]
        return found + [item for item in state if isinstance(item, torch.Tensor)]

    def find_curve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Curve:
        """The time/memory curve of the step for such arguments; runs nothing of the model."""
        with torch.enable_grad():
            captured = record(self.request, args, kwargs)
        program = derive(self.request, captured.program, ())
        return find_planner(self.request, program, {**captured.live, **self.request.live}).curve
