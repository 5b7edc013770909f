"""The exit codes of the commands. In: an error. Out: its code."""

from __future__ import annotations

from undertow.errors import (
    ClosedPipe,
    DataError,
    FolderError,
    InfeasibleBudget,
    NotFinite,
    OutputError,
    RankLost,
    UndertowError,
)

DONE = 0
CHECK_FAILED = 1  # the check failed, or the budget cannot be met
WRONG_CALL = 2  # an unknown model, option or config key, a model that cannot be run
BAD_DATA = 3  # data or weights are missing, damaged, or refused
NOT_FINITE = 4  # the loss or a weight is not finite
NO_FOLDER = 5  # the run's folder, or stdout, cannot be written
RANK_LOST = 6  # another process of the job is gone, stands still, or has failed
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT, as shells do
CLOSED_PIPE = 141  # 128 + SIGPIPE, the signal that ends other tools here
TERMINATED = 143  # 128 + SIGTERM


def exit_code(error: UndertowError) -> int:
    """The code for an error that ends a command."""
    codes: dict[type[UndertowError], int] = {
        InfeasibleBudget: CHECK_FAILED,
        DataError: BAD_DATA,
        NotFinite: NOT_FINITE,
        FolderError: NO_FOLDER,
        OutputError: NO_FOLDER,
        ClosedPipe: CLOSED_PIPE,
        RankLost: RANK_LOST,
    }
    return codes.get(type(error), WRONG_CALL)
