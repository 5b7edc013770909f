"""The mesh: how the ranks of a job are arranged. `Mesh(data=4)` are four ranks that divide the shards of a batch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from undertow.errors import CallError


@dataclass(frozen=True)
class Mesh:
    """The number of ranks along each axis."""

    data: int = 1  # ranks that divide the shards of a batch

    def __post_init__(self) -> None:
        """Refuse what is no number of ranks."""
        for item in fields(self):
            number = getattr(self, item.name)
            if type(number) is not int or number < 1:
                raise CallError(f"a mesh has a whole number of ranks along each axis, got {item.name}={number!r}")

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.data

    def __str__(self) -> str:
        return ",".join(f"{item.name}={getattr(self, item.name)}" for item in fields(self))


def parse_mesh(text: str, where: str) -> Mesh:
    """The mesh that `data=4` says; raises CallError."""
    names = [item.name for item in fields(Mesh)]
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in names or name in sizes or not number.isdecimal():
            raise CallError(f"{where}: parallel is written as {', '.join(f'{name}=4' for name in names)}, got {text!r}")
        sizes[name] = int(number)
    return Mesh(**sizes)
