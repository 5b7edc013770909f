"""The command line: `undertow train` and the other commands."""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED = 130  # `exits.INTERRUPTED`, which is not imported yet


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Ctrl-C is quiet from here on, also while libraries are imported."""
    try:
        from undertow.cli.commands import main as run_command

        return run_command(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
