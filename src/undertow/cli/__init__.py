"""The command line: `undertow train` and the other commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

INTERRUPTED = 130  # `exits.INTERRUPTED`, which is not imported yet


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Ctrl-C is quiet from here on, also while libraries are imported."""
    try:
        try:
            from undertow.cli.commands import main as run_command
        except ModuleNotFoundError as error:  # what the commands themselves are made with
            from undertow.cli.exits import WRONG_CALL
            from undertow.cli.printing import report_missing

            report_missing(error, "--json" in (sys.argv if arguments is None else arguments))
            return WRONG_CALL
        return run_command(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
