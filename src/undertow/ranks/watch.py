"""The watch: every rank says all the time that it lives and what it does, and notices who does not.

In: the store that all ranks share. Out: RankLost, raised in the rank that waits for something, with who is gone, what
that rank did last, and why.

A thread of each rank writes a number once a second, with what the rank does. The number grows as long as the rank's
own thread takes time of a processor, which who waits for others does too. A rank whose number stands still for the
whole bound is lost: it was stopped, it hangs, or its machine is gone. A loop that never ends is not noticed. A rank
that fails by itself writes why before it ends, so that the others tell the same story. The first report counts: when
one rank ends, others that were waiting for it end too, and they are not the cause.

Where a link is down, nothing breaks, and the store does not answer for as long as TCP tries again, which is a quarter
of an hour. So the thread alone asks the store, and who waits for others sees how long ago it asked.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from dataclasses import dataclass

from torch.distributed import PrefixStore, Store

from undertow.doing import find_operation
from undertow.errors import RankLost

BEAT_S = 1.0
REPORTED_WITHIN_S = 3.0  # a rank that ends by itself says so first; this is time enough for others to read it
OVER = "over"  # instead of a number, by a rank that is done
FAILED = "failed with"
MAX_TEXT = 500  # characters of what a rank says


@dataclass(frozen=True)
class Report:
    """Who is lost, and what is known about it."""

    rank: int
    doing: str
    cause: str

    @property
    def is_own(self) -> bool:
        """Whether the rank itself has said that it fails, and why: it ends by itself."""
        return self.cause.startswith(FAILED)

    def __str__(self) -> str:
        doing = f" (its last word: {self.doing})" if self.doing else ""
        return f"rank {self.rank} {self.cause}{doing}"


class Reports:
    """What the ranks say by the store; also for a launcher, which has the store and is no rank."""

    def __init__(self, store: Store) -> None:
        self.store = PrefixStore("watch", store)

    def find(self) -> Report | None:
        """The report about a lost rank, if there is one."""
        return _read_report(self.store.get("lost")) if self.store.check(["lost"]) else None

    def add(self, report: Report) -> Report:
        """The first report of all is everybody's."""
        text = json.dumps([report.rank, report.doing[:MAX_TEXT], report.cause[:MAX_TEXT]])
        return _read_report(self.store.compare_set("lost", "", text))

    def beat_of(self, rank: int) -> tuple[str, str]:
        """A rank's number, or OVER, and what it said last that it does; empty before it has begun to beat."""
        key = f"beat {rank}"
        return _read_beat(self.store.get(key).decode(errors="replace")) if self.store.check([key]) else ("", "")


