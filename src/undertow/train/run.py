"""The training loop: batches in, a recorded and resumable run out.

A step is a planned `train_step`. Nothing that happens between two checkpoints is kept elsewhere, so a run that is
killed anywhere and goes on from its last checkpoint does exactly what it would have done.
"""

from __future__ import annotations

import math
import platform
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from undertow.api.budgets import parse_budget
from undertow.api.reports import process_peak_bytes
from undertow.api.training import TrainStep, train_step
from undertow.errors import DataError
from undertow.runtime.measure import measure_call
from undertow.train.checkpoint import Checkpoint, Place, collect_tensors, restore, save_checkpoint
from undertow.train.config import TrainConfig
from undertow.train.diagnosis import check_first_weights, explain_not_finite, has_finite_weights
from undertow.train.evaluation import Evaluator, check_labels
from undertow.train.feeding import Feed
from undertow.train.folder import RunFolder
from undertow.train.interrupts import REASONS, Interrupts
from undertow.train.losses import make_loss
from undertow.train.optimizing import learning_rate, make_optimizer, set_learning_rate
from undertow.train.progress import Display, StepView
from undertow.train.records import Records
from undertow.train.weights import hash_tensors
from undertow.train.workload import Workload, check_same_data, check_workload

FINISHED, EARLY = "finished", "no lower test loss"
MEASURED_STEP = 2  # the first makes the optimizer's state


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    place: Place
    budget_bytes: int | None
    weights_sha256: str
    folder: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        place = self.place
        return {
            "final_loss": place.last_loss,
            "test_loss": place.test_loss,
            "test_accuracy": place.test_accuracy,
            "weights_sha256": self.weights_sha256,
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": place.predicted_peak_bytes,
            "measured_peak_bytes": place.measured_peak_bytes,
            "steps": place.step,
            "epochs": place.epoch,
            "seconds": place.seconds,
            "stopped": place.stopped,
            "folder": self.folder,
        }

    def __str__(self) -> str:
        place = self.place
        accuracy = "" if place.test_accuracy is None else f", test accuracy {place.test_accuracy:.2%}"
        loss = "none" if place.last_loss is None else f"{place.last_loss:.4f}"
        lines = [f"{place.stopped} after {place.step} steps in {place.seconds:.1f} s: loss {loss}{accuracy}"]
        if place.measured_peak_bytes is not None:
            budget = "" if self.budget_bytes is None else f", budget {self.budget_bytes:,}"
            lines.append(
                f"peak memory of a step: {place.predicted_peak_bytes:,} bytes predicted, "
                f"{place.measured_peak_bytes:,} measured{budget}"
            )
        return "\n".join([*lines, f"weights sha256 {self.weights_sha256}", f"run {self.folder}"])


