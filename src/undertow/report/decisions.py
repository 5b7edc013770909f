"""What a Plan decided, value by value and layer by layer: kept, recomputed, encoded or written over.

Data only; `reasons.py` finds it. Every decision has its bytes, its time, a reason from an enumeration and one sentence
in plain English. Positions are indices into `plan.nodes`. A value belongs to the module whose operation wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from undertow.report.inspection import Site
from undertow.report.peak import Peak


class Reason(Enum):
    """Why a value is where it is."""

    DERIVATIVE_READS_IT = "a derivative reads it"
    RECOMPUTATION_READS_IT = "an operation that runs again reads it"
    IS_OUTPUT = "it is an output, and a derivative reads it"
    OVER_BUDGET = "with it the step would not fit the budget"
    TOGETHER_OVER_BUDGET = "with it and the others that were given up the step would not fit the budget"
    PART_OF_CHAIN = "another value is made again from it"
    NOT_FORCED = "no budget forces it"
    READ_NO_MORE = "nothing reads what was there"


@dataclass(frozen=True)
class Kept:
    """A value of the forward pass that the backward pass reads; `recompute_us` is the time to make it again."""

    value: str
    type: str
    made_by: Site
    num_bytes: int
    first: int
    last: int
    num_nodes_alive: int
    asked_for_by: tuple[Site, ...]
    recompute_us: float
    reason: Reason
    sentence: str


@dataclass(frozen=True)
class Recomputed:
    """Operations that run again, one after the other into the same memory; until then `saved_bytes` are free.

    A value that is there only to make another one again saves nothing: it would not have stayed alive anyway.
    """

    value: str
    type: str
    made_by: Site
    num_bytes: int
    saved_bytes: int
    released_after: int
    made_again_at: int
    num_operations: int
    extra_us: float
    state_bytes: int  # of the generator's recorded state, where the operation is random
    asked_for_by: tuple[Site, ...]
    reason: Reason
    sentence: str


@dataclass(frozen=True)
class Encoded:
    """A value stored in fewer bytes; `encoding` is the operation that makes the code."""

    value: str
    type: str
    made_by: Site
    encoding: str
    num_bytes: int
    code_bytes: int
    encoded_at: int
    read_at: int
    extra_us: float
    asked_for_by: tuple[Site, ...]
    reason: Reason
    sentence: str


@dataclass(frozen=True)
class WrittenOver:
    """An operation that writes its result over its argument."""

    value: str
    made_by: Site
    over: str
    num_bytes: int
    position: int
    reason: Reason
    sentence: str


@dataclass(frozen=True)
class LayerDecisions:
    """What was decided about the values of one module, submodules not included."""

    path: str
    kept: tuple[Kept, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()
    encoded: tuple[Encoded, ...] = ()
    written_over: tuple[WrittenOver, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for the backward pass as they are."""
        return sum(item.num_bytes for item in self.kept)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes saved because their values are made again."""
        return sum(item.saved_bytes for item in self.recomputed)

    @property
    def recompute_us(self) -> float:
        """The time of what runs again."""
        return sum(item.extra_us for item in self.recomputed)

    @property
    def encoded_bytes(self) -> int:
        """What the encoded values would take as they are."""
        return sum(item.num_bytes for item in self.encoded)

    @property
    def code_bytes(self) -> int:
        """What their codes take."""
        return sum(item.code_bytes for item in self.encoded)

    @property
    def code_us(self) -> float:
        """The time of encoding and decoding."""
        return sum(item.extra_us for item in self.encoded)

    @property
    def extra_us(self) -> float:
        """The time of everything that is done to save memory."""
        return self.recompute_us + self.code_us

    @property
    def written_over_bytes(self) -> int:
        """Memory that was not needed a second time."""
        return sum(item.num_bytes for item in self.written_over)

    @property
    def decided_bytes(self) -> int:
        """Bytes that there was a decision about: what is kept, given up and encoded."""
        return self.kept_bytes + self.recomputed_bytes + self.encoded_bytes

    def totals(self) -> dict[str, Any]:
        """The sums as plain data."""
        return {
            "num_kept": len(self.kept),
            "kept_bytes": self.kept_bytes,
            "num_recomputed": len(self.recomputed),
            "recomputed_bytes": self.recomputed_bytes,
            "recompute_us": self.recompute_us,
            "num_encoded": len(self.encoded),
            "encoded_bytes": self.encoded_bytes,
            "code_bytes": self.code_bytes,
            "code_us": self.code_us,
            "num_written_over": len(self.written_over),
            "written_over_bytes": self.written_over_bytes,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        names = ("kept", "recomputed", "encoded", "written_over")
        lists = {name: [_to_dict(item) for item in getattr(self, name)] for name in names}
        return {"path": self.path} | self.totals() | lists


@dataclass(frozen=True)
class Decisions:
    """All that was decided; `total` has the values of all layers, `peak` says what the bytes at the peak are.

    `modules` are the model's modules in the order in which the forward pass first runs them.
    """

    total: LayerDecisions
    peak: Peak
    modules: tuple[str, ...]

    @cached_property
    def layers(self) -> tuple[LayerDecisions, ...]:
        """By module, in the model's order."""
        lists: dict[str, dict[str, list[Any]]] = {}
        items: list[Any] = [*self.total.kept, *self.total.recomputed, *self.total.encoded, *self.total.written_over]
        names = {Kept: "kept", Recomputed: "recomputed", Encoded: "encoded", WrittenOver: "written_over"}
        order = {path: index for index, path in enumerate(self.modules)}
        for item in items:
            lists.setdefault(item.made_by.layer, {}).setdefault(names[type(item)], []).append(item)
        return tuple(
            LayerDecisions(path, **{name: tuple(found) for name, found in parts.items()})
            for path, parts in sorted(lists.items(), key=lambda entry: order[entry[0]])
        )

    def within(self, module_path: str) -> LayerDecisions:
        """What was decided about a module, its submodules included."""

        def chosen(items: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(item for item in items if is_within(item.made_by.layer, module_path))

        total = self.total
        parts = (chosen(items) for items in (total.kept, total.recomputed, total.encoded, total.written_over))
        return LayerDecisions(module_path, *parts)


def is_within(path: str, module_path: str) -> bool:
    """Whether `path` is the module or lies inside it; the empty path is the whole model."""
    return not module_path or path == module_path or path.startswith(f"{module_path}.")


def _to_dict(item: Any) -> dict[str, Any]:
    return asdict(item) | {"reason": item.reason.name.lower()}
