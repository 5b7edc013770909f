"""Workers that share parameters: `train_step(..., parallel=Mesh(hogwild=2))`, after Recht et al. 2011 (Hogwild!).

In: a model and an optimizer in each of several processes on one machine. Out: a step whose parameters, and whose
optimizer's state, lie in memory that all of them share. Each worker steps on its own batches, whenever it likes. Its
updates run inside its backward pass and take no lock, so an update may read what another is writing, and an addition
may be lost. Where each step touches little of the parameters, that is rare (docs/asynchronous.md).

Buffers, such as the running statistics of batch normalisation, are each worker's own, until `join_buffers`.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from undertow.api.training import TrainStep
from undertow.errors import CallError, RankLost
from undertow.ir import TensorType, format_bytes
from undertow.ir.cost import read_cost
from undertow.ops.updates import LATER_STEP, double_of, is_separable, step_alone
from undertow.ranks.mesh import Mesh
from undertow.ranks.ranks import Ranks, join
from undertow.ranks.shared_memory import ALIGNED_TO, SharedMemory
from undertow.ranks.team import Locking, Team, count_bytes
from undertow.version import __version__


@dataclass(frozen=True)
class Shared:
    """What the workers have in common, in bytes."""

    num_workers: int
    parameters_bytes: int
    state_bytes: int
    gradients_bytes: int
    has_one_gradient: bool

    def __str__(self) -> str:
        parts = f"{format_bytes(self.parameters_bytes)} of parameters, {format_bytes(self.state_bytes)} of the "
        text = f"{self.num_workers} workers share {parts}optimizer's state"
        if self.has_one_gradient:
            own = format_bytes(self.num_workers * self.gradients_bytes)
            return f"{text}, {format_bytes(self.gradients_bytes)} of gradients (one for each worker would take {own})"
        if self.gradients_bytes:
            own = format_bytes(self.num_workers * self.gradients_bytes)
            return (
                f"{text}; their own gradients take {own} (one for all would take {format_bytes(self.gradients_bytes)})"
            )
        return f"{text}; gradients are used up one by one"


def make_hogwild(
    make: Callable[..., TrainStep], mesh: Mesh, locking: str, has_one_gradient: bool, call: tuple[Any, Any]
) -> HogwildStep:
    """The step of this worker. All workers make theirs together; `call` are arguments that it is planned for."""
    try:
        kind = Locking(locking)
    except ValueError:
        known = ", ".join(Locking)
        raise CallError(f"locking is how updates are kept apart: one of {known}, got {locking!r}") from None
    ranks = join(mesh)
    with ranks.reporting("sharing parameters"):
        before = make()
        _check(before, has_one_gradient)
        ranks.agree(_describe(before, kind, has_one_gradient))
        assert before.optimizer is not None
        complete_state(before.optimizer)
        team, shared = _share(before, ranks, kind, has_one_gradient)
    step = HogwildStep(make(team=team), ranks, team, shared)
    with ranks.reporting("planning"), ranks.patient():
        step.prepare_together(*call)
    return step


def _check(step: TrainStep, has_one_gradient: bool) -> None:
    """Refuse what cannot be shared."""
    optimizer = step.optimizer
    if optimizer is None:
        raise CallError("hogwild shares what an optimizer updates; give optimizer= as well")
    if not is_separable(optimizer):
        raise CallError(
            f"hogwild updates parameters one by one, and {type(optimizer).__name__} is not known to do so; use SGD, "
            f"Adam, AdamW, Adagrad or SparseAdam"
        )
    for name, parameter in step.model.named_parameters():
        if parameter.device.type != "cpu":
            raise CallError(f"hogwild shares memory of the CPU, and parameter {name} is on {parameter.device}")
        if not TensorType.of(parameter).is_dense:
            raise CallError(f"parameter {name} has gaps in its memory, and hogwild shares memory; clone it")
    if has_one_gradient and step.training.accumulate == 1:
        raise CallError(
            "shared_gradients is about gradients that are added up, and with accumulate=1 each is used up at once; "
            "give accumulate= as well, or leave it out"
        )


def _describe(step: TrainStep, locking: Locking, has_one_gradient: bool) -> dict[str, Any]:
    """What has to be the same in all workers. Weights need not be: those of rank 0 are taken."""
    optimizer = step.optimizer
    assert optimizer is not None
    return {
        "the version of PyTorch": torch.__version__,
        "the version of Undertow": __version__,
        "the version of Python": platform.python_version(),
        "locking": [str(locking), has_one_gradient, step.training.accumulate],
        "the optimizer": [type(optimizer).__name__, repr(optimizer.state_dict()["param_groups"])],
        "the names and shapes of its parameters": [
            [name, list(item.shape), str(item.dtype), list(item.stride())] for name, item in _parameters(step)
        ],
    }


def _parameters(step: TrainStep) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The model's, and what else the optimizer has."""
    names = {item: name for name, item in step.model.named_parameters()}
    for number, parameter in enumerate(dict.fromkeys(chain(names, step.training.trained()))):
        yield names.get(parameter, f"parameter {number}"), parameter


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first steps would make, so that it can be shared: nothing seen yet, no step counted."""
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            twin = torch.nn.Parameter(torch.zeros_like(parameter))
            double = double_of(optimizer, index, [twin])
            gradient = torch.zeros_like(twin)
            is_adagrad = isinstance(optimizer, torch.optim.Adagrad)  # it has its state from the beginning
            if isinstance(optimizer, torch.optim.SparseAdam):
                gradient = gradient.to_sparse(1)
            if not is_adagrad and parameter.requires_grad:
                step_alone(double, 0, [twin], [gradient])
            known = optimizer.state[parameter]
            for name, item in double.state[twin].items():
                if item is not None and known.get(name) is None:
                    known[name] = torch.zeros_like(torch.as_tensor(item))
                elif isinstance(known.get(name), int):
                    known[name] = torch.tensor(known[name])


def _share(step: TrainStep, ranks: Ranks, locking: Locking, has_one_gradient: bool) -> tuple[Team, Shared]:
    """Put parameters, state and perhaps gradients where all workers see them; the content is rank 0's."""
    optimizer = step.optimizer
    assert optimizer is not None
    parameters = [item for _, item in _parameters(step)]
    trained = [item for item in step.training.trained() if item.requires_grad]
    states = [(optimizer.state[item], name) for item in trained for name in sorted(optimizer.state[item])]
    kept = [(entry, name) for entry, name in states if isinstance(entry[name], torch.Tensor)]
    sums = [torch.zeros_like(item) for item in trained] if has_one_gradient else []
    tensors = [*(item.detach() for item in parameters), *(entry[name] for entry, name in kept), *sums]
    offsets, end = [], count_bytes(ranks.size)
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNED_TO) * ALIGNED_TO
    memory = SharedMemory(ranks, end)
    views = [memory.tensor(tensor, offset) for tensor, offset in zip(tensors, offsets, strict=True)]
    if ranks.rank == 0:
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
    team = Team(memory, ranks.rank, ranks.size, locking)
    ranks.gather_texts("here")  # nobody reads before the content is there
    found = iter(views)
    for parameter in parameters:
        parameter.data = next(found)
    for entry, name in kept:
        entry[name] = next(found)
    for parameter in trained if has_one_gradient else ():
        parameter.grad = next(found)
    gradients_bytes = 0 if step.training.updates_inside else sum(item.nbytes for item in trained)
    state_bytes = sum(entry[name].nbytes for entry, name in kept)
    shared = Shared(ranks.size, sum(item.nbytes for item in parameters), state_bytes, gradients_bytes, has_one_gradient)
    return team, shared


