"""Some epochs of planned steps on a network that is being shrunk, towards its labels and towards the dense network.

In: what is trained, for how long, and what happens between steps. Out: the same network, trained. The loss is the run's
own, mixed with the distance from the dense network's outputs where these are classes (distillation: Hinton, Vinyals &
Dean 2015). The learning rate falls along a cosine. All draws follow from a number given for these epochs alone, so they
can be repeated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from undertow.api.training import TrainStep, train_step
from undertow.errors import NotFinite
from undertow.ops.projection import Masks
from undertow.shrink.norms import folded_norms
from undertow.train.batches import Batch
from undertow.train.devices import NUM_AHEAD, Arriving, Batches
from undertow.train.evaluation import Evaluator
from undertow.train.feeding import Feed
from undertow.train.objective import Objective
from undertow.train.optimizing import on_gpu, set_learning_rates

_TEMPERATURE = 3.0
_LAST_SHARE = 0.01  # of the learning rate, at the end

Between = Callable[[float, torch.optim.Optimizer], None]  # gets the share of the steps that were done


class Stopped(BaseException):
    """A signal asked for the end; nothing of these epochs is kept. Like KeyboardInterrupt it is no error."""


@dataclass(eq=False)
class Trainer:
    """What all epochs of a shrinking have in common. `should_stop` gives a reason, or nothing."""

    objective: Objective
    feed: Feed
    device: torch.device
    teacher: Evaluator | None
    distill: float = 0.5
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
    numerics: str = "exact"
    budget: int | str | None = None
    should_stop: Callable[[], str] = lambda: ""
    costs: dict[str, tuple[int, int]] = field(default_factory=dict)
    _last: tuple[nn.Module, torch.optim.Optimizer, TrainStep] | None = None

    def train(
        self,
        network: nn.Module,
        parameters: Sequence[nn.Parameter],
        *,
        first_epoch: int,
        num_epochs: int,
        lr: float,
        masks: Masks | None = None,
        between: Between | None = None,
    ) -> float:
        """Train; returns the mean loss of the last epoch. `between` runs before each step but the first."""
        if not parameters or not num_epochs:
            return 0.0
        torch.manual_seed(first_epoch)  # of dropout and the like
        self._train_mode(network)
        optimizer, step = self._find_step(network, parameters, lr, masks)
        num_steps, done, total = max(len(self.feed) * num_epochs, 1), 0, 0.0
        arriving: deque[Arriving] = deque()
        for epoch in range(first_epoch, first_epoch + num_epochs):
            total, num = 0.0, 0
            for batch in self._batches(epoch):
                if reason := self.should_stop():
                    raise Stopped(reason)
                if between is not None and done:
                    between(done / num_steps, optimizer)
                falling = 0.5 + 0.5 * math.cos(math.pi * min(done / num_steps, 1.0))
                rate = lr * (_LAST_SHARE + (1 - _LAST_SHARE) * falling)
                set_learning_rates(optimizer, [rate] * len(optimizer.param_groups))
                if step is None:
                    step = self._plan(network, optimizer, batch, masks)
                    self._last = network, optimizer, step
                arriving.append(Arriving([step(*batch.call, **batch.kwargs)]))
                done, num = done + 1, num + 1
                if len(arriving) > NUM_AHEAD[self.device.type]:
                    total += _read_loss(arriving.popleft())
            total += sum(map(_read_loss, arriving))
            arriving.clear()
            total /= max(num, 1)
        return total

    def _find_step(
        self, network: nn.Module, parameters: Sequence[nn.Parameter], lr: float, masks: Masks | None
    ) -> tuple[torch.optim.Optimizer, TrainStep | None]:
        """The optimizer as it is when new, and the step that was planned last if it is of the same network."""
        if self._last is not None:
            known, optimizer, step = self._last
            if known is network and step.training.masks is masks:
                optimizer.state.clear()
                return optimizer, step
        options: dict[str, Any] = {"lr": lr}
        if self.device.type == "cuda":
            options = on_gpu(self.optimizer, options) | {"lr": torch.tensor(lr, device=self.device)}
        return self.optimizer(parameters, **options), None

    def _plan(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, masks: Masks | None
    ) -> TrainStep:
        step = train_step(
            network,
            batch.args,
            batch.kwargs,
            targets=batch.targets,
            loss=self._loss,
            optimizer=optimizer,
            budget=self.budget,
            numerics=self.numerics,
            costs=self.costs or "measured",
            masks=masks,
        )
        self.costs |= step.costs
        return step

    def _train_mode(self, network: nn.Module) -> None:
        network.train()
        for norm in folded_norms(network):
            norm.eval()

    def _batches(self, epoch: int) -> Iterator[Batch]:
        """Batches; the teacher's outputs are the last of their targets."""
        for batch in Batches(self.feed.batches(epoch, 0), self.objective.read, self.device):
            if self.teacher is None or not self.distill:
                yield batch
                continue
            outputs = self.teacher.predict(*batch.args, **batch.kwargs)
            yield Batch(batch.args, batch.kwargs, (*batch.targets, outputs))

    def _loss(self, outputs: Any, *targets: Any) -> Tensor:
        if self.teacher is None or not self.distill:
            return self.objective.training_loss(outputs, *targets)
        *labels, taught = targets
        own = self.objective.training_loss(outputs, *labels)
        return (1 - self.distill) * own + self.distill * _distance(outputs, taught, self.objective.is_sequence)


def _read_loss(arriving: Arriving) -> float:
    (loss,) = arriving.read()
    if not math.isfinite(loss):
        raise NotFinite(f"the loss is {loss} while the network is retrained; lower the learning rate (lr)")
    return loss


def _distance(outputs: Tensor, taught: Tensor, is_sequence: bool) -> Tensor:
    """T^2 times the divergence of softened classes."""
    dim = -1 if is_sequence or outputs.dim() < 2 else 1
    found = functional.log_softmax(outputs / _TEMPERATURE, dim)
    wanted = functional.log_softmax(taught / _TEMPERATURE, dim)
    return (wanted.exp() * (wanted - found)).sum(dim).mean() * _TEMPERATURE**2
