"""The training loop: batches in, a recorded and resumable run out.

A step is a planned `train_step`. The checkpoint holds all of a run's state, so a run that is killed at any moment and
resumed from its last checkpoint does exactly what it would have done.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from undertow.api.budgets import parse_budget
from undertow.api.reports import process_peak_bytes
from undertow.api.training import TrainStep, train_step
from undertow.errors import DataError
from undertow.report.columns import wrap
from undertow.runtime.measure import measure_call
from undertow.train.checkpoint import Checkpoint, Progress, collect_tensors, restore, save_checkpoint
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
MEASURED_STEP = 2  # the first step makes the optimizer's state
MAX_TIMED_STEPS = 101  # the time of a step is the median of the latest ones


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    progress: Progress
    budget_bytes: int | None
    weights_sha256: str
    folder: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        progress = self.progress
        return {
            "final_loss": progress.last_loss,
            "test_loss": progress.test_loss,
            "test_accuracy": progress.test_accuracy,
            "weights_sha256": self.weights_sha256,
            "budget_bytes": self.budget_bytes,
            "predicted_peak_bytes": progress.predicted_peak_bytes,
            "measured_peak_bytes": progress.measured_peak_bytes,
            "steps": progress.step,
            "epochs": progress.epoch,
            "seconds": progress.seconds,
            "stopped": progress.stopped,
            "folder": self.folder,
        }

    def __str__(self) -> str:
        progress = self.progress
        accuracy = "" if progress.test_accuracy is None else f", test accuracy {progress.test_accuracy:.2%}"
        loss = "none" if progress.last_loss is None else f"{progress.last_loss:.4f}"
        lines = [f"{progress.stopped} after {progress.step} steps in {progress.seconds:.1f} s: loss {loss}{accuracy}"]
        if progress.measured_peak_bytes is not None:
            budget = "" if self.budget_bytes is None else f", budget {self.budget_bytes:,}"
            lines.append(
                f"peak memory of a step: {progress.predicted_peak_bytes:,} bytes predicted, "
                f"{progress.measured_peak_bytes:,} measured{budget}"
            )
        return "\n".join([*map(wrap, lines), f"weights sha256 {self.weights_sha256}", f"run {self.folder}"])


class Run:
    """One run, from its start or from its last checkpoint."""

    def __init__(self, config: TrainConfig, workload: Workload, folder: RunFolder, display: Display) -> None:
        self.config, self.workload, self.folder, self.display = config, workload, folder, display
        self.optimizer = make_optimizer(config, workload.model)
        self.budget_bytes = None if config.budget is None else parse_budget(config.budget, workload.model).num_bytes
        self.feed = Feed(workload.train_loader, config.seed)
        self.test_feed = Feed(workload.test_loader, config.seed)
        self.evaluator = Evaluator(workload.model, config.loss, workload.is_sequence)
        self.progress = Progress()
        self.step: TrainStep | None = None
        self._costs: dict[str, tuple[int, int]] = {}
        self._about: dict[str, Any] = {
            "config": config.to_dict(),
            "data": workload.describe(),
            "environment": describe_environment(),
        }
        self._records: Records | None = None
        self._num_classes: int | None = None  # None: targets are not labels
        self._step_seconds: deque[float] = deque(maxlen=MAX_TIMED_STEPS)

    @cached_property
    def batches_per_epoch(self) -> int:
        """The batches that fill accumulations; the rest of an epoch is left out."""
        return len(self.feed) - len(self.feed) % self.config.accumulate

    @property
    def num_steps(self) -> int:
        """The number of updates of the whole run."""
        total = self.batches_per_epoch // self.config.accumulate * self.config.epochs
        return total if self.config.max_steps is None else min(total, self.config.max_steps)

    def resume(self) -> None:
        """Restore the last checkpoint. A run that had ended goes on if it is given more epochs or patience."""
        checkpoint = self.folder.read_checkpoint()
        check_same_data(checkpoint.about.get("data"), self._about["data"], str(self.folder.path))
        self.restore(checkpoint)
        if self.progress.stopped in REASONS.values() or not self._is_over():
            self.progress.stopped = ""
        self.display.say(f"going on after step {self.progress.step} of {self.num_steps}")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore everything from a checkpoint."""
        restore(checkpoint, self.workload.model, self.optimizer, str(self.folder.checkpoint_path))
        self.progress = replace(checkpoint.progress)
        self._costs = checkpoint.costs
        self._about = {**checkpoint.about, "config": self.config.to_dict()}

    def prepare(self) -> None:
        """Check model and data and plan the step, so that all refusals come before the folder is made."""
        check_first_weights(self.workload.model)
        if not self.batches_per_epoch:
            raise DataError(f"an epoch has {len(self.feed)} batches, an update takes {self.config.accumulate}")
        batch = next(self.test_feed.batches(0, 0), None)
        if batch is None:
            raise DataError("there are no test examples")
        self._num_classes = check_workload(self.workload, self.evaluator, batch)
        if not self.progress.stopped:
            self._plan(*next(self.feed.batches(self.progress.epoch, 0)))

    def train(self) -> TrainResult:
        """Train to the end, or until a signal."""
        self._records = Records(self.folder, self.progress.step, self.progress.test_step == self.progress.step)
        try:
            with Interrupts() as interrupts:
                if not self.folder.checkpoint_path.exists():
                    self.save()
                while not self.progress.stopped:
                    self._advance(interrupts)
                    self.save()
        finally:
            self._records.close()
            self.display.close()
        weights = hash_tensors(self.workload.model.state_dict())
        return TrainResult(self.progress, self.budget_bytes, weights, str(self.folder.path))

    def _advance(self, interrupts: Interrupts) -> None:
        """Train to the end of an epoch, evaluate after one, or end the run."""
        progress = self.progress
        if progress.batch == self.batches_per_epoch:
            self._evaluate()
            self._end_epoch()
        elif self._is_over():
            if progress.batch:
                self._evaluate()
            progress.stopped = EARLY if self._is_stuck() else FINISHED
        else:
            self._train_epoch(interrupts)
        progress.stopped = progress.stopped or interrupts.reason

    def _is_stuck(self) -> bool:
        return self.config.patience is not None and self.progress.num_worse_epochs >= self.config.patience

    def _is_over(self) -> bool:
        return self.progress.step >= self.num_steps or (self.progress.batch == 0 and self._is_stuck())

    def _train_epoch(self, interrupts: Interrupts) -> None:
        """Train to the end of the epoch or of the run, or until a signal."""
        progress, config = self.progress, self.config
        last_save = progress.step
        group: list[tuple[torch.Tensor, torch.Tensor]] = []
        for batch in self.feed.batches(progress.epoch, progress.batch):
            group.append(batch)
            if len(group) < config.accumulate:
                continue
            self._update(group)
            group = []
            if interrupts.reason or progress.step >= self.num_steps or progress.batch == self.batches_per_epoch:
                return
            if config.save_every is not None and progress.step - last_save >= config.save_every:
                self.save()
                last_save = progress.step
        raise DataError(f"the training loader ended after {progress.batch} batches of {len(self.feed)}")

    def _update(self, group: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        start = time.perf_counter()
        loss = self.run_batches(group)
        progress = self.progress
        progress.seconds += time.perf_counter() - start
        if not math.isfinite(loss):
            raise explain_not_finite(self, progress.step, f"the loss of step {progress.step} is")
        assert self._records is not None
        rate = self.optimizer.param_groups[0]["lr"]
        self._records.add(progress.step, "train", loss=loss, lr=rate, epoch=progress.epoch)
        num_examples = sum(len(targets) for _, targets in group)
        peak = progress.measured_peak_bytes or progress.predicted_peak_bytes
        view = (progress.step, self.num_steps, progress.epoch, self.config.epochs, loss, num_examples)
        self.display.show(StepView(*view, peak, self.budget_bytes))

    def run_batches(self, group: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Make one update from the batches of an accumulation; returns the mean of their losses."""
        progress = self.progress
        set_learning_rate(self.optimizer, learning_rate(self.config, progress.step, self.num_steps))
        # The loss function has divided each loss already, so the sum is the mean.
        loss = sum(self._run_batch(inputs, targets) for inputs, targets in group)
        progress.step += 1
        progress.batch += len(group)
        progress.loss_sum += loss
        progress.last_loss = loss
        return loss

    def _run_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        step, progress = self.step, self.progress
        assert step is not None
        if self._num_classes is not None:
            check_labels(
                targets, self._num_classes, f"training data, epoch {progress.epoch + 1}, step {progress.step + 1}"
            )
        if (
            progress.step + 1 == MEASURED_STEP
            or progress.measured_peak_bytes is None
            and progress.step >= MEASURED_STEP
        ):
            losses: list[torch.Tensor] = []
            held = step.persistent_tensors()
            measured = measure_call(lambda: losses.append(step(inputs, targets)), held, (inputs, targets))
            progress.measured_peak_bytes = max(measured.peak_bytes, progress.measured_peak_bytes or 0)
            return float(losses[0])
        start = time.perf_counter()
        loss = float(step(inputs, targets))
        if progress.step >= MEASURED_STEP:
            self._step_seconds.append(time.perf_counter() - start)
        return loss

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
        self.progress.predicted_peak_bytes = self.step.plan.peak_bytes
        self._about["batch"] = [[list(tensor.shape), str(tensor.dtype)] for tensor in (inputs, targets)]
        self.display.say(f"planned the step in {time.perf_counter() - start:.1f} s")

    def _evaluate(self) -> None:
        progress = self.progress
        start = time.perf_counter()
        found = self.evaluator.evaluate(self.test_feed.batches(0, 0))
        progress.seconds += time.perf_counter() - start
        progress.test_step, progress.test_loss, progress.test_accuracy = progress.step, found.loss, found.accuracy
        mean = progress.loss_sum * self.config.accumulate / progress.batch
        assert self._records is not None
        self._records.add(
            progress.step, "test", loss=found.loss, accuracy=found.accuracy, train_loss=mean, epoch=progress.epoch
        )
        self.display.say(f"epoch {progress.epoch + 1}/{self.config.epochs}: training loss {mean:.4f}, {found}")

    def _end_epoch(self) -> None:
        progress = self.progress
        assert progress.test_loss is not None
        if progress.best_loss is None or progress.test_loss < progress.best_loss:
            progress.best_loss, progress.num_worse_epochs = progress.test_loss, 0
        else:
            progress.num_worse_epochs += 1
        progress.epoch, progress.batch, progress.loss_sum = progress.epoch + 1, 0, 0.0

    def save(self) -> None:
        """Save a checkpoint, if the weights are finite. Records are flushed first: the checkpoint relies on them."""
        assert self._records is not None
        if self.progress.step and not has_finite_weights(self.workload.model):
            raise explain_not_finite(self, self.progress.step, f"the weights after step {self.progress.step} are")
        self._records.flush()
        if self._step_seconds:
            self.progress.measured_step_s = statistics.median(self._step_seconds)
        self.progress.process_peak_bytes = process_peak_bytes()
        tensors = collect_tensors(self.workload.model, self.optimizer)
        save_checkpoint(self.folder.checkpoint_path, Checkpoint(tensors, self.progress, self._about, self._costs))


def describe_environment() -> dict[str, Any]:
    """What the bits of a run depend on, apart from its config."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "num_threads": torch.get_num_threads(),
    }


def use_same_threads(folder: RunFolder) -> None:
    """Run on as many threads as the run began with: sums round differently on another number of threads."""
    if folder.checkpoint_path.exists():
        torch.set_num_threads(folder.read_checkpoint().about["environment"]["num_threads"])
