"""What the records of a run say: its evaluations, curves, and confusion matrix.

In: the lines of the records, which anybody may have written: what is no number, or not a matrix, is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from undertow.report.rank_times import StepOfRanks, read_step_of_ranks
from undertow.report.run_confusion import MAX_CLASSES
from undertow.report.run_curves import Evaluated, Points

VALIDATION, TEST, RANKS = "validation", "test", "ranks"
KNOWN = ("step", "kind", "loss", "accuracy", "train_loss", "epoch", "confusion")
CURVES = (("Learning rate", "lr"), ("Norm of the gradients", "gradient_norm"))


class RunRecords:
    """The records, read."""

    def __init__(self, lines: Sequence[dict[str, Any]]) -> None:
        self._lines = lines

    @cached_property
    def judging(self) -> str:
        """The data that epochs were judged by."""
        return VALIDATION if any(line.get("kind") == VALIDATION for line in self._lines) else TEST

    @cached_property
    def evaluations(self) -> list[Evaluated]:
        """The evaluations that epochs were judged by."""
        return [
            Evaluated(
                line["step"],
                line["epoch"],
                line["train_loss"],
                line["loss"],
                line["accuracy"] if is_number(line.get("accuracy")) else None,
                _metrics(line),
            )
            for line in self._of(self.judging)
            if all(is_number(line.get(name)) for name in ("epoch", "train_loss", "loss"))
        ]

    @property
    def last_test(self) -> str | None:
        """The numbers of the last evaluation on the test data."""
        line = next((line for line in reversed(list(self._of(TEST))) if is_number(line.get("loss"))), None)
        if line is None:
            return None
        shown = [f"loss {line['loss']:.4f}"]
        shown += [f"accuracy {line['accuracy']:.2%}"] if is_number(line.get("accuracy")) else []
        return ", ".join([*shown, *(f"{name} {value:.4g}" for name, value in _metrics(line).items())])

    @property
    def ranks(self) -> StepOfRanks | None:
        """The step over ranks that was recorded last."""
        found = (read_step_of_ranks(line.get(RANKS)) for line in reversed(list(self._of(RANKS))))
        return next((step for step in found if step is not None), None)

    def curve(self, kind: str, name: str) -> Points:
        """A number of each record of a kind, at its step."""
        return [(float(line["step"]), float(line[name])) for line in self._of(kind) if is_number(line.get(name))]

    def curves(self) -> list[tuple[str, Points]]:
        """What else changed over the run, by its title."""
        found = [(title, self.curve("train", name)) for title, name in CURVES]
        found.append(("Examples a second, evaluation included", self._rates()))
        return [
            (title, points)
            for title, points in found
            if len({value for _, value in points}) > 1 and min(value for _, value in points) >= 0
        ]

    def confusion(self, best_step: int | None) -> tuple[str, list[list[int]]] | None:
        """The matrix of the best weights on the test data, else after the best epoch, else after the last; and of what.

        The best weights are tested at the end of a run that validation data judged.
        """
        tested = [line for line in self._of(TEST) if self.judging == VALIDATION]
        judged = sorted(self._of(self.judging), key=lambda line: line["step"] == best_step)
        for line in reversed([*judged, *tested]):
            if _is_matrix(line.get("confusion")):
                kind = line["kind"]
                is_best = kind != self.judging or line["step"] == best_step
                weights = "the best weights" if is_best else f"the weights after step {line['step']}"
                return f"{kind.capitalize()} data, {weights}.", line["confusion"]
        return None

    def _of(self, kind: str) -> Iterator[dict[str, Any]]:
        return (line for line in self._lines if line.get("kind") == kind)

    def _rates(self) -> Points:
        """Examples a second between one evaluation and the next."""
        lines = [line for line in self._of("speed") if all(is_number(line.get(n)) for n in ("examples", "seconds"))]
        pairs = zip([{"examples": 0, "seconds": 0.0}, *lines], lines, strict=False)
        return [
            (float(line["step"]), (line["examples"] - before["examples"]) / (line["seconds"] - before["seconds"]))
            for before, line in pairs
            if line["examples"] > before["examples"] and line["seconds"] > before["seconds"]
        ]


def _metrics(line: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in line.items() if name not in KNOWN and is_number(value)}


def is_number(value: Any) -> bool:
    """Whether it can be drawn and printed."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_matrix(value: Any) -> bool:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CLASSES:
        return False
    return all(
        isinstance(row, list)
        and len(row) == len(value)
        and all(type(count) is int and 0 <= count < 2**53 for count in row)
        for row in value
    )