class Watch:
    """One rank's part of the watch."""

    def __init__(self, store: Store, rank: int, size: int, bound_s: float) -> None:
        # A connection of its own: another thread may wait for something by the first one.
        self._reports = Reports(store.clone())  # type: ignore[attr-defined]
        self._store = self._reports.store
        self.rank, self.size, self.bound_s = rank, size, bound_s
        self.doing = ""  # what this rank does, in words
        self.wish = ""  # why this rank wants the job to end
        self.wishes = ""  # why another rank does; rank 0 reads it, and decides
        self._lost: Report | None = None
        self._is_over = threading.Event()
        # The clock of the thread that does the work.
        self._worker = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._worker)
        self._number, self._spent_s = 0, -1.0
        self._is_wanted, self._is_said = threading.Event(), threading.Event()  # a beat at once; and it was sent
        self._asked_s: float | None = None  # when the thread asked the store what is not answered yet
        self.num_patient = 0  # of contexts in which the thread may wait for other processes, such as those that measure
        self._thread = threading.Thread(target=self._run, name="undertow watch", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self.beat()
        self._thread.start()

    def check(self) -> None:
        """Raise RankLost if a rank was given up, or if the store cannot be reached."""
        asked_s = self._asked_s
        if self._lost is None and asked_s is not None and time.monotonic() - asked_s > self.bound_s:
            self._lost = Report(0, "", f"cannot be reached: the store has not answered for {self.bound_s:.0f} s")
        if self._lost is not None:
            raise RankLost(str(self._lost), self._lost.rank)

    def report_own(self, error: BaseException) -> None:
        """Tell the others that this rank ends, and why."""
        doing = _join(self.doing, find_operation(error.__traceback__))
        self._report(Report(self.rank, doing, f"{FAILED} {type(error).__name__}: {first_line(error)}"))

    def explain(self, error: BaseException, peer: int | None) -> RankLost:
        """The error for a broken connection: whoever is reported soon, else the rank at its other end."""
        deadline = time.monotonic() + REPORTED_WITHIN_S
        while self._lost is None and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(BEAT_S / 10)
        if self._lost is None and peer is not None:
            self._report(Report(peer, self._doing_of(peer), "is gone: its connection broke"))
        if self._lost is not None:
            return RankLost(str(self._lost), self._lost.rank)
        return RankLost(f"a connection to another rank broke: {first_line(error)}", None)

    def _doing_of(self, rank: int) -> str:
        """What a rank said last that it does."""
        try:
            return self._reports.beat_of(rank)[1]
        except RuntimeError:
            return ""

    def stop(self) -> None:
        """End the watch, for a rank that is done: from now on nobody misses it."""
        self._is_over.set()
        self._is_wanted.set()
        self._thread.join(self.bound_s if self._lost is None else BEAT_S)
        if self._lost is None and not self._thread.is_alive():
            self._store.set(f"beat {self.rank}", json.dumps([OVER, ""]))

    def _run(self) -> None:
        seen: dict[int, tuple[str, float]] = {}
        while self._lost is None:
            self._is_wanted.wait(BEAT_S)
            self._is_wanted.clear()
            if self._is_over.is_set():
                return
            self._asked_s = time.monotonic()
            try:
                self.beat()
                self._is_said.set()
                if self.wish:
                    self._store.set("wish", self.wish[:MAX_TEXT])
                self._look(seen)
            except RuntimeError as error:  # the store is gone, and with it the rank that has it
                self._lost = self._lost or Report(0, "", f"keeps the store, which is gone ({first_line(error)})")
            self._asked_s = None

    def beat(self) -> None:
        """Say what this rank does; the number grows if its thread has done anything since the last time."""
        spent_s = self._read_clock()
        self._number += spent_s != self._spent_s or self.num_patient > 0
        self._spent_s = spent_s
        doing = _join(self.doing, find_operation(sys._current_frames().get(self._worker)))
        self._store.set(f"beat {self.rank}", json.dumps([self._number, doing]))

    def say(self, doing: str) -> None:
        """Say at once what this rank does from now on."""
        self.doing = doing
        self._is_said.clear()
        self._is_wanted.set()
        self._is_said.wait(BEAT_S)  # not for longer: the store may not answer

    def _read_clock(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread has ended, and another one may go on with its work
            return time.process_time()

    def _look(self, seen: dict[int, tuple[str, float]]) -> None:
        """Read the others' numbers, and a report if there is one."""
        self._lost = self._reports.find()
        if self._lost is not None:
            return
        if self.rank == 0 and self._store.check(["wish"]):
            self.wishes = self._store.get("wish").decode(errors="replace")
        now = time.monotonic()
        for other in range(self.size):
            if other == self.rank:
                continue
            number, doing = self._reports.beat_of(other)
            if number == OVER:
                continue
            before, since = seen.get(other, ("", now))
            if number != before:
                seen[other] = number, now
            elif now - since > self.bound_s:
                self._report(Report(other, doing, f"has not moved for {now - since:.0f} s"))

    def _report(self, report: Report) -> None:
        """Give the others this report, unless there is one; not longer than the store needs if it can be reached."""
        adding = threading.Thread(target=self._add, args=(report,), daemon=True)
        adding.start()
        adding.join(REPORTED_WITHIN_S)
        self._lost = self._lost or report

    def _add(self, report: Report) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._lost = self._reports.add(report)


def _join(doing: str, operation: str) -> str:
    return f"{doing}, {operation}" if operation else doing


def _read_beat(text: str) -> tuple[str, str]:
    try:
        number, doing = json.loads(text)
    except ValueError:
        return text, ""
    return str(number), str(doing)[:MAX_TEXT]


def _read_report(data: bytes) -> Report:
    rank, doing, cause = json.loads(data.decode(errors="replace"))
    return Report(int(rank), str(doing)[:MAX_TEXT], str(cause)[:MAX_TEXT])


def first_line(error: BaseException) -> str:
    """An error in one line; PyTorch's may have a stack of frames below."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
