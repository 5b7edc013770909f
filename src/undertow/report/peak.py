"""What the bytes at the fullest moment of a Plan are. In: a Timeline. Out: a Peak; its parts sum to the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from undertow.ir import Task
from undertow.report.inspection import Site
from undertow.report.timeline import INPUT_ROLES, Life, Role, Timeline, describe, site_of

NUM_LARGEST = 12
WORKSPACE = "workspace"


@dataclass(frozen=True)
class LiveStorage:
    """One storage while it is alive: what is in it, from which operation to which, and why."""

    value: str
    type: str
    made_by: Site
    role: Role
    num_bytes: int
    first: int
    last: int
    why: str


@dataclass(frozen=True)
class Peak:
    """`parts` are bytes by what they are, in a fixed order; `largest` are the biggest storages among them."""

    position: int
    at: Site | None
    num_bytes: int
    parts: tuple[tuple[str, int], ...]
    largest: tuple[LiveStorage, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "position": self.position,
            "at": None if self.at is None else asdict(self.at),
            "num_bytes": self.num_bytes,
            "parts": dict(self.parts),
            "largest": [asdict(item) | {"role": item.role.value} for item in self.largest],
        }


def find_peak(timeline: Timeline) -> Peak:
    """The first moment at which most bytes are alive."""
    plan = timeline.plan
    position = plan.live_bytes.index(plan.peak_bytes) if plan.live_bytes else -1
    alive = [life for life in timeline.lives if life.first <= position <= life.last]
    largest = sorted(alive, key=lambda life: (-life.num_bytes, life.first, life.number))[:NUM_LARGEST]
    return Peak(
        position=position,
        at=site_of(timeline.nodes[position]) if position >= 0 else None,
        num_bytes=plan.peak_bytes,
        parts=tuple(parts_at(timeline, position, alive).items()),
        largest=tuple(live_storage(timeline, life) for life in largest if life.num_bytes),
    )


def parts_at(timeline: Timeline, position: int, alive: Sequence[Life]) -> dict[str, int]:
    """Bytes by what they are while one operation runs; held bytes are those in the plan."""
    parts = {name: size for name, size in timeline.plan.held.items() if size}
    for role in Role:
        if role not in INPUT_ROLES.values():
            size = sum(life.num_bytes for life in alive if timeline.roles[life.number] is role)
            if size:
                parts[role.value] = parts.get(role.value, 0) + size
    workspace = timeline.plan.tables.workspace_bytes[position] if position >= 0 else 0
    return parts | ({WORKSPACE: workspace} if workspace else {})


def live_storage(timeline: Timeline, life: Life) -> LiveStorage:
    """A storage as it is shown to a reader."""
    role = timeline.roles[life.number]
    if role in INPUT_ROLES.values():
        item = timeline.inputs[life.number]
        site = Site(item.kind.value, item.path.rpartition(".")[0], "")
        return LiveStorage(
            item.path, str(life.root.type), site, role, life.num_bytes, life.first, life.last, _why_input(role)
        )
    content = life.content
    if role is Role.KEPT:
        # The backward pass may write over it later, but it is kept for what was there before.
        content = timeline.content_before(life, timeline.boundary)
    maker = timeline.makers.get(content.name)
    site = site_of(maker) if maker is not None else Site("cotangent", "", "")
    return LiveStorage(
        content.name, str(content.type), site, role, life.num_bytes, life.first, life.last, _why(timeline, life, role)
    )


def _why_input(role: Role) -> str:
    return "held during the whole step: the model's own" if role is not Role.BATCH else "held during the whole step"


def _why(timeline: Timeline, life: Life, role: Role) -> str:
    """Why the storage is still there, in a few words."""
    last_reader = life.readers[-1] if life.readers else None
    reader = describe(site_of(timeline.nodes[last_reader])) if last_reader is not None else ""
    if role is Role.GRADIENT:
        return f"gradient of {timeline.gradient_of[life.number]}, handed over when the step ends"
    if role is Role.OUTPUT or not life.is_freed:
        return "handed to the user when the step ends"
    if last_reader is None:
        return "a result that nothing reads: freed after the operation that makes it"
    if role is Role.KEPT:
        late = [position for position in life.readers if position >= timeline.boundary]
        names = list_names(list(dict.fromkeys(describe(site_of(timeline.asker(position))) for position in late)))
        if timeline.is_source(life):
            return f"kept: {names} runs again from it, last at operation {last_reader}"
        return f"kept: the derivative of {names} reads it, last at operation {last_reader}"
    if role is Role.CODE and timeline.nodes[life.writers[0]].task is Task.RECORD_STATE:
        return f"the generator's state, under which {reader} runs again at operation {last_reader}"
    if role is Role.CODE:
        return f"stored instead of something larger until {reader} reads it at operation {last_reader}"
    if role is Role.RECOMPUTED:
        return f"made again at operation {life.first}, last read by {reader} at operation {last_reader}"
    return f"last read by {reader} at operation {last_reader}"


def list_names(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