class Run:
    """One run, from its first or its last saved step on."""

    def __init__(self, config: TrainConfig, workload: Workload, folder: RunFolder, display: Display) -> None:
        self.config, self.workload, self.folder, self.display = config, workload, folder, display
        self.optimizer = make_optimizer(config, workload.model)
        self.budget_bytes = None if config.budget is None else parse_budget(config.budget)
        self.feed = Feed(workload.train_loader, config.seed)
        self.test_feed = Feed(workload.test_loader, config.seed)
        self.evaluator = Evaluator(workload.model, config.loss, workload.is_sequence)
        self.place = Place()
        self.step: TrainStep | None = None
        self._costs: dict[str, tuple[int, int]] = {}
        self._about: dict[str, Any] = {
            "config": config.to_dict(),
            "data": workload.describe(),
            "environment": describe_environment(),
        }
        self._records: Records | None = None
        self._num_classes: int | None = None  # None: targets are no labels

    @cached_property
    def batches_per_epoch(self) -> int:
        """Those that fill an accumulation; the rest of an epoch is left out."""
        return len(self.feed) - len(self.feed) % self.config.accumulate

    @property
    def num_steps(self) -> int:
        """Updates of the whole run."""
        wanted = self.batches_per_epoch // self.config.accumulate * self.config.epochs
        return wanted if self.config.max_steps is None else min(wanted, self.config.max_steps)

    def resume(self) -> None:
        """Take up the last checkpoint; a run that had ended goes on if it was given more epochs or patience."""
        checkpoint = self.folder.read_checkpoint()
        check_same_data(checkpoint.about.get("data"), self._about["data"], str(self.folder.path))
        self.restore(checkpoint)
        if self.place.stopped in REASONS.values() or not self._is_over():
            self.place.stopped = ""
        self.display.say(f"going on after step {self.place.step} of {self.num_steps}")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put everything back as it was at a checkpoint."""
        restore(checkpoint, self.workload.model, self.optimizer, str(self.folder.checkpoint_path))
        self.place = replace(checkpoint.place)
        self._costs = checkpoint.costs
        self._about = {**checkpoint.about, "config": self.config.to_dict()}

    def prepare(self) -> None:
        """Check model and data, and plan the step: whatever can be refused is refused before there is a folder."""
        check_first_weights(self.workload.model)
        if not self.batches_per_epoch:
            raise DataError(f"an epoch has {len(self.feed)} batches, an update takes {self.config.accumulate}")
        batch = next(self.test_feed.batches(0, 0), None)
        if batch is None:
            raise DataError("there are no test examples")
        self._num_classes = check_workload(self.workload, self.evaluator, batch)
        if not self.place.stopped:
            self._plan(*next(self.feed.batches(self.place.epoch, 0)))

    def train(self) -> TrainResult:
        """Train to the end, or until a signal."""
        self._records = Records(self.folder, self.place.step, self.place.test_step == self.place.step)
        try:
            with Interrupts() as interrupts:
                if not self.folder.checkpoint_path.exists():
                    self.save()
                while not self.place.stopped:
                    self._advance(interrupts)
                    self.save()
        finally:
            self._records.close()
            self.display.close()
        weights = hash_tensors(self.workload.model.state_dict())
        return TrainResult(self.place, self.budget_bytes, weights, str(self.folder.path))

    def _advance(self, interrupts: Interrupts) -> None:
        """To the end of an epoch, past its evaluation, or to the end of the run."""
        place = self.place
        if place.batch == self.batches_per_epoch:
            self._evaluate()
            self._end_epoch()
        elif self._is_over():
            if place.batch:
                self._evaluate()
            place.stopped = EARLY if self._is_stuck() else FINISHED
        else:
            self._train_epoch(interrupts)
        place.stopped = place.stopped or interrupts.asked

    def _is_stuck(self) -> bool:
        return self.config.patience is not None and self.place.num_worse_epochs >= self.config.patience

    def _is_over(self) -> bool:
        return self.place.step >= self.num_steps or (self.place.batch == 0 and self._is_stuck())

    def _train_epoch(self, interrupts: Interrupts) -> None:
        """Steps up to the end of the epoch, of the run, or a signal."""
        place, config = self.place, self.config
        last_save = place.step
        group: list[tuple[torch.Tensor, torch.Tensor]] = []
        for batch in self.feed.batches(place.epoch, place.batch):
            group.append(batch)
            if len(group) < config.accumulate:
                continue
            self._update(group)
            group = []
            if interrupts.asked or place.step >= self.num_steps or place.batch == self.batches_per_epoch:
                return
            if config.save_every is not None and place.step - last_save >= config.save_every:
                self.save()
                last_save = place.step
        raise DataError(f"the training loader ended after {place.batch} batches of {len(self.feed)}")

    def _update(self, group: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        start = time.perf_counter()
        loss = self.run_batches(group)
        place = self.place
        place.seconds += time.perf_counter() - start
        if not math.isfinite(loss):
            raise explain_not_finite(self, place.step, f"the loss of step {place.step} is")
        assert self._records is not None
        rate = self.optimizer.param_groups[0]["lr"]
        self._records.add(place.step, "train", loss=loss, lr=rate, epoch=place.epoch)
        num_examples = sum(len(targets) for _, targets in group)
        peak = place.measured_peak_bytes or place.predicted_peak_bytes
        view = (place.step, self.num_steps, place.epoch, self.config.epochs, loss, num_examples)
        self.display.show(StepView(*view, peak, self.budget_bytes))

    def run_batches(self, group: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """One update from the batches of an accumulation; the mean of their losses."""
        place = self.place
        set_learning_rate(self.optimizer, learning_rate(self.config, place.step, self.num_steps))
        # Losses are divided for the update already: their sum is their mean.
        loss = sum(self._run_batch(inputs, targets) for inputs, targets in group)
        place.step += 1
        place.batch += len(group)
        place.loss_sum += loss
        place.last_loss = loss
        return loss

    def _run_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        step, place = self.step, self.place
        assert step is not None
        if self._num_classes is not None:
            check_labels(targets, self._num_classes, f"training data, epoch {place.epoch + 1}, step {place.step + 1}")
        if place.step + 1 == MEASURED_STEP or place.measured_peak_bytes is None and place.step >= MEASURED_STEP:
            losses: list[torch.Tensor] = []
            held = step.persistent_tensors()
            measured = measure_call(lambda: losses.append(step(inputs, targets)), held, (inputs, targets))
            place.measured_peak_bytes = max(measured.peak_bytes, place.measured_peak_bytes or 0)
            place.measured_step_s = measured.step_s
            return float(losses[0])
        return float(step(inputs, targets))

    def _plan(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        start = time.perf_counter()
        config = self.config
        self.workload.model.train()
        self.step = train_step(
            self.workload.model,
            (inputs,),
            targets=(targets,),
            loss=make_loss(config.loss, self.workload.is_sequence, config.accumulate),
            optimizer=self.optimizer,
            budget=self.budget_bytes,
            clip_norm=config.clip_norm,
            accumulate=config.accumulate,
            numerics=config.numerics,
            allow_other_bits=config.allow_other_bits,
            costs=self._costs or "measured",
        )
        self._costs = self.step.costs
        self.place.predicted_peak_bytes = self.step.plan.peak_bytes
        self._about["batch"] = [[list(tensor.shape), str(tensor.dtype)] for tensor in (inputs, targets)]
        self.display.say(f"planned the step in {time.perf_counter() - start:.1f} s")

    def _evaluate(self) -> None:
        place = self.place
        start = time.perf_counter()
        found = self.evaluator.evaluate(self.test_feed.batches(0, 0))
        place.seconds += time.perf_counter() - start
        place.test_step, place.test_loss, place.test_accuracy = place.step, found.loss, found.accuracy
        mean = place.loss_sum * self.config.accumulate / place.batch
        assert self._records is not None
        self._records.add(
            place.step, "test", loss=found.loss, accuracy=found.accuracy, train_loss=mean, epoch=place.epoch
        )
        self.display.say(f"epoch {place.epoch + 1}/{self.config.epochs}: training loss {mean:.4f}, {found}")

    def _end_epoch(self) -> None:
        place = self.place
        assert place.test_loss is not None
        if place.best_loss is None or place.test_loss < place.best_loss:
            place.best_loss, place.num_worse_epochs = place.test_loss, 0
        else:
            place.num_worse_epochs += 1
        place.epoch, place.batch, place.loss_sum = place.epoch + 1, 0, 0.0

    def save(self) -> None:
        """Records first: a checkpoint counts on the lines before it. What is saved must be good to go on from."""
        assert self._records is not None
        if self.place.step and not has_finite_weights(self.workload.model):
            raise explain_not_finite(self, self.place.step, f"the weights after step {self.place.step} are")
        self._records.flush()
        self.place.process_peak_bytes = process_peak_bytes()
        tensors = collect_tensors(self.workload.model, self.optimizer)
        save_checkpoint(self.folder.checkpoint_path, Checkpoint(tensors, self.place, self._about, self._costs))


def describe_environment() -> dict[str, Any]:
    """What the bits of a run depend on besides its config."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "num_threads": torch.get_num_threads(),
    }


def use_threads_of(folder: RunFolder) -> None:
    """Run on as many threads as the run began with: sums over threads round differently for another number."""
    if folder.checkpoint_path.exists():
        torch.set_num_threads(folder.read_checkpoint().about["environment"]["num_threads"])
