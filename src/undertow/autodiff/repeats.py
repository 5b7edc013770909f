"""What a rule recorded, recorded again for the next operation of the same kind: the layers of a model are alike.

In: the call of a rule, its tensors, and what it recorded the first time. Out: the same nodes on other values.

A rule is a function of the call: the operation, its arguments, the types of its tensors, which of them are one tensor
or lie in one memory, and which cotangents are wanted. All of that is the key (`RuleCall`), so that a repetition holds
exactly what running the rule again would record. Not repeated is a rule that writes into a tensor or reads anything but
its arguments. Nothing is repeated across shapes: a rule may do something else for other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from undertow.ir import Node, Value, map_values, values_in
from undertow.record.outlines import Outline
from undertow.record.traced_tensor import Alias, Storage, TracedTensor
from undertow.record.tracing import Recorder
from undertow.record.views import ViewStep


@dataclass(frozen=True)
class RuleCall:
    """The call of a rule: its tensors, and a key of all that it depends on."""

    tensors: tuple[TracedTensor, ...]
    versions: tuple[int, ...]
    key: Any

    @classmethod
    def of(cls, *parts: Any) -> RuleCall | None:
        """The call with these arguments, names and cotangents; None where one of them cannot be part of a key."""
        tensors: list[TracedTensor] = []
        shape = _key_of(parts, tensors)
        objects, storages = [id(item) for item in tensors], [id(item.alias.storage) for item in tensors]
        values = [id(item.alias.value) for item in tensors]
        kinds = tuple([(item.outline.type, item.outline.offset) for item in tensors])
        same = tuple([tuple(map(ids.index, ids)) for ids in (objects, storages, values)])
        versions = tuple([item.alias.storage.version for item in tensors])
        if any(item.alias.version != version for item, version in zip(tensors, versions, strict=True)):
            return None  # to be read again from its storage first
        key = shape, kinds, same
        try:
            hash(key)
        except TypeError:
            return None
        return cls(tuple(tensors), versions, key)

    @property
    def is_unwritten(self) -> bool:
        """Whether nothing was written into the tensors since the call was made."""
        return self.versions == tuple([item.alias.storage.version for item in self.tensors])


@dataclass(frozen=True)
class _Made:
    """A tensor that a rule returned: its value, and how it lies in its storage."""

    value: Value
    outline: Outline
    storage: Storage
    whole: Value
    steps: tuple[ViewStep, ...]
    given: int | None  # the tensor of the call in whose memory it lies


@dataclass(frozen=True)
class Repeat:
    """The nodes that a rule recorded and what it returned, on the values of its first call."""

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    found: Mapping[str, Any]  # tensors are a _Made, or the number of a tensor of the call

    @classmethod
    def of(cls, call: RuleCall, nodes: Sequence[Node], found: Mapping[str, Any]) -> Repeat | None:
        """What a rule recorded for a call; None where it cannot be recorded again by putting in other values."""
        known = {item.alias.value for item in call.tensors}
        values = tuple([item.alias.value for item in call.tensors])
        for node in nodes:
            if not known.issuperset(node.inputs):
                return None
            known.update(node.named_outputs)
        described = {name: _describe(item, call, known) for name, item in found.items()}
        if not call.is_unwritten or any(_is_lost(item) for item in described.values()):
            return None
        return cls(values, tuple(nodes), described)

    def record(self, recorder: Recorder, call: RuleCall) -> dict[str, Any]:
        """Record the nodes for another call with the same key; returns what the rule would return."""
        new = dict(zip(self.values, (item.alias.value for item in call.tensors), strict=True))
        for node in self.nodes:
            kwargs = {name: map_values(item, new.__getitem__) for name, item in node.kwargs.items()}
            args = map_values(node.args, new.__getitem__)
            new.update((value, recorder.names.value(node.operation, value.type)) for value in node.named_outputs)
            outputs = tuple(None if value is None else new[value] for value in node.outputs)
            recorder.nodes.append(Node(node.operation, args, kwargs, outputs, recorder.origin(), recorder.phase))
        storages: dict[Storage, Storage] = {}
        return {name: self._make(recorder, call, item, new, storages) for name, item in self.found.items()}

    def _make(
        self, recorder: Recorder, call: RuleCall, item: Any, new: dict[Value, Value], storages: dict[Storage, Storage]
    ) -> Any:
        if isinstance(item, tuple):
            return tuple([self._make(recorder, call, part, new, storages) for part in item])
        if not isinstance(item, _Made):
            return call.tensors[item] if isinstance(item, int) else item
        if item.given is None:
            storage = storages.get(item.storage)
            if storage is None:
                storage = storages[item.storage] = Storage(new[item.whole], item.storage.outline)
            alias = Alias(storage, item.steps, new[item.value], 0)
        else:
            source = call.tensors[item.given].alias
            alias = Alias(source.storage, (*source.steps, *item.steps), new[item.value], source.storage.version)
        return recorder.adopt(item.outline, alias.value, alias)


class _Lost:
    """Stands for a result that cannot be made again."""


def _is_lost(item: Any) -> bool:
    return any(map(_is_lost, item)) if isinstance(item, tuple) else isinstance(item, _Lost)


def _describe(item: Any, call: RuleCall, known: set[Value]) -> Any:
    if isinstance(item, tuple | list):
        return tuple([_describe(part, call, known) for part in item])
    if item is None:
        return None
    if not isinstance(item, TracedTensor):
        return _Lost()
    for number, tensor in enumerate(call.tensors):
        if item is tensor:
            return number
    alias = item.alias
    if alias.version != alias.storage.version or alias.value not in known:
        return _Lost()
    if any(values_in((step.args, tuple(step.kwargs.values()))) for step in alias.steps):
        return _Lost()
    for number, tensor in enumerate(call.tensors):
        if alias.storage is tensor.alias.storage:
            before = tensor.alias.steps
            if alias.steps[: len(before)] == before:
                steps = alias.steps[len(before) :]
                return _Made(alias.value, item.outline, alias.storage, alias.value, steps, number)
    if alias.storage.version or alias.storage.value not in known:
        return _Lost()
    return _Made(alias.value, item.outline, alias.storage, alias.storage.value, alias.steps, None)


def _key_of(item: Any, tensors: list[TracedTensor]) -> Any:
    """An argument by its value; a tensor by its place among the tensors."""
    kind = type(item)
    if kind is TracedTensor:
        tensors.append(item)
        return TracedTensor, len(tensors)
    if kind is tuple or kind is list:
        return kind, tuple([_key_of(part, tensors) for part in item])
    if kind is str or kind is int or kind is bool or item is None:
        return kind, item
    if kind is dict:
        return dict, tuple([(name, _key_of(part, tensors)) for name, part in item.items()])
    return kind, repr(item) if isinstance(item, float | complex) else item  # 0.0 and -0.0 are told apart
