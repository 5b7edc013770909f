"""The report of a run, from its folder alone: its records, and its plan made again from the recorded costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from undertow.api.training import train_step
from undertow.errors import CallError, DataError
from undertow.ir import Plan, format_bytes
from undertow.report.columns import align, wrap
from undertow.report.plan_summary import plan_to_dict, print_plan
from undertow.report.run_curves import evaluation_rows
from undertow.report.run_page import RunView, render_run_page
from undertow.report.run_records import VALIDATION, RunRecords
from undertow.train.batches import Batch, make_empty
from undertow.train.checkpoint import Checkpoint, Progress
from undertow.train.config import TrainConfig
from undertow.train.initial_weights import freeze
from undertow.train.objective import Objective
from undertow.train.optimizing import make_optimizer


@dataclass(frozen=True)
class MeasuredSteps:
    """What the steps of a run took; the time is a median, and None where there were too few steps."""

    peak_bytes: int
    step_s: float | None


@dataclass(frozen=True)
class RunReport:
    """A run as it was after its last saved step."""

    config: TrainConfig
    progress: Progress
    about: dict[str, Any]
    records: RunRecords
    plan: Plan
    held_bytes: int  # what lies in the budget beside the step: averaged weights, and on a GPU the next batch

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "config": self.config.to_dict(),
            "place": vars(self.progress),
            "environment": self.about["environment"],
            "judged_by": self.records.judging,
            "tests": [asdict(item) for item in self.records.evaluations],
            "plan": plan_to_dict(self.plan),
            "ranks": None if self.records.ranks is None else self.records.ranks.to_dict(),
        }

    def __str__(self) -> str:
        table = align(rows := evaluation_rows(self.records.evaluations, self.records.judging), ">" * len(rows[0]))
        lines = [self.best, self.tested, f"{self.title}: {self.verdict}"]
        if self.progress.measured_peak_bytes is not None:
            lines.insert(2, f"measured peak {self.progress.measured_peak_bytes:,} bytes")
        ranks = [] if self.records.ranks is None else [str(self.records.ranks)]
        return "\n\n".join([print_plan(self.plan), *ranks, table, "\n".join(map(wrap, filter(None, lines)))])

    def to_html(self) -> str:
        """One page that needs nothing else."""
        progress, records = self.progress, self.records
        measured = None
        if progress.measured_peak_bytes is not None:
            measured = MeasuredSteps(progress.measured_peak_bytes - self.held_bytes, progress.measured_step_s)
        used = {**self.config.to_dict(), **{name: self.config.effective(name) for name in ("lr", "momentum")}}
        view = RunView(
            title=self.title,
            verdict=self.verdict,
            is_good=self.is_within_budget,
            tiles=self._tiles(),
            losses=records.curve("train", "loss"),
            judging=records.judging,
            tests=records.evaluations,
            best_step=progress.best_step,
            tested=self.tested,
            curves=records.curves(),
            confusion=records.confusion(progress.best_step),
            classes=tuple(map(str, self.about["data"]["classes"] or ())),
            config=[(name, show_option(value)) for name, value in used.items() if value is not None],
            environment=[(name, str(value)) for name, value in self.about["environment"].items()],
            budget_bytes=self.budget_bytes,
            held_bytes=self.held_bytes,
            measured=measured,
            process_bytes=progress.process_peak_bytes,
            ranks=records.ranks,
        )
        return render_run_page(view, self.plan)

    def _tiles(self) -> list[tuple[str, str, str]]:
        progress = self.progress
        peak = progress.measured_peak_bytes
        what = "of the best weights" if self.records.judging == VALIDATION else "after the last epoch"
        accuracy, loss = progress.test_accuracy, progress.test_loss
        shown = ("Test loss", loss, "{:.4f}") if accuracy is None else ("Test accuracy", accuracy, "{:.2%}")
        tiles = [(shown[0], "-" if shown[1] is None else shown[2].format(shown[1]), "" if shown[1] is None else what)]
        if progress.best_epoch is not None:
            judged = f"{self.records.judging} loss {progress.best_loss:.4f}"
            tiles.append(("Best epoch", f"{progress.best_epoch + 1} of {progress.epoch}", judged))
        tiles.append(("Training loss", "-" if progress.last_loss is None else f"{progress.last_loss:.4f}", "last step"))
        tiles.append(("Steps", f"{progress.step:,}", f"{progress.epoch} epochs, {progress.seconds:.0f} s"))
        if progress.num_examples and progress.seconds:
            rate = f"{progress.num_examples / progress.seconds:,.0f}"
            tiles.append(("Examples a second", rate, "evaluation included"))
        note = "" if peak is None else f"{peak:,} bytes"
        return [*tiles, ("Measured peak", "not measured" if peak is None else format_bytes(peak), note)]

    @property
    def budget_bytes(self) -> int | None:
        """The budget of the run."""
        return None if self.plan.budget_bytes is None else self.plan.budget_bytes + self.held_bytes

    @property
    def best(self) -> str:
        """Which epoch was the best, in a sentence."""
        progress = self.progress
        if progress.best_epoch is None:
            return ""
        return f"Best after epoch {progress.best_epoch + 1}: {self.records.judging} loss {progress.best_loss:.4f}"

    @property
    def tested(self) -> str:
        """What the best weights gave on the test data, where validation data judged the epochs."""
        found = self.records.last_test if self.records.judging == VALIDATION else None
        return "" if found is None else f"The best weights on the test data: {found}"

    @property
    def title(self) -> str:
        """What was trained on what."""
        return f"{self.config.model} on {self.config.data}"

    @property
    def is_within_budget(self) -> bool:
        """Whether the measured peak is within the budget; also true without a peak or a budget."""
        measured, budget = self.progress.measured_peak_bytes, self.budget_bytes
        return measured is None or budget is None or measured <= budget

    @property
    def verdict(self) -> str:
        """The state of the run, in a sentence."""
        state = self.progress.stopped or "not ended"
        within = "" if self.budget_bytes is None or self.progress.measured_peak_bytes is None else ", within its budget"
        return f"{state} after {self.progress.step} steps{within if self.is_within_budget else ', over its budget'}"


def show_option(value: Any) -> str:
    """The value of an option as it is given on the command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def make_report(
    config: TrainConfig,
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    metrics: Sequence[dict[str, Any]],
    objective: Objective,
    device: torch.device,
) -> RunReport:
    """Plan the run's step again, for a batch of the recorded shape. No step is run."""
    batch = _recorded_batch(checkpoint.about, device)
    still = freeze(model, config.freeze or ())
    model.to(device).train()
    for module in still:
        module.eval()
    about = checkpoint.about
    held_bytes, budget = _recorded_budget(about, config)
    step = train_step(
        model,
        batch.args,
        batch.kwargs,
        targets=batch.targets,
        loss=objective.training_loss,
        optimizer=make_optimizer(config, model),
        budget=budget,
        clip_norm=config.clip_norm,
        accumulate=config.accumulate,
        numerics=config.numerics,
        allow_other_bits=config.allow_other_bits,
        costs=checkpoint.costs or "measured",
        gradient_norm=config.gradient_norm,
    )
    return RunReport(config, checkpoint.progress, about, RunRecords(metrics), step.plan, held_bytes)


def _recorded_budget(about: dict[str, Any], config: TrainConfig) -> tuple[int, int | str | None]:
    """The bytes beside the step, and the step's budget; older runs recorded neither."""
    if "budget_bytes" not in about:
        return 0, config.budget
    held_bytes, budget = about.get("held_bytes"), about["budget_bytes"]
    if type(held_bytes) is not int or held_bytes < 0 or not (budget is None or type(budget) is int):
        raise DataError("the checkpoint is refused: it does not say what the budget was")
    return held_bytes, None if budget is None else budget - held_bytes


def _recorded_batch(about: dict[str, Any], device: torch.device) -> Batch:
    """A batch of zeros in the recorded form; older runs recorded a pair of tensors."""
    try:
        if "call" in about:
            return make_empty(about["call"], device)
        if "batch" not in about:
            raise CallError("the run has not planned a step yet")
        inputs, targets = (
            torch.zeros(shape, dtype=getattr(torch, name.removeprefix("torch.")), device=device)
            for shape, name in about["batch"]
        )
        return Batch((inputs,), {}, (targets,))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DataError(f"the checkpoint is refused: it does not say what a batch is ({error})") from None
