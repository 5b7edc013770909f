"""What the command's exit code says."""

from __future__ import annotations

from undertow.errors import DataError, FolderError, InfeasibleBudget, NotFinite, UndertowError

DONE = 0
CHECK_FAILED = 1  # the check failed, or the budget cannot be met
WRONG_CALL = 2  # an unknown model, option or config key, a model that cannot be run
BAD_DATA = 3  # data or weights are missing, damaged, or refused
NOT_FINITE = 4  # the loss is no number any more
NO_FOLDER = 5  # the run's folder cannot be written
INTERRUPTED = 130  # Ctrl-C; as shells count it, 128 + SIGINT


def exit_code(error: UndertowError) -> int:
    """The code for an error that ends a command."""
    codes: dict[type[UndertowError], int] = {
        InfeasibleBudget: CHECK_FAILED,
        DataError: BAD_DATA,
        NotFinite: NOT_FINITE,
        FolderError: NO_FOLDER,
    }
    return codes.get(type(error), WRONG_CALL)
