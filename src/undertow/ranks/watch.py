"""The watch: every rank says all the time that it lives and what it does, and notices who does not.

In: the store that all ranks share. Out: RankLost, raised in the rank that waits for something, with who is gone, what
that rank did last, and why.

A thread of each rank writes a number that grows, with the rank's phase and operation, once a second. A rank whose
number stands still for the whole bound is lost: it was stopped, it hangs outside of Python, or its machine is gone. A
rank that fails by itself writes why before it ends, so that the others tell the same story. The first report counts:
when one rank ends, others that were waiting for it end too, and they are not the cause.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass

from torch.distributed import PrefixStore, Store

from undertow.errors import RankLost

BEAT_S = 1.0
REPORTED_WITHIN_S = 3.0  # a rank that ends by itself says so first; this is time enough for others to read it
OVER = "over"  # instead of a number, by a rank that is done
MAX_TEXT = 500  # characters of what a rank says


@dataclass(frozen=True)
class Report:
    """Who is lost, and what is known about it."""

    rank: int
    doing: str
    cause: str

    def __str__(self) -> str:
        doing = f" in {self.doing}" if self.doing else ""
        return f"rank {self.rank} {self.cause}{doing}"


class Watch:
    """One rank's part of the watch."""

    def __init__(self, store: Store, rank: int, size: int, bound_s: float) -> None:
        # A connection of its own: another thread may wait for something by the first one.
        self._store = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
        self.rank, self.size, self.bound_s = rank, size, bound_s
        self.doing = ""  # what this rank does, in words
        self._lost: Report | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="undertow watch", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._beat(0)
        self._thread.start()

    def check(self) -> None:
        """Raise RankLost if a rank was given up."""
        if self._lost is not None:
            raise RankLost(str(self._lost), self._lost.rank)

    def report_own(self, cause: str) -> None:
        """Tell the others that this rank ends, and why."""
        self._report(Report(self.rank, self.doing, cause))

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
            return _read_beat(self._store.get(f"beat {rank}").decode(errors="replace"))[1]
        except RuntimeError:
            return ""

    def stop(self) -> None:
        """End the watch, for a rank that is done: from now on nobody misses it."""
        self._is_over.set()
        self._thread.join()
        if self._lost is None:
            self._store.set(f"beat {self.rank}", json.dumps([OVER, ""]))

    def _run(self) -> None:
        seen: dict[int, tuple[str, float]] = {}
        number = 0
        while self._lost is None and not self._is_over.wait(BEAT_S):
            number += 1
            try:
                self._beat(number)
                self._look(seen)
            except RuntimeError as error:  # the store is gone, and with it the rank that has it
                self._lost = self._lost or Report(0, "", f"keeps the store, which is gone ({first_line(error)})")

    def _beat(self, number: int) -> None:
        self._store.set(f"beat {self.rank}", json.dumps([number, self.doing]))

    def _look(self, seen: dict[int, tuple[str, float]]) -> None:
        """Read the others' numbers, and a report if there is one."""
        if self._store.check(["lost"]):
            self._lost = _read_report(self._store.get("lost"))
            return
        now = time.monotonic()
        for other in range(self.size):
            if other == self.rank:
                continue
            # Who has not begun to beat yet is still joining.
            key = f"beat {other}"
            text = self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""
            number, doing = _read_beat(text)
            if number == OVER:
                continue
            before, since = seen.get(other, ("", now))
            if number != before:
                seen[other] = number, now
            elif now - since > self.bound_s:
                self._report(Report(other, doing, f"has not moved for {now - since:.0f} s"))

    def _report(self, report: Report) -> None:
        """The first report of all ranks is everybody's."""
        try:
            text = json.dumps([report.rank, report.doing[:MAX_TEXT], report.cause[:MAX_TEXT]])
            self._lost = _read_report(self._store.compare_set("lost", "", text))
        except RuntimeError:
            self._lost = self._lost or report


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
