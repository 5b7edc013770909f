"""What the commands write: results on stdout, errors as one line on stderr, pages into files."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, TextIO

from undertow.errors import ClosedPipe, InfeasibleBudget, OutputError


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


def report_refusal(refusal: InfeasibleBudget, is_json: bool) -> None:
    """Print a refused budget: as an object on stdout, or as a short table on stderr whose last line is the verdict."""
    from undertow.report.refusal import print_refusal, refusal_to_dict

    if is_json:
        print_data(refusal_to_dict(refusal))
    else:
        *table, verdict = print_refusal(refusal).rsplit("\n\n", 1)
        write("\n\n".join([*table, f"undertow: {' '.join(verdict.split())}\n"]), sys.stderr)


def check_page(path: str) -> None:
    """Raise OutputError if a page cannot be written there; said before minutes of planning, not after."""
    is_new = not os.path.exists(path)
    try:
        with open(path, "ab"):
            pass
        if is_new:
            os.unlink(path)
    except OSError as error:
        raise OutputError(f"--html {path} cannot be written: {error.strerror}") from None


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