class HogwildStep(TrainStep):
    """A training step of one of several workers that share parameters."""

    def __init__(self, step: TrainStep, ranks: Ranks, team: Team, shared: Shared) -> None:
        super().__init__(step.request)
        self.ranks, self.team, self.shared = ranks, team, shared
        self._num_calls = 0
        later = self.training.live[LATER_STEP.name]
        later.locked = team.lock_of_all
        if shared.has_one_gradient:
            later.count_call, later.keeps_sums = team.count_call, True

    def prepare_together(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan the first step: rank 0 measures, the others take its costs and plan for themselves."""
        if self.ranks.rank:
            found = json.loads(self.ranks.send_bytes(None))
            if "error" in found:
                raise RankLost(f"rank 0 could not plan the step: {found['error']}", 0)
            costs = {str(key): read_cost(cost) for key, cost in found["costs"].items()}
            self.request.terms.table.update(costs)
            self.prepare(args, kwargs)
            return
        try:
            self.prepare(args, kwargs)
        except Exception as error:
            self.ranks.send_bytes(json.dumps({"error": str(error)}).encode())
            raise
        self.ranks.send_bytes(json.dumps({"costs": self.costs}).encode())

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        check = self.ranks.watch.check
        check()
        self.team.take_turn(check)
        self._num_calls += 1
        with self.ranks.reporting(f"call {self._num_calls} of the step"):
            return super().__call__(*args, **kwargs)

    def leave(self) -> None:
        """With `locking="step"`: until the next call of this step, the other workers do not wait for it."""
        self.team.leave()

    def join_buffers(self) -> None:
        """Give all workers the mean of their buffers, and of what counts the most; all of them call this.

        The running variance of batch normalisation is then the mean of the workers' variances, without the variance
        between their means.
        """
        self.leave()
        buffers = list(self.model.buffers())
        for kind in dict.fromkeys(item.dtype for item in buffers):
            ours = [item for item in buffers if item.dtype is kind]
            flat = torch.cat([item.reshape(-1) for item in ours])
            found = [torch.empty_like(flat) for _ in range(self.ranks.size)]
            self.ranks.gather(flat, found)
            together = torch.stack(found)
            joined = together.mean(0) if kind.is_floating_point else together.amax(0)
            for item, part in zip(ours, joined.split([item.numel() for item in ours]), strict=True):
                item.copy_(part.view(item.shape))
        # Other processes wrote into the parameters, which no version of this process counts.
        torch.autograd.graph.increment_version(list(self.model.parameters()))
