"""What recorded code does besides returning a value: attributes it assigns, and random numbers of Python and NumPy.

An attribute that was assigned tensors becomes an output of the Program and is assigned at every step; so are numbers
and texts. Any other change cannot be repeated by a Program and is refused, with its place.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from undertow.capture.origins import is_users
from undertow.errors import CaptureError
from undertow.ir.structure import ATOMS, tensors_in
from undertow.ops.traced_tensor import TracedTensor
from undertow.ops.tracing import Recorder

_INTERNAL = {"_parameters", "_buffers", "_modules"}


class AttributeWatch:
    """The attributes of every module as they were, to find what the recorded code assigned and to put it back."""

    def __init__(self, modules: dict[str, torch.nn.Module], real_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._real_of = real_of
        self._places: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        for path, module in modules.items():
            plain = {name: item for name, item in module.__dict__.items() if name not in _INTERNAL}
            self._places.append((path, module.__dict__, plain))
            for dictionary in (module._parameters, module._buffers):
                self._places.append((path, dictionary, dict(dictionary)))
            for name, item in plain.items():
                if type(item) in (list, dict) and not name.startswith("_") and len(item) < 1000:
                    self._containers.append((f"{path}.{name}".lstrip("."), item, type(item)(item)))

    def undo(self) -> tuple[list[tuple[dict[str, Any], str, Any]], list[str]]:
        """Undo every assignment; return those that hold tensors, and the paths of the others."""
        effects, refused = [], []
        for path, dictionary, before in self._places:
            for name in [name for name in dictionary if name not in _INTERNAL]:
                item = dictionary[name]
                if name in before and item is before[name]:
                    continue
                if name in before and self._is_same(item, before[name]):
                    continue
                # A plain Python value is assigned again at every step; the next call then finds another state and is
                # captured for that.
                if isinstance(item, ATOMS) or any(isinstance(tensor, TracedTensor) for _, tensor in tensors_in(item)):
                    effects.append((dictionary, name, item))
                else:
                    refused.append(f"{path}.{name}".lstrip("."))
            for name in [name for name in dictionary if name not in before and name not in _INTERNAL]:
                del dictionary[name]
            dictionary.update(before)
        for path, container, before in self._containers:
            if len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(before)
                refused.append(path)
        return effects, refused

    def _is_same(self, left: Any, right: Any) -> bool:
        """Whether an assignment changed nothing: equal Python values, and the same tensors or their traced twins."""
        if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
            return left is right or (
                isinstance(left, torch.Tensor)
                and isinstance(right, torch.Tensor)
                and self._real_of(left) is self._real_of(right)
            )
        if type(left) is not type(right):
            return False
        if isinstance(left, tuple | list):
            return len(left) == len(right) and all(map(self._is_same, left, right))
        if isinstance(left, dict):
            return left.keys() == right.keys() and all(self._is_same(left[name], right[name]) for name in left)
        if isinstance(left, weakref.ref):
            return self._is_same(left(), right())
        return isinstance(left, ATOMS) and left == right


@contextmanager
def no_seeding(recorder: Recorder) -> Iterator[None]:
    """Refuse what makes or sets PyTorch's generators in recorded code: a Program only draws from them."""
    thread = threading.get_ident()
    way_out = "make and seed generators outside the model"

    def refusing(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            return recorder.refuse(f"torch.{name}", way_out)

        return _RefusingType("Generator", (), {"call": call, "original": original}) if name == "Generator" else call

    names = [(torch, "Generator"), (torch.random, "fork_rng")]
    names += [(module, name) for module in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")]
    previous = [getattr(module, name) for module, name in names]
    for (module, name), original in zip(names, previous, strict=True):
        setattr(module, name, refusing(name, original))
    try:
        yield
    finally:
        for (module, name), original in zip(names, previous, strict=True):
            setattr(module, name, original)


class _RefusingType(type):
    """Stands for a type that may be asked about, and not be made an instance of."""

    call: Any
    original: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.call(*args, **kwargs)

    def __instancecheck__(cls, item: Any) -> bool:
        return isinstance(item, cls.original)


class GeneratorWatch:
    """The states of the torch.Generators that a model holds or is given: recorded code draws, and never sets them."""

    def __init__(self, modules: dict[str, torch.nn.Module], arguments: Any) -> None:
        places = [module.__dict__.values() for module in modules.values()] + [arguments[0], arguments[1].values()]
        kind = type(torch.default_generator)
        self._states = [(item, item.get_state()) for place in places for item in place if type(item) is kind]

    def refuse_changes(self) -> None:
        """Raise if a generator was seeded while the code ran; puts its state back."""
        is_changed = any(not torch.equal(item.get_state(), state) for item, state in self._states)
        for item, state in self._states:
            item.set_state(state)
        if is_changed:
            raise CaptureError(
                "the forward pass seeds a torch.Generator of the model, which a recorded step would not do again; "
                "seed it outside"
            )


class PythonRandomness:
    """The states of Python's and NumPy's generators, to notice and name a draw from them."""

    def __init__(self, is_thorough: bool) -> None:
        """`is_thorough` also looks for generators of the user's own, at the price of a walk over all objects."""
        numpy_random = sys.modules.get("numpy.random")
        self._readers: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [(random.getstate, random.setstate)]
        if numpy_random is not None:
            self._readers.append((numpy_random.get_state, numpy_random.set_state))
        for item in gc.get_objects() if is_thorough else ():
            if type(item) is random.Random:
                self._readers.append((item.getstate, item.setstate))
            elif numpy_random is not None and type(item) is numpy_random.Generator:
                bits = item.bit_generator
                self._readers.append((partial(getattr, bits, "state"), partial(setattr, bits, "state")))
        self._before = [read() for read, _ in self._readers]
        self._frozen = self._freeze_all()

    def was_drawn_from(self) -> bool:
        """Whether any state moved; puts them all back."""
        moved = False
        for (read, write), before in zip(self._readers, self._before, strict=True):
            if _freeze(read()) != _freeze(before):
                moved = True
                write(before)
        return moved

    def _freeze_all(self) -> Any:
        return [_freeze(read()) for read, _ in self._readers]

    def find_draw(self, run: Callable[[], Any]) -> str:
        """Run the code once more, line by line, and return the line after which a state had moved."""
        found: list[str] = []
        last = {"place": "an unknown line"}

        def trace(frame: Any, event: str, argument: Any) -> Any:
            if found or not is_users(frame.f_code.co_filename):
                return None
            if self._freeze_all() != self._frozen:
                found.append(last["place"])
                return None
            last["place"] = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            run()
        finally:
            sys.settrace(previous)
            self.was_drawn_from()
        return found[0] if found else last["place"]


def _freeze(state: Any) -> Any:
    """A generator's state as plain values that can be compared."""
    if isinstance(state, dict):
        return {name: _freeze(item) for name, item in state.items()}
    if isinstance(state, tuple | list):
        return [_freeze(item) for item in state]
    return state.tobytes() if hasattr(state, "tobytes") else state
