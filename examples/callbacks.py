"""Callbacks for `undertow train --callbacks examples/callbacks.py`: a run's numbers, sent on to another tracker.

Here the tracker is a CSV file. Any client goes in its place: make it in `on_start`, hand it each record, close it in
`on_end`.
"""

import csv
from pathlib import Path
from typing import Any

PATH = Path("tracked.csv")


def on_start(config: dict[str, Any]) -> None:
    """The run begins, or goes on: `config` has its options."""
    if not PATH.exists():
        _write("step", "kind", "loss", "learning rate or accuracy")


def on_step(record: dict[str, Any]) -> None:
    """An update was made."""
    _write(record["step"], "train", record["loss"], record["lr"])


def on_evaluation(record: dict[str, Any]) -> bool:
    """The model was evaluated. To return True ends the run: here where the accuracy is high enough."""
    _write(record["step"], record["kind"], record["loss"], record["accuracy"])
    return record["accuracy"] is not None and record["accuracy"] > 0.995


def on_end(result: dict[str, Any]) -> None:
    """The run has ended: `result` is what `undertow train --json` prints."""
    print(f"tracked in {PATH}; best loss {result['best_loss']}")


def _write(*row: Any) -> None:
    with PATH.open("a", newline="") as file:
        csv.writer(file).writerow(row)
