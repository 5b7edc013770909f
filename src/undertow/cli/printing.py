"""What the commands write: results on stdout, errors as one line on stderr, pages into files."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from undertow.cli.busy_line import ERASE
from undertow.errors import ClosedPipe, InfeasibleBudget, OutputError

OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}  # where they differ from the module

STOPPED = "stopped immediately; the last checkpoint, if there is one, is unharmed"


def write(text: str, stream: TextIO) -> None:
    """Write text to stdout or stderr; raises OutputError if that fails."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        # When Python ends, it would try again to write the rest of the stream, and complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise ClosedPipe("nobody reads the output any more") from None
        raise OutputError(f"{stream.name.strip('<>')} cannot be written: {error.strerror}") from None


def print_result(result: Any, is_json: bool) -> None:
    """Print a result as text, or as one JSON object."""
    print_data(result.to_dict()) if is_json else print(result)


def print_data(data: Any) -> None:
    """Print plain data as JSON."""
    print(json.dumps(_finite(data), indent=2, allow_nan=False))


def report_error(message: str, is_json: bool) -> None:
    """Print an error as one line on stderr."""
    line = " ".join(message.split())
    write((json.dumps({"error": line}) if is_json else f"undertow: {line}") + "\n", sys.stderr)


def report_missing(error: ModuleNotFoundError, is_json: bool) -> None:
    """Print which library is missing, by the name that pip knows it by."""
    name = (error.name or str(error)).partition(".")[0]
    report_error(
        f"{name} is not installed, and Undertow needs it: pip install {DISTRIBUTIONS.get(name, name)}", is_json
    )


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Undertow's own warnings are one line on stderr; those of other code say where they come from, as ever."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_line(message: Any, category: Any, filename: str, *rest: Any, **named: Any) -> None:
            if not filename.startswith(OWN_FOLDER):
                return show(message, category, filename, *rest, **named)
            erased = ERASE if sys.stderr.isatty() else ""
            write(f"{erased}undertow: warning: {' '.join(str(message).split())}\n", sys.stderr)

        warnings.showwarning = show_line
        yield


def report_refusal(refusal: InfeasibleBudget, is_json: bool) -> None:
    """Print a refused budget: as an object on stdout, or as a short table on stderr whose last line is the verdict."""
    from undertow.report.refusal import print_refusal, refusal_to_dict

    if is_json:
        print_data(refusal_to_dict(refusal))
    else:
        *table, verdict = print_refusal(refusal).rsplit("\n\n", 1)
        write("\n\n".join([*table, f"undertow: {' '.join(verdict.split())}\n"]), sys.stderr)


def check_page(path: str, option: str = "--html") -> None:
    """Raise OutputError if a file cannot be written there; said before minutes of work, not after."""
    is_new = not os.path.exists(path)
    try:
        with open(path, "ab"):
            pass
        if is_new:
            os.unlink(path)
    except OSError as error:
        raise OutputError(f"{option} {path} cannot be written: {error.strerror}") from None


def write_page(path: str, text: str) -> None:
    """Write a page to a file."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OutputError(f"--html {path} cannot be written: {error.strerror}") from None


def _finite(data: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(data, dict):
        return {name: _finite(item) for name, item in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(item) for item in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
