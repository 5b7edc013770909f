"""A step over the ranks of a job: when each computes, sends and waits, as planned and as measured.

In: for each rank the rows of its plan, and what one recorded step did. Out: `StepOfRanks`: stretches of time per rank
and lane, with shares and bytes, as text and as plain data. A run keeps it among its records, which anybody may have
written: what is no such record is passed over.

Planned times of several ranks come from the lanes of all of them together: a transfer begins when every rank has come
so far. Clocks of ranks differ; each rank counts from a message that all of them have just got.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from undertow.ir import format_bytes
from undertow.ir.operation import COMPUTING
from undertow.ir.step_times import Row
from undertow.lanes import Activity, find_times
from undertow.report.columns import align, wrap

SENDING, WAITING = "sending", "waiting"
KINDS = (COMPUTING, WAITING, SENDING)
MAX_RANKS, MAX_STRETCHES = 4096, 100_000


@dataclass(frozen=True)
class Stretch:
    """What a rank did from one moment of a step to another; `about` says what was sent, or waited for."""

    kind: str
    start_us: float
    end_us: float
    about: str = ""


@dataclass(frozen=True)
class RankTimes:
    """What one rank did in a step. Several transfers may be on their way at once."""

    stretches: tuple[Stretch, ...]
    sent_bytes: int

    @property
    def end_us(self) -> float:
        """When its call ended; parameters may still be on their way."""
        return max((item.end_us for item in self.stretches if item.kind != SENDING), default=0.0)

    def busy_us(self, kind: str) -> float:
        """How long it did that; transfers at the same time count once."""
        total, now = 0.0, 0.0
        for item in sorted((item for item in self.stretches if item.kind == kind), key=lambda item: item.start_us):
            total += max(0.0, item.end_us - max(now, item.start_us))
            now = max(now, item.end_us)
        return total

    def share(self, kind: str) -> float:
        """The share of its call."""
        return self.busy_us(kind) / self.end_us if self.end_us else 0.0


@dataclass(frozen=True)
class StepOfRanks:
    """One step of all ranks."""

    predicted: tuple[RankTimes, ...]
    measured: tuple[RankTimes, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            name: [
                {
                    "end_us": rank.end_us,
                    "sent_bytes": rank.sent_bytes,
                    "idle_share": {"computing": 1 - rank.share(COMPUTING), "link": 1 - rank.share(SENDING)},
                    "stretches": [[item.kind, item.start_us, item.end_us, item.about] for item in rank.stretches],
                }
                for rank in ranks
            ]
            for name, ranks in (("predicted", self.predicted), ("measured", self.measured))
        }

    def __str__(self) -> str:
        return f"a step over {len(self.measured)} ranks\n{align(self.rows(), '<>>>>>')}\n{wrap(self.limit)}"

    def rows(self) -> list[tuple[str, ...]]:
        """The heads, and two rows for each rank; shares are those of its step."""
        found: list[tuple[str, ...]] = [("rank", "computing", "waiting", "link busy", "sent", "step")]
        for number, pair in enumerate(zip(self.predicted, self.measured, strict=True)):
            for name, rank in zip(("predicted", "measured"), pair, strict=True):
                times = [f"{rank.busy_us(kind) / 1e3:.1f} ms, {rank.share(kind):.0%}" for kind in KINDS]
                sent, end = format_bytes(rank.sent_bytes), f"{rank.end_us / 1e3:.1f} ms"
                found.append((f"{number} {name}", *times, sent, end))
        return found

    @property
    def limit(self) -> str:
        """What a step spends its time on, in a sentence."""
        slowest = max(range(len(self.measured)), key=lambda number: self.measured[number].busy_us(COMPUTING))
        rank, quickest = self.measured[slowest], min(item.busy_us(COMPUTING) for item in self.measured)
        uneven = rank.busy_us(COMPUTING) - quickest
        waiting = min(item.busy_us(WAITING) for item in self.measured)
        if uneven > max(waiting, 0.1 * rank.end_us):
            return f"rank {slowest} computes {uneven / 1e3:.1f} ms longer than the quickest rank, which waits for it"
        if waiting > 0.1 * rank.end_us:
            return f"every rank waits at least {waiting / 1e3:.1f} ms for what is sent: the link is the limit"
        return "computing is the limit: what is sent is almost hidden"


def read_step_of_ranks(data: Any) -> StepOfRanks | None:
    """The step that a record holds; None where it holds none."""
    try:
        found = StepOfRanks(*(tuple(map(read_rank, data[name])) for name in ("predicted", "measured")))
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    number = len(found.measured)
    return found if 0 < number == len(found.predicted) <= MAX_RANKS else None


def read_rank(data: Any) -> RankTimes:
    """What one rank did, from plain data; raises one of the errors that malformed data leads to."""
    stretches = [Stretch(*item) for item in data["stretches"]]
    times = [time for item in stretches for time in (item.start_us, item.end_us)]
    if len(stretches) > MAX_STRETCHES or not all(type(time) in (int, float) and 0 <= time < 1e15 for time in times):
        raise ValueError("no times")
    if any(item.kind not in KINDS or type(item.about) is not str or item.end_us < item.start_us for item in stretches):
        raise ValueError("no stretches")
    if type(data["sent_bytes"]) is not int or data["sent_bytes"] < 0:
        raise ValueError("no bytes")
    return RankTimes(tuple(stretches), data["sent_bytes"])


def predict_ranks(outlines: Sequence[Sequence[Row]], sent_bytes: Sequence[int]) -> tuple[RankTimes, ...]:
    """When each rank computes, sends and waits, by the rows of their plans."""
    firsts = [sum(map(len, outlines[:rank])) for rank in range(len(outlines))]
    sends = [[place for place, row in enumerate(rows) if row.lane != COMPUTING and row.is_joint] for rows in outlines]
    begins: list[list[int]] = []  # for each transfer, what the ranks do right before they start it
    for number in range(min(map(len, sends))):
        before = [
            first + max((place for place in range(own[number]) if rows[place].lane == COMPUTING), default=own[number])
            for first, own, rows in zip(firsts, sends, outlines, strict=True)
        ]
        begins.append(before)
    activities: list[Activity] = []
    for rank, (first, rows) in enumerate(zip(firsts, outlines, strict=True)):
        number = 0
        for place, row in enumerate(rows):
            waits = {first + other for other in row.waits}
            if row.lane != COMPUTING and row.is_joint and number < len(begins):
                waits |= set(begins[number]) - {first + place}
                number += 1
            activities.append(Activity((rank, row.lane), row.duration_ns, tuple(sorted(waits))))
    table = find_times(activities)
    found = []
    for first, rows, own_bytes in zip(firsts, outlines, sent_bytes, strict=True):
        spans = [
            (table.starts_ns[first + place] / 1e3, table.ends_ns[first + place] / 1e3) for place in range(len(rows))
        ]
        stretches = [
            Stretch(COMPUTING if row.lane == COMPUTING else SENDING, *span, "" if row.lane == COMPUTING else row.about)
            for row, span in zip(rows, spans, strict=True)
        ]
        found.append(RankTimes((*stretches, *_find_pauses(rows, spans)), own_bytes))
    return tuple(found)


def _find_pauses(rows: Sequence[Row], spans: Sequence[tuple[float, float]]) -> list[Stretch]:
    """Where computing waits."""
    pauses, now = [], 0.0
    for row, (start, end) in zip(rows, spans, strict=True):
        if row.lane == COMPUTING:
            if start > now:
                pauses.append(Stretch(WAITING, now, start, row.about))
            now = end
    return pauses


def measured_times(
    end_us: float, waits: Sequence[tuple[str, float, float]], sends: Sequence[tuple[str, float, float]], sent_bytes: int
) -> RankTimes:
    """What one rank did in a call of so long: where it did not wait, it computed. A pause takes a microsecond."""
    stretches = [Stretch(SENDING, start, end, about) for about, start, end in sends]
    now = 0.0
    for about, start, end in sorted(waits, key=lambda item: item[1]):
        if end - start >= 1:
            stretches += [Stretch(COMPUTING, now, start), Stretch(WAITING, start, end, about)]
            now = end
    stretches.append(Stretch(COMPUTING, now, max(now, end_us)))
    return RankTimes(tuple(stretches), sent_bytes)
