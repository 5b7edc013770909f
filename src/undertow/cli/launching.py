"""`undertow train --parallel data=4` without torchrun: starts the ranks on this machine and looks after them.

In: the words of the command, how many ranks. Out: the exit code of the job. The launcher has the store, on a socket
that it has bound to the loopback, so no port is used twice, and the store outlives every rank. It sees at once how a
rank has ended, tells the others, and says it in one message. It starts the ranks again if the user wants that.

A rank is a process of a session of its own: Ctrl-C reaches the launcher alone, which passes it on to rank 0, and rank 0
decides when all stop. Ranks are killed by the kernel when the launcher is gone, however it ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from undertow.cli.exits import (
    BAD_DATA,
    CHECK_FAILED,
    CLOSED_PIPE,
    DONE,
    INTERRUPTED,
    NO_FOLDER,
    NOT_FINITE,
    RANK_LOST,
    TERMINATED,
    WRONG_CALL,
)
from undertow.cli.printing import STOPPED, report_error, write
from undertow.ranks.started import LAUNCHER, NAMESPACE
from undertow.train.config import TrainConfig

if TYPE_CHECKING:
    from undertow.ranks.watch import Report, Reports

LOOPBACK = "127.0.0.1"
LOOK_S = 0.05
# Who has heard that a rank is lost ends by itself; then it is killed.
ENDING_S = 10.0
SAID_BY_RANK_0 = (CHECK_FAILED, WRONG_CALL, BAD_DATA, NOT_FINITE, NO_FOLDER, INTERRUPTED, CLOSED_PIPE, TERMINATED)
PR_SET_PDEATHSIG = 1  # of prctl, in linux/prctl.h


def end_with_launcher() -> None:
    """For a rank: from now on the kernel kills this process when its launcher is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[LAUNCHER]):  # it was gone before
        os._exit(RANK_LOST)


def write_words(model: str | None, given: dict[str, Any]) -> list[str]:
    """The words of `undertow train` for options as the command line has read them."""
    words = ["train"] if model is None else ["train", model]
    for name, value in given.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words.append(f"--{option}={value}")
    return words


def run_job(words: Sequence[str], settings: TrainConfig, folder: Path, is_resumed: bool, is_json: bool) -> int:
    """Run the ranks to the end of the job; `words` start it, without the number of ranks."""
    mesh, num_left = settings.mesh, settings.max_restarts
    while True:
        with _Started([*words, f"--parallel={mesh}"], mesh.num_ranks) as started:
            report = started.look_after()
        if started.is_stopped:
            report_error(STOPPED, is_json)
            return INTERRUPTED
        code = started.exit_code()
        if code != RANK_LOST:
            return code
        checkpoint = folder / "checkpoint.safetensors"
        if not num_left or started.first_signal:
            go_on = f"go on with: undertow train --resume {folder}" if checkpoint.exists() else "nothing was saved yet"
            report_error(f"{report}; {go_on}", is_json)
            return RANK_LOST
        num_left -= 1
        if settings.min_ranks is not None and mesh.data > 1:
            smaller = replace(mesh, data=mesh.data - 1)
            mesh = smaller if smaller.num_ranks >= settings.min_ranks else mesh
        if not is_resumed and (folder / "config.json").exists():
            words = ["train", f"--resume={folder}", *(["--json"] if is_json else [])]
        how = "from the last checkpoint" if checkpoint.exists() else "from the beginning"
        write(f"undertow: {report}; {mesh.num_ranks} ranks start again {how}\n", sys.stderr)


class _Started:
    """The ranks of a job, running."""

    def __init__(self, words: Sequence[str], num_ranks: int) -> None:
        self._words, self._num_ranks = words, num_ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self.first_signal = 0  # that asked for an end
        self.is_stopped = False  # by a second Ctrl-C
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Started:
        listener = socket.socket()
        listener.bind((LOOPBACK, 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._pass_on)
        try:
            for rank in range(self._num_ranks):
                self._processes.append(self._start(rank, port))
            self._store = _open_store(listener, port)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        self._end()

    def look_after(self) -> Report | None:
        """Wait until all ranks have ended; what was wrong with the first that was lost."""
        from undertow.ranks.watch import OVER, Report

        deadline, report = None, None
        while any(process.poll() is None for process in self._processes):
            time.sleep(LOOK_S)
            if self.is_stopped:
                return None
            if report is None:
                report = self._reports.find()
            for rank, process in enumerate(self._processes):
                code = process.poll()
                if report is None and code is not None:
                    number, doing = self._reports.beat_of(rank)
                    if number != OVER:
                        report = self._reports.add(Report(rank, doing, _how_it_ended(code)))
            if report is not None:
                deadline = deadline or time.monotonic() + ENDING_S
                left = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
                # One that fails by itself still says so.
                if time.monotonic() > deadline or (left == [report.rank] and not report.is_own):
                    return report
        # A rank may also be killed after its last word, when all is done.
        return report or self._reports.find() or Report(0, "", _how_it_ended(self._processes[0].returncode))

    def exit_code(self) -> int:
        """Rank 0's, if it has ended by itself and has said why; else the code for a rank that is lost."""
        from undertow.ranks.watch import OVER

        code = self._processes[0].returncode
        number, _ = self._reports.beat_of(0)
        if code == DONE:
            return DONE if number == OVER else RANK_LOST
        return code if code in SAID_BY_RANK_0 else RANK_LOST

    @property
    def _reports(self) -> Reports:
        from torch.distributed import PrefixStore

        from undertow.ranks.watch import Reports

        return Reports(PrefixStore(NAMESPACE, self._store))

    def _start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._num_ranks),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            LAUNCHER: str(os.getpid()),
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
            # The ranks find the same modules, and nothing in the current folder that the launcher does not find.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "undertow", *self._words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            start_new_session=True,
        )

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.is_stopped = number == signal.SIGINT == self.first_signal
        self.first_signal = self.first_signal or number
        if not self.is_stopped and self._processes and self._processes[0].poll() is None:
            self._processes[0].send_signal(number)

    def _end(self) -> None:
        """Kill the ranks that are left, with the processes that they have started."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for number, before in self._before.items():
            signal.signal(number, before)


def _open_store(listener: socket.socket, port: int) -> Any:
    """A store on a socket that listens already; it is the store's from then on."""
    from torch.distributed import TCPStore

    store = TCPStore(
        LOOPBACK, port, None, True, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=listener.fileno()
    )
    listener.detach()
    return store


def _how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
