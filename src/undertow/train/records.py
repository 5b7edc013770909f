"""The records of a run: JSON lines, and the same numbers as TensorBoard events.

A resumed run first drops what was recorded after the step that it resumes from.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

from undertow.durable import write_durably
from undertow.errors import FolderError
from undertow.report.run_records import RANKS
from undertow.train.checkpoint import Progress
from undertow.train.events import EventWriter
from undertow.train.folder import RunFolder


class NoRecords:
    """Those of a rank that writes none."""

    def add(self, step: int, kind: str, tables: Mapping[str, Any] | None = None, **numbers: Any) -> None:
        """Add nothing."""

    def flush(self) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""


class Records:
    """Open records. `flush` writes them to the files, before each checkpoint that relies on them."""

    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        """An evaluation after the step of `progress` is recorded if the checkpoint has it: it will not be repeated."""
        is_resumed, first_step = folder.metrics_path.exists(), progress.step
        if is_resumed:
            last = {"train": first_step, RANKS: first_step}
            for kind, tested in (("test", progress.test_step), ("validation", progress.validation_step)):
                last[kind] = first_step if tested == first_step else first_step - 1
            last["speed"] = max(last["test"], last["validation"])
            valid = [
                record for record in folder.read_metrics() if record["step"] <= last.get(str(record.get("kind")), -1)
            ]
            text = "".join(json.dumps(record) + "\n" for record in valid)
            write_durably(folder.metrics_path, lambda file: file.write(text.encode()))
        self._folder = folder
        now = time.time()
        try:
            self._lines = open(folder.metrics_path, "a", encoding="utf-8")  # noqa: SIM115  open while the run lasts
            name = f"events.out.tfevents.{now:.6f}.{os.getpid()}"
            self._file = open(folder.path / name, "wb")  # noqa: SIM115
        except OSError as error:
            raise FolderError(f"records cannot be written in {folder.path}: {error.strerror}") from None
        self._events = EventWriter(self._file, now, first_step + 1 if is_resumed else None)

    def add(self, step: int, kind: str, tables: Mapping[str, Any] | None = None, **numbers: Any) -> None:
        """Add a line; `kind` is train, validation, test, speed or ranks. `tables` are no numbers: no event has them.

        JSON has no infinity and no NaN: such a number is left out.
        """
        present = {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
        line = {"step": step, "kind": kind, **present, **(tables or {})}
        self._write(json.dumps(line) + "\n", step, kind, present)

    def _write(self, line: str, step: int, kind: str, numbers: dict[str, Any]) -> None:
        with self._reporting():
            self._lines.write(line)
            now = time.time()
            for name, value in numbers.items():
                self._events.add_scalar(f"{kind}/{name}", value, step, now)

    def flush(self) -> None:
        """Write all lines to the files."""
        with self._reporting():
            self._lines.flush()
            self._file.flush()

    def close(self) -> None:
        """Close the files; `flush` has already reported what could not be written."""
        for file in (self._lines, self._file):
            with contextlib.suppress(OSError):
                file.close()

    @contextlib.contextmanager
    def _reporting(self) -> Any:
        try:
            yield
        except OSError as error:
            raise FolderError(
                f"records cannot be written in {self._folder.path}: {error.strerror}; "
                f"the last good checkpoint is unharmed"
            ) from None
