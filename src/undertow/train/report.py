"""The report of a run, from its folder alone: its records, and its plan made again from the recorded costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from undertow.api.training import train_step
from undertow.errors import CallError, DataError
from undertow.ir import Plan, format_bytes
from undertow.report.columns import align, wrap
from undertow.report.plan_summary import plan_to_dict, print_plan
from undertow.report.run_curves import Evaluated
from undertow.report.run_page import RunView, render_run_page
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
    metrics: Sequence[dict[str, Any]]
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "config": self.config.to_dict(),
            "place": vars(self.progress),
            "environment": self.about["environment"],
            "tests": [vars(item) for item in self.tests],
            "plan": plan_to_dict(self.plan),
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("epoch", "step", "training loss", "test loss", "accuracy")]
        rows += [
            (
                str(item.epoch + 1),
                str(item.step),
                f"{item.train_loss:.4f}",
                f"{item.loss:.4f}",
                "-" if item.accuracy is None else f"{item.accuracy:.2%}",
            )
            for item in self.tests
        ]
        lines = [f"{self.title}: {self.verdict}"]
        if self.progress.measured_peak_bytes is not None:
            lines.insert(0, f"measured peak {self.progress.measured_peak_bytes:,} bytes")
        return "\n\n".join([print_plan(self.plan), align(rows, ">>>>>"), "\n".join(map(wrap, lines))])

    def to_html(self) -> str:
        """One page that needs nothing else."""
        progress = self.progress
        measured = None
        if progress.measured_peak_bytes is not None:
            measured = MeasuredSteps(progress.measured_peak_bytes, progress.measured_step_s)
        peak = "not measured" if measured is None else format_bytes(measured.peak_bytes)
        tiles = [
            ("Test accuracy", "-" if progress.test_accuracy is None else f"{progress.test_accuracy:.2%}", ""),
            ("Training loss", "-" if progress.last_loss is None else f"{progress.last_loss:.4f}", "of the last step"),
            ("Steps", f"{progress.step:,}", f"{progress.epoch} epochs, {progress.seconds:.0f} s"),
            ("Measured peak", peak, "" if measured is None else f"{measured.peak_bytes:,} bytes"),
        ]
        view = RunView(
            title=self.title,
            verdict=self.verdict,
            is_good=self.is_within_budget,
            tiles=tiles,
            losses=[(record["step"], record["loss"]) for record in self.metrics if is_loss(record)],
            tests=self.tests,
            config=[(name, str(value)) for name, value in self.config.to_dict().items() if value is not None],
            environment=[(name, str(value)) for name, value in self.about["environment"].items()],
            measured=measured,
            process_bytes=progress.process_peak_bytes,
        )
        return render_run_page(view, self.plan)

    @property
    def title(self) -> str:
        """What was trained on what."""
        return f"{self.config.model} on {self.config.data}"

    @property
    def is_within_budget(self) -> bool:
        """Whether the measured peak is within the budget; also true without a peak or a budget."""
        measured, budget = self.progress.measured_peak_bytes, self.plan.budget_bytes
        return measured is None or budget is None or measured <= budget

    @property
    def verdict(self) -> str:
        """The state of the run, in a sentence."""
        state = self.progress.stopped or "not ended"
        within = (
            "" if self.plan.budget_bytes is None or self.progress.measured_peak_bytes is None else ", within its budget"
        )
        return f"{state} after {self.progress.step} steps{within if self.is_within_budget else ', over its budget'}"

    @property
    def judging(self) -> str:
        """The data that epochs were judged by."""
        return "validation" if any(item.get("kind") == "validation" for item in self.metrics) else "test"

    @property
    def tests(self) -> list[Evaluated]:
        """The evaluations that were recorded."""
        return [
            Evaluated(item["step"], item["epoch"], item["train_loss"], item["loss"], item.get("accuracy"))
            for item in self.metrics
            if item.get("kind") == self.judging
            and all(is_number(item.get(name)) for name in ("epoch", "train_loss", "loss"))
        ]


def is_loss(record: dict[str, Any]) -> bool:
    """Whether a record has the loss of a training step."""
    return record.get("kind") == "train" and is_number(record.get("loss"))


def is_number(value: Any) -> bool:
    """Whether it can be drawn and printed; anybody may have written the records."""
    return isinstance(value, int | float) and math.isfinite(value)


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
    step = train_step(
        model,
        batch.args,
        batch.kwargs,
        targets=batch.targets,
        loss=objective.training_loss,
        optimizer=make_optimizer(config, model),
        budget=config.budget,
        clip_norm=config.clip_norm,
        accumulate=config.accumulate,
        numerics=config.numerics,
        allow_other_bits=config.allow_other_bits,
        costs=checkpoint.costs or "measured",
    )
    return RunReport(config, checkpoint.progress, checkpoint.about, metrics, step.plan)


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
