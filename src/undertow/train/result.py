"""What a run has come to, as plain data and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from undertow.report.columns import wrap
from undertow.train.checkpoint import Progress


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
            "validation_loss": progress.validation_loss,
            "validation_accuracy": progress.validation_accuracy,
            "best_loss": progress.best_loss,
            "best_epoch": progress.best_epoch,
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
        lines = []
        if progress.measured_peak_bytes is not None:
            budget = "" if self.budget_bytes is None else f", budget {self.budget_bytes:,}"
            lines.append(
                f"peak memory of a step: {progress.predicted_peak_bytes:,} bytes predicted, "
                f"{progress.measured_peak_bytes:,} measured{budget}"
            )
        if progress.best_epoch is not None:
            lines.append(f"best after epoch {progress.best_epoch + 1}: loss {progress.best_loss:.4f}; kept as best")
        lines.append(
            f"{progress.stopped} after {progress.step} steps in {progress.seconds:.1f} s: loss {loss}{accuracy}"
        )
        # Last is what a reader looks for first: the end of the text is what a terminal shows.
        return "\n".join([f"weights sha256 {self.weights_sha256}", f"run {self.folder}", *map(wrap, lines)])
