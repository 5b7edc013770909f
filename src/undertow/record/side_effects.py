"""What recorded code does besides returning a value: attributes it assigns, and random numbers of Python and NumPy.

Tensors that were assigned to an attribute become outputs of the Program, and every step assigns them. It also assigns
what needs no tensor of the step: numbers and texts, hooks, methods, flags of classes and globals. After recording, all
of it is undone. A change that cannot be made again, such as a new parameter, is refused, and the error names it.
"""

from __future__ import annotations

import gc
import operator
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any

import torch

from undertow.errors import CaptureError
from undertow.ir.structure import ATOMS, structure_key, tensors_in
from undertow.record.origins import is_users
from undertow.record.python_state import MISSING, Attribute, Change, Contents, Reach, find_holders, holds_traced
from undertow.record.recorder import CaptureRecorder
from undertow.record.traced_tensor import TWIN_NAMES, TracedTensor
from undertow.record.tracing import Recorder


def has_traced(item: Any) -> bool:
    """Whether a traced tensor is in `item` where `tensors_in` finds it."""
    return any(isinstance(tensor, TracedTensor) for _, tensor in tensors_in(item))


class AttributeWatch:
    """Python state as it was, to find what the recorded code did to it and to put it back."""

    def __init__(self, modules: dict[str, torch.nn.Module], function: Any, recorder: CaptureRecorder) -> None:
        self._recorder = recorder
        self._modules = {id(module): module for module in modules.values()}
        self._classes = [(path, module, type(module)) for path, module in modules.items()]
        inner = [module for path, module in modules.items() if path]
        self._unrepeatable = {id(group) for item in inner for group in (item._backward_hooks, item._backward_pre_hooks)}
        self._forward = [module.__dict__ for path, module in modules.items() if not path]
        self._holders = find_holders(modules, function)

    def undo(self) -> tuple[list[Change], list[str]]:
        """Undo every change; return those that a step can make again, and the paths of the others.

        Tensors that the code put elsewhere than into attributes stay there, if a step does not need them: after the
        capture they stand for their computed values. A log outside of the model keeps its new items, unless the model
        itself has changed: the log may then be about that change.
        """
        repeated, refused = [], []
        found = [change for holder in self._holders for change in holder.changes(self._is_same)]
        found += self._changes_of_tensors()
        if not any(change.reach is not Reach.FAR for change in found):
            found = [change for change in found if not _is_log(change)]
        for change in found:
            has_tensors = change.reach is not Reach.OWN and holds_traced(change.after, self._modules)
            if has_tensors and (change.reach is not Reach.SHOWN or self._is_constant(change.after)):
                continue
            change.place.write(change.before)
            if has_tensors or not self._is_repeatable(change):
                refused.append(change.path)
            else:
                repeated.append(change)
        for holder in self._holders:
            holder.restore_order()
        for path, module, kind in self._classes:
            if type(module) is not kind:
                module.__class__ = kind
                refused.append(f"{path}.__class__".lstrip("."))
        return repeated, refused

    def _changes_of_tensors(self) -> Iterator[Change]:
        """What was done to attributes of the modules' tensors, on their twins."""
        for path, real, twin in self._recorder.held_twins():
            # The real one may be the twin of another recording, around this one.
            before, now = (
                {name: item for name, item in vars(tensor).items() if name not in TWIN_NAMES} for tensor in (real, twin)
            )
            for name in dict.fromkeys((*before, *now)):
                left, right = before.get(name, MISSING), now.get(name, MISSING)
                if not self._is_same(left, right):
                    yield Change(f"{path}.{name}", Attribute(real, name), left, right, Reach.NEAR)
            if twin.is_leaf and twin.requires_grad != real.requires_grad:
                place = Attribute(real, "requires_grad")
                yield Change(f"{path}.requires_grad", place, real.requires_grad, twin.requires_grad, Reach.OWN)

    def _is_constant(self, item: Any) -> bool:
        traced = [tensor for _, tensor in tensors_in(item) if isinstance(tensor, TracedTensor)]
        return all(self._recorder.is_constant(self._recorder.value_of(tensor)) for tensor in traced)

    def _is_repeatable(self, change: Change) -> bool:
        """Whether a step can make the change again: it needs no new parameter, and its tensors can be found."""
        item, place = change.after, change.place
        if id(place.owner) in self._unrepeatable or (change.reach is Reach.SHOWN and isinstance(place.owner, list)):
            return False
        if place.name == "requires_grad" and item and isinstance(place.owner, torch.Tensor):
            return False  # gradients of this step would have to reach it already
        if place.name == "forward" and any(place.owner is attributes for attributes in self._forward):
            return False
        if isinstance(item, TracedTensor):
            return not getattr(item, "_is_param", False) or self._recorder.real_of(item) is not item
        is_plain = not isinstance(item, torch.nn.Module) and not callable(item)
        return (is_plain and has_traced(item)) or not holds_traced(item, self._modules)

    def _is_same(self, left: Any, right: Any) -> bool:
        """Whether an assignment changed nothing: equal Python values, and the same tensors or their traced twins."""
        if left is right:
            return True
        if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
            return (
                isinstance(left, torch.Tensor)
                and isinstance(right, torch.Tensor)
                and self._recorder.real_of(left) is self._recorder.real_of(right)
            )
        if type(left) is not type(right):
            return False
        if isinstance(left, tuple | list):
            return len(left) == len(right) and all(map(self._is_same, left, right))
        if isinstance(left, dict):
            return left.keys() == right.keys() and all(self._is_same(left[name], right[name]) for name in left)
        if isinstance(left, weakref.ref):
            return self._is_same(left(), right())
        return isinstance(left, ATOMS) and structure_key(left) == structure_key(right)


def _is_log(change: Change) -> bool:
    """Whether a list got more items and is otherwise as it was."""
    if not isinstance(change.place, Contents) or not isinstance(change.before, list):
        return False
    return len(change.after) > len(change.before) and all(map(operator.is_, change.after, change.before))


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
    """Stands for a type that may be used in `isinstance`, but of which no instance may be made."""

    call: Any
    original: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.call(*args, **kwargs)

    def __instancecheck__(cls, item: Any) -> bool:
        return isinstance(item, cls.original)


class GeneratorWatch:
    """The states of the torch.Generators that a model holds or is given: recorded code may draw, but not seed them."""

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
        """`is_thorough` also looks for the user's own generators, which takes a walk over all objects."""
        numpy_random = sys.modules.get("numpy.random")
        self._readers: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [(random.getstate, random.setstate)]
        if numpy_random is not None:
            self._readers.append((numpy_random.get_state, numpy_random.set_state))
        kinds = {random.Random} if numpy_random is None else {random.Random, numpy_random.Generator}
        objects = gc.get_objects() if is_thorough else []  # a million: no line of Python may run for each
        for item in compress(objects, map(kinds.__contains__, map(type, objects))):
            if type(item) is random.Random:
                self._readers.append((item.getstate, item.setstate))
            else:
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
        return [item if type(item) is int else _freeze(item) for item in state]
    return state.tobytes() if hasattr(state, "tobytes") else state
