"""What a model begins with that its factory did not give it: weights from a file, and which of them stay as they are.

In: a model, a safetensors file, patterns of names. Out: the same model; what did not match is listed, never guessed at.
Only a prefix that one side has and the other has not, such as `bert.`, is added or taken away.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from undertow.errors import DataError
from undertow.train.optimizing import NORMS, named_owners, no_match
from undertow.train.weights import read_tensors

MAX_LISTED = 8


@dataclass(frozen=True)
class Loaded:
    """Which weights of a file were loaded, and which were not."""

    file: str
    num_loaded: int
    missing: tuple[str, ...]  # in the model, not in the file: they stay as the factory made them
    unknown: tuple[str, ...]  # in the file, not in the model
    other_shape: tuple[str, ...]
    change: str  # of the names, in words; empty where they match as they are

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: list(item) if isinstance(item, tuple) else item for name, item in vars(self).items()}

    def __str__(self) -> str:
        lines = [f"{self.file}: {self.num_loaded} tensors loaded{self.change}"]
        for what, names in (
            ("not in the file, left as made", self.missing),
            ("not in the model, left out", self.unknown),
            ("of another shape, left as made", self.other_shape),
        ):
            if names:
                more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
                lines.append(f"  {len(names)} {what}: {', '.join(names[:MAX_LISTED])}{more}")
        return "\n".join(lines)


def load_initial(model: torch.nn.Module, path: Path) -> Loaded:
    """Load the weights of a file that fit the model; raises DataError where none does."""
    given, _ = read_tensors(path)
    expected = model.state_dict()
    renamed, change = _match_prefix(given, expected)
    fitting = {name: item for name, item in renamed.items() if name in expected and expected[name].shape == item.shape}
    other_shape = tuple(
        f"{name} ({list(renamed[name].shape)} there, {list(expected[name].shape)} here)"
        for name in renamed
        if name in expected and name not in fitting
    )
    if not fitting:
        raise DataError(
            f"no weight in {path} fits the model: the file has {_list(given)}; the model has {_list(expected)}"
        )
    # A tensor that the model knows by two names is in the state once for each.
    kept = model.state_dict(keep_vars=True)
    loaded = {id(item) for name, item in kept.items() if name in fitting}
    missing = tuple(name for name, item in kept.items() if name not in renamed and id(item) not in loaded)
    model.load_state_dict(fitting, strict=False)
    unknown = tuple(name for name in renamed if name not in expected)
    return Loaded(str(path), len(fitting), missing, unknown, other_shape, change)


def _match_prefix(
    given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors under the names for which most match, with one prefix added or taken away."""
    ends: dict[str, list[str]] = {}
    for name in expected:
        for start in (0, *(place + 1 for place, letter in enumerate(name) if letter == ".")):
            ends.setdefault(name[start:], []).append(name[:start])
    added = Counter(prefix for name in given for prefix in ends.get(name, ()))
    dropped = Counter(
        name[: place + 1]
        for name in given
        for place, letter in enumerate(name)
        if letter == "." and name[place + 1 :] in expected
    )
    best_added = max(added.items(), key=lambda item: (item[1], item[0] == ""), default=("", 0))
    best_dropped = max(dropped.items(), key=lambda item: item[1], default=("", 0))
    if best_dropped[1] > best_added[1]:
        prefix = best_dropped[0]
        return {name.removeprefix(prefix): item for name, item in given.items()}, f", without their prefix {prefix!r}"
    prefix = best_added[0]
    if not prefix:
        return dict(given), ""
    # A file of the inner model may hold names of the outer one too, such as its head's.
    return {name if name in expected else prefix + name: item for name, item in given.items()}, f", under {prefix!r}"


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> list[torch.nn.Module]:
    """Freeze the parameters whose names match; returns the norms that must stay in `eval()`.

    A norm whose parameters are all frozen keeps its running statistics as well.
    """
    frozen: set[int] = set()
    for pattern in patterns:
        matching = [parameter for name, _, parameter in named_owners(model) if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise no_match("--freeze", pattern, model)
        frozen |= set(map(id, matching))
    for parameter in model.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
    return [
        module
        for module in model.modules()
        if isinstance(module, NORMS)
        and (own := [*module.parameters(recurse=False)])
        and all(id(parameter) in frozen for parameter in own)
    ]


def _list(names: Mapping[str, Any]) -> str:
    shown = list(names)[:4]
    return f"{len(names)} tensors, {', '.join(shown)}{', ...' if len(names) > 4 else ''}"
