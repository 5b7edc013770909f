"""The training loop: batches in, a recorded and resumable run out.

A step is a planned `train_step`. The checkpoint holds all of a run's state, so a run that is killed at any moment and
resumed from its last checkpoint does exactly what it would have done.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch

from undertow.api.budgets import AUTO, parse_budget
from undertow.api.hogwild import HogwildStep
from undertow.api.reports import process_peak_bytes
from undertow.api.sharding import ShardedStep
from undertow.api.training import TrainStep, train_step
from undertow.errors import CallError, DataError, UndertowError
from undertow.hashing import hash_tensors
from undertow.ir import format_bytes
from undertow.report.run_records import RANKS
from undertow.runtime.measure import measure_call
from undertow.train.averaging import Average
from undertow.train.batches import Batch
from undertow.train.callbacks import Callbacks
from undertow.train.checkpoint import (
    Checkpoint,
    Progress,
    collect_tensors,
    restore,
    save_checkpoint,
    save_in_parts,
)
from undertow.train.config import TrainConfig
from undertow.train.devices import NUM_AHEAD, Arriving, Batches, Stopwatch, move_model, out_of_memory
from undertow.train.diagnosis import check_first_weights, explain_not_finite, has_finite_weights
from undertow.train.environment import describe_environment
from undertow.train.evaluation import Evaluation, Evaluator, check_labels, evaluating
from undertow.train.feeding import ALL, Feed, Share
from undertow.train.folder import RunFolder
from undertow.train.initial_weights import freeze, load_initial
from undertow.train.interrupts import REASONS, Interrupts
from undertow.train.job import Job
from undertow.train.judging import Judge
from undertow.train.layout import lay_out_state, try_channels_last, use_channels_last
from undertow.train.objective import Objective
from undertow.train.optimizing import make_optimizer, set_learning_rates
from undertow.train.pace import InStep, OwnPace, Pace
from undertow.train.progress import Display, StepView
from undertow.train.records import NoRecords, Records
from undertow.train.result import TrainResult
from undertow.train.schedules import make_schedule
from undertow.train.workload import Workload, check_same_data, check_workload

CALLED_OFF = "ended by a callback"
MEASURED_STEP = 2  # the first step makes the optimizer's state
RECORDED_STEP = 3  # a step as all others, of which is kept what each rank did when
MAX_TIMED_STEPS = 101  # the time of a step is the median of the latest ones


@dataclass(frozen=True)
class UserCode:
    """What a user gave as code beside the model and the data."""

    loss: Any = None
    metrics: Sequence[tuple[str, Any]] = ()
    callbacks: Callbacks = field(default_factory=lambda: Callbacks("", {}))


@dataclass(frozen=True)
class Update:
    """An update that was started. Its losses, and the norm of its gradients, may still be computed."""

    step: int  # counted from 1
    num_examples: int
    rate: float
    losses: Arriving
    norm: Arriving | None
    stopwatches: Sequence[Stopwatch]

    def read_loss(self) -> float:
        """The mean loss of its batches. The loss function has divided each loss already, so the sum is the mean."""
        return sum(self.losses.read())


class Run:
    """One run, from its start or from its last checkpoint."""

    def __init__(
        self,
        config: TrainConfig,
        workload: Workload,
        folder: RunFolder,
        display: Display,
        device: torch.device,
        code: UserCode,
        job: Job | None = None,
    ) -> None:
        self.config, self.workload, self.folder, self.display = config, workload, folder, display
        self.device, self.callbacks, self.job = device, code.callbacks, job or Job()
        model = workload.model
        is_new = not folder.checkpoint_path.exists()
        self._loaded = load_initial(model, Path(config.init)) if config.init is not None and is_new else None
        self._still = freeze(model, config.freeze or ())
        move_model(model, device)
        self.optimizer = make_optimizer(config, model)
        self.schedule = make_schedule(config, [float(group["lr"]) for group in self.optimizer.param_groups])
        self.average = None if config.ema is None else Average(model, config.ema)
        self.budget_bytes = self._find_budget()
        self.objective = make_objective(config, workload.is_sequence, workload.class_weights, device, code.loss)
        self.feed = Feed(workload.train_loader, config.seed)
        self.progress = Progress()
        judged = model if self.average is None else self.average.model
        evaluator = Evaluator(judged, self.objective, device, config.numerics, config.metrics or (), code.metrics)
        self.judge = Judge(config, workload, judged, evaluator, folder, self.progress)
        self.step: TrainStep | None = None
        self.pace: Pace = InStep(self.job)
        self._costs: dict[str, tuple[int, int]] = {}
        self._about: dict[str, Any] = {
            "config": config.to_dict(),
            "data": workload.describe(),
            "class_weights": None if workload.class_weights is None else workload.class_weights.tolist(),
            "environment": describe_environment(device),
        }
        self._records: Records | NoRecords | None = None
        self._num_classes: int | None = None  # None: targets are not labels
        self._step_seconds: deque[float] = deque(maxlen=MAX_TIMED_STEPS)
        self._unread: deque[Update] = deque()  # updates whose losses were not waited for yet
        self._noted_s = 0.0  # when the last update was noted
        self._is_called_off = False
        self._whole_state: dict[str, Any] | None = None  # the optimizer's, while rank 0 keeps an epoch's checkpoint

    def _find_budget(self) -> int | None:
        """Each rank's."""
        if self.config.budget is None:
            return None
        num_bytes = parse_budget(self.config.budget, self.workload.model).num_bytes
        return self.job.share_free_memory(num_bytes, self.device) if self.config.budget == AUTO else num_bytes

    @cached_property
    def batches_per_epoch(self) -> int:
        """The batches that fill accumulations; the rest of an epoch is left out."""
        return len(self.feed) - len(self.feed) % self.config.accumulate

    @property
    def num_steps(self) -> int:
        """The number of updates of the whole run."""
        total = self.batches_per_epoch // self.config.accumulate * self.config.epochs
        return total if self.config.max_steps is None else min(total, self.config.max_steps)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint. A run that had ended goes on if it is given more epochs or patience."""
        check_same_data(checkpoint.about.get("data"), self._about["data"], str(self.folder.path))
        self.restore(checkpoint)
        if self.progress.stopped in (*REASONS.values(), CALLED_OFF) or not self.judge.is_over(self.num_steps):
            self.progress.stopped = ""
        self.display.say(f"going on after step {self.progress.step} of {self.num_steps}")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore everything from a checkpoint."""
        what = str(self.folder.checkpoint_path)
        self._settle()
        restore(checkpoint, self.workload.model, self.optimizer, self.device, what)
        if self.average is not None:
            self.average.restore(checkpoint.average(), what)
        lay_out_state(self.optimizer)
        if self.step is not None:
            self.step.load_optimizer_state(self.optimizer.state_dict())  # of which a rank may keep a part
        vars(self.progress).update(vars(checkpoint.progress))
        self._costs = checkpoint.costs
        self._about = {**checkpoint.about, "config": self.config.to_dict()}

    def prepare(self) -> None:
        """Check model and data and plan the step, so that all refusals come before the folder is made."""
        try:
            with self.job.patient():
                self._prepare()
        except torch.OutOfMemoryError:
            raise out_of_memory(self.device, "the step does not fit") from None

    def _prepare(self) -> None:
        if self._loaded is not None:
            self.display.say(str(self._loaded))
            self._about["init"] = self._loaded.to_dict()
        check_first_weights(self.workload.model)
        if not self.batches_per_epoch:
            raise DataError(f"an epoch has {len(self.feed)} batches, an update takes {self.config.accumulate}")
        self._num_classes = self.job.decide(self._check_parts)
        if not self.progress.stopped:
            batch = next(self.batches(self.progress.epoch, 0))
            self._compare_ranks(batch)
            self._plan(batch)

    def _compare_ranks(self, batch: Batch) -> None:
        """Refuse ranks that would not train the same: the step compares models and versions, this all else."""
        config = {name: value for name, value in self.config.to_dict().items() if name != "out"}
        tensors = {str(place): tensor for place, tensor in enumerate(batch.tensors())}
        facts = {"the options": config, "the data": self._about["data"], "the first batch": hash_tensors(tensors)}
        self.job.agree({**facts, "the step to go on from": self.progress.step})
        if note := self.job.find_other_processors(self.device):
            self.display.say(note)

    def _check_parts(self) -> int | None:
        """Check the data that epochs are judged by; the number of classes, if targets are labels."""
        num_classes = None
        for part in self.judge.parts:
            raw = next(self.judge.batches(part), None)
            if raw is None:
                raise DataError(f"there are no {part} examples")
            batch = next(Batches(iter([raw]), self.objective.read, self.device))
            if part == self.judge.part:
                self._lay_out(batch)
            num_classes = check_workload(self.workload, self.judge.evaluator, batch, part)
        return num_classes

    def _lay_out(self, batch: Batch) -> None:
        """On a GPU: the layout that its convolutions take, where eager's bits are not asked for."""
        if self.device.type != "cuda" or self.config.numerics == "exact":
            return
        model = self.workload.model
        with evaluating(model):
            reason = try_channels_last(model, batch)
        if reason is None and self.average is not None:
            use_channels_last(self.average.model)
        lay_out_state(self.optimizer)
        self._about["is_channels_last"] = reason is None
        if reason:
            self.display.say(f"the model keeps the layout of its factory: {reason}")

    def batches(self, epoch: int, first: int, share: Share = ALL) -> Batches:
        """The batches of an epoch from number `first` on, or a worker's share, with labels that were checked."""
        steps_before = self.progress.step - self.progress.batch // self.config.accumulate
        numbers = count(first)

        def read(raw: Any) -> Batch:
            batch, number = self.objective.read(raw), next(numbers)
            if self._num_classes is not None:
                step = steps_before + number // self.config.accumulate + 1
                check_labels(batch.targets[0], self._num_classes, f"training data, epoch {epoch + 1}, step {step}")
            return batch

        return Batches(self.feed.batches(epoch, first, share), read, self.device)

    def train(self) -> TrainResult:
        """Train to the end, or until a signal."""
        self._records = Records(self.folder, self.progress) if self.job.is_first else NoRecords()
        try:
            with Interrupts() as interrupts:
                if not self.job.decide(self.folder.checkpoint_path.exists):
                    self.save()
                self._call("on_start", self.config.to_dict())
                while not self.progress.stopped:
                    self._advance(interrupts)
                    self.save()
            self._settle()
            if self.progress.stopped not in REASONS.values() and self.judge.tests_best:
                self._decide(self._test_best)
                self.save()
        except torch.OutOfMemoryError:
            raise out_of_memory(self.device, "the step does not fit") from None
        finally:
            self._records.close()
            self.display.close()
        weights = hash_tensors(self.workload.model.state_dict())
        result = TrainResult(self.progress, self.budget_bytes, weights, str(self.folder.path))
        self.callbacks.call("on_end", result.to_dict())
        return result

    def _decide(self, act: Callable[[], None]) -> None:
        """Rank 0 acts; then its progress is that of all ranks, and so is all that follows from it."""

        def run() -> dict[str, Any]:
            act()
            return vars(self.progress)

        vars(self.progress).update(self.job.decide(run))

    def _test_best(self) -> None:
        found = self.judge.test_best()
        self._record(found)
        self.display.say(f"the best weights, of epoch {(self.progress.best_epoch or 0) + 1}: {found.line}")

    def _call(self, hook: str, data: dict[str, Any]) -> None:
        """Call a user's function; the run is saved before its error ends it."""
        try:
            self._is_called_off |= self.callbacks.call(hook, data)
        except CallError:
            self.save_alone()
            raise

    def _advance(self, interrupts: Interrupts) -> None:
        """Train to the end of an epoch, or evaluate after one, or end the run."""
        progress = self.progress
        if progress.batch < self.batches_per_epoch and not self.judge.is_over(self.num_steps):
            self._train_epoch(interrupts)
        else:
            with self.job.doing("evaluation"):
                self._settle()
                self._whole_state = self._gather_state() if self.config.keep else None
                self._decide(self._judge)
                self._whole_state = None
        reason = self.job.decide_end(interrupts.reason or (CALLED_OFF if self._is_called_off else ""))
        progress.stopped = progress.stopped or reason

    def _settle(self) -> None:
        """All weights come to this rank, if others have some of them. All ranks call it."""
        if self.step is not None:
            self.step.settle()

    def _gather_state(self) -> dict[str, Any]:
        """The whole state of the optimizer. All ranks call it."""
        return self.optimizer.state_dict() if self.step is None else self.step.optimizer_state()

    def _judge(self) -> None:
        """Evaluate after an epoch, or end the run."""
        progress = self.progress
        if progress.batch == self.batches_per_epoch:
            self._evaluate()
            self.judge.end_epoch(self._about)
            if self.config.keep:
                assert self._whole_state is not None
                self.folder.keep_epoch(self._checkpoint(self._whole_state), self.config.keep)
        else:
            if progress.batch:
                self._evaluate()  # a part of an epoch is not judged: a run that goes on would not have stopped here
            progress.stopped = self.judge.why_over()

    def _train_epoch(self, interrupts: Interrupts) -> None:
        """Train to the end of the epoch or of the run, or until a signal."""
        self.pace.begin_epoch(self.progress, self.num_steps)
        self._train_share(interrupts)
        self._note_updates(0)
        self.pace.end_epoch(self.progress, self.config.accumulate)

    def _train_share(self, interrupts: Interrupts) -> None:
        """Compute this worker's batches of the epoch."""
        progress, config, pace = self.progress, self.config, self.pace
        last_save = progress.step
        batches = self.batches(progress.epoch, progress.batch, pace.share)
        self._noted_s = time.perf_counter()
        while group := [batch for _, batch in zip(range(config.accumulate), batches, strict=False)]:
            if len(group) < config.accumulate:
                break
            pace.begin_update(progress)
            self.job.note(f"step {progress.step + 1}")
            self._update(group, batches)
            is_ending = progress.step >= self.num_steps or progress.batch == self.batches_per_epoch
            if not is_ending:
                is_ending = pace.is_ending(interrupts.reason or (CALLED_OFF if self._is_called_off else ""))
            if is_ending:
                return
            if config.save_every is not None and progress.step - last_save >= config.save_every:
                self._note_updates(0)
                self.save()
                last_save = progress.step
        if pace.share != ALL:
            return
        raise DataError(f"the training loader ended after {progress.batch} batches of {len(self.feed)}")

    def _update(self, group: list[Batch], batches: Batches) -> None:
        """Start an update and, on a GPU, wait for the one before; then the next batch is fetched."""
        self._unread.append(self.start_update(group))
        self._note_updates(NUM_AHEAD[self.device.type], batches)

    def _note_updates(self, num_left: int, batches: Batches | None = None) -> None:
        """Wait for all updates that were started but the last `num_left`, and note them."""
        while len(self._unread) > num_left:
            start = time.perf_counter()
            update = self._unread.popleft()
            loss = update.read_loss()
            if batches is not None and self.progress.batch < self.batches_per_epoch:
                batches.fetch()
            self.progress.seconds += time.perf_counter() - start
            record = self._note(update, loss)
            now = time.perf_counter()
            rate, self._noted_s = update.num_examples / max(now - self._noted_s, 1e-9), now
            self._call("on_step", {"step": update.step, **record, "examples_per_s": rate})

    def _note(self, update: Update, loss: float) -> dict[str, Any]:
        """Record an update whose loss was read; raises NotFinite if that is not a number."""
        progress = self.progress
        progress.loss_sum += loss
        progress.last_loss = loss
        progress.num_examples += update.num_examples
        self._step_seconds.extend(watch.seconds for watch in update.stopwatches)
        if not math.isfinite(loss):
            self._unread.clear()
            raise explain_not_finite(self, update.step, f"the loss of step {update.step} is")
        assert self._records is not None
        record: dict[str, Any] = {"loss": loss, "lr": update.rate, "epoch": progress.epoch}
        if update.norm is not None:
            record["gradient_norm"] = update.norm.read()[0]
        self._records.add(update.step, "train", **record)
        peak = progress.measured_peak_bytes or progress.predicted_peak_bytes
        view = (update.step, self.num_steps, progress.epoch, self.config.epochs, loss, update.num_examples)
        self.display.show(StepView(*view, peak, self.budget_bytes))
        return record

    def run_batches(self, group: list[Batch]) -> float:
        """Make one update from the batches of an accumulation; returns the mean of their losses."""
        return self.start_update(group).read_loss()

    def start_update(self, group: list[Batch]) -> Update:
        """Start an update from the batches of an accumulation; a GPU is not waited for."""
        start = time.perf_counter()
        progress, step = self.progress, self.step
        assert step is not None
        rates = self.schedule.at(progress.step, self.num_steps, progress.num_drops)
        set_learning_rates(self.optimizer, rates)
        step.start_at(progress.step * self.config.accumulate)
        stopwatches: list[Stopwatch] = []
        losses = Arriving([self._run_batch(batch, stopwatches) for batch in group])
        if self.average is not None:
            self.average.update()
        norm = step.norm
        progress.step += 1
        progress.batch += len(group)
        progress.seconds += time.perf_counter() - start
        num_examples = sum(batch.num_examples for batch in group)
        arriving = None if norm is None else Arriving([norm])
        return Update(progress.step, num_examples, rates[0], losses, arriving, stopwatches)

    def _run_batch(self, batch: Batch, stopwatches: list[Stopwatch]) -> torch.Tensor:
        """Run a step; the peak of the first ones is measured, and the time of the others."""
        step, progress = self.step, self.progress
        assert step is not None
        is_next = progress.step + 1 == MEASURED_STEP
        if is_next or (progress.measured_peak_bytes is None and progress.step >= MEASURED_STEP):
            losses: list[torch.Tensor] = []
            step.divide_parameters()  # they may be whole since a checkpoint, which no step needs
            held = [*step.persistent_tensors(), *(() if self.average is None else self.average.state().values())]
            call = measure_call(lambda: losses.append(step(*batch.call, **batch.kwargs)), held, batch.tensors())
            progress.measured_peak_bytes = max(call.peak_bytes, progress.measured_peak_bytes or 0)
            return losses[0]
        if progress.step == RECORDED_STEP - 1 and isinstance(step, ShardedStep) and self._records is not None:
            loss, ranks = step.record_step(*batch.call, **batch.kwargs)
            if ranks is not None:
                self._records.add(RECORDED_STEP, RANKS, {RANKS: ranks.to_dict()})
            return loss
        with Stopwatch(self.device) as stopwatch:
            loss = step(*batch.call, **batch.kwargs)
        if progress.step >= MEASURED_STEP:
            stopwatches.append(stopwatch)
        return loss

    def train_mode(self) -> None:
        """The model as it trains: frozen norms keep their statistics."""
        self.workload.model.train()
        for module in self._still:
            module.eval()

    def _plan(self, batch: Batch) -> None:
        start = time.perf_counter()
        config = self.config
        self.train_mode()
        held_bytes = 0 if self.average is None else self.average.num_bytes
        # On a GPU the next batch is there while this one is computed with.
        held_bytes += sum(tensor.nbytes for tensor in batch.tensors()) if self.device.type == "cuda" else 0
        if self.budget_bytes is not None and self.budget_bytes <= held_bytes:
            raise CallError(
                f"the budget of {self.budget_bytes:,} bytes leaves nothing for the step: the average of the weights "
                f"and the next batch take {held_bytes:,} bytes"
            )
        if self.budget_bytes is not None and held_bytes:
            self.display.say(
                f"the budget has {format_bytes(held_bytes)} for averaged weights and the next batch; "
                f"{format_bytes(self.budget_bytes - held_bytes)} are for the step"
            )
        self.step = train_step(
            self.workload.model,
            batch.args,
            batch.kwargs,
            targets=batch.targets,
            loss=self.objective.training_loss,
            optimizer=self.optimizer,
            budget=None if self.budget_bytes is None else self.budget_bytes - held_bytes,
            clip_norm=config.clip_norm,
            accumulate=config.accumulate,
            numerics=config.numerics,
            allow_other_bits=config.allow_other_bits,
            costs=self._costs or "measured",
            gradient_norm=config.gradient_norm,
            shards=config.shards,
            parallel=self.job.mesh,
            shard_state=config.shard_state and self.job.mesh is not None,
            seed=config.seed,
            loss_is_sum=config.loss_is_sum,
            schedule=config.stage_schedule,
            locking=config.locking if self.job.size > 1 else "none",
            shared_gradients=config.shared_gradients and self.job.size > 1,
        )
        if isinstance(self.step, HogwildStep):
            self.pace = OwnPace(self.job, self.step, config.accumulate)
            self.display.say(str(self.step.shared))
        self._costs = self.step.costs
        self.progress.predicted_peak_bytes = self.step.peak_bytes + held_bytes
        self.job.check_memory(self.progress.predicted_peak_bytes, self.device)
        self._about |= {"call": batch.describe(), "budget_bytes": self.budget_bytes, "held_bytes": held_bytes}
        self.display.say(f"planned the step in {time.perf_counter() - start:.1f} s")
        own = self.step.training.own
        if own is not None and own.divided_buckets:
            share = f"{len(own.divided_buckets)} of {len(own.pieces)}"
            self.display.say(
                f"{share} buckets of parameters are divided over the ranks, and gathered when they are read"
            )

    def _evaluate(self) -> None:
        """Evaluate on the data that epochs are judged by."""
        progress, judge = self.progress, self.judge
        start = time.perf_counter()
        try:
            found = judge.evaluate(judge.part)
        except UndertowError:  # such as a user's metric that fails: the epoch must not be lost with it
            self.save_alone()
            raise
        progress.seconds += time.perf_counter() - start
        mean = judge.mean_training_loss
        self._record(found, train_loss=mean)
        self.display.say(f"epoch {progress.epoch + 1}/{self.config.epochs}: training loss {mean:.4f}, {found.line}")

    def _record(self, found: Evaluation, **more: Any) -> None:
        progress = self.progress
        assert self._records is not None
        record = {"loss": found.loss, "accuracy": found.accuracy, **more, "epoch": progress.epoch, **found.numbers}
        self._records.add(progress.step, found.part, found.tables, **record)
        if progress.num_examples:
            num_examples, seconds = progress.num_examples, progress.seconds
            numbers = {"examples_per_s": num_examples / max(seconds, 1e-9), "examples": num_examples}
            self._records.add(progress.step, "speed", None, **numbers, seconds=seconds, epoch=progress.epoch)
        self._call("on_evaluation", {"step": progress.step, "kind": found.part, **record, "metrics": found.metrics})

    def save(self) -> None:
        """Save a checkpoint, each rank a part of it."""
        with self.job.doing("saving"):
            self._settle()
            self._finish_records()
            self.progress.measured_peak_bytes = max(
                (peak for peak in self.job.gather(self.progress.measured_peak_bytes) if peak is not None), default=None
            )
            save_in_parts(self.folder.checkpoint_path, self._checkpoint(self._gather_state()), self.job)

    def save_alone(self) -> None:
        """Save a checkpoint where the other ranks may not come to it, unless they have parts of the state."""
        if self.job.size == 1:
            self.save()
        elif not self.config.shard_state and has_finite_weights(self.workload.model):
            self._finish_records()
            save_checkpoint(self.folder.checkpoint_path, self._checkpoint(self.optimizer.state_dict()))

    def _finish_records(self) -> None:
        """What a checkpoint relies on is written before it. Weights that are not finite are not saved."""
        assert self._records is not None
        while self._unread:  # where a callback has failed
            update = self._unread.popleft()
            self._note(update, update.read_loss())
        if self.progress.step and not has_finite_weights(self.workload.model):
            raise explain_not_finite(self, self.progress.step, f"the weights after step {self.progress.step} are")
        self._records.flush()
        if self._step_seconds:
            self.progress.measured_step_s = statistics.median(self._step_seconds)
        self.progress.process_peak_bytes = process_peak_bytes()

    def _checkpoint(self, optimizer_state: dict[str, Any]) -> Checkpoint:
        average = {} if self.average is None else self.average.state()
        tensors = collect_tensors(self.workload.model, optimizer_state, average, self.device)
        return Checkpoint(tensors, self.progress, self._about, self._costs)


def make_objective(
    config: TrainConfig, is_sequence: bool, weights: torch.Tensor | None, device: torch.device, function: Any
) -> Objective:
    """The loss of a run; `weights` are those of classes."""
    return Objective(
        config.loss,
        function,
        tuple(config.targets or ()),
        is_sequence,
        config.label_smoothing,
        None if weights is None else weights.to(device),
        config.accumulate,
    )
