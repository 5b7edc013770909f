"""What the commands write: results on stdout, errors as one line on stderr, pages into files."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, TextIO

from undertow.errors import CallError, ClosedPipe, OutputError


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


def write_page(path: str, text: str) -> None:
    """Write a page to a file."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CallError(f"--html {path}: {error.strerror}") from None


def _finite(data: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(data, dict):
        return {name: _finite(item) for name, item in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(item) for item in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
