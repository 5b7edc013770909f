"""For which operations there are other kernels: each family's file says so of its own.

`@stands_for(target, ...)` is for a function from a node to the nodes that may run in its stead. `@prepared_for(target,
...)` is for one that gives such nodes together with the node that prepares their weights; it is asked where the weights
are the same in every call. What is chosen among them is `passes/choose.py`'s business: the best measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from undertow.ir import Node, Operation

Choices = Callable[[Node], list[Node]]
PreparedChoices = Callable[[Node], dict[Node, Node]]

_CHOICES: dict[Any, list[Choices]] = {}
_PREPARED: dict[Any, list[PreparedChoices]] = {}
_PLAIN_FORMS: dict[Operation, Any] = {}


def stands_for(*targets: Any) -> Callable[[Choices], Choices]:
    """Register a function that gives other nodes for a node of one of the targets."""

    def register(choices: Choices) -> Choices:
        for target in targets:
            _CHOICES.setdefault(target, []).append(choices)
        return choices

    return register


def prepared_for(*targets: Any) -> Callable[[PreparedChoices], PreparedChoices]:
    """Register a function that gives other nodes, each with the node that prepares its weights."""

    def register(choices: PreparedChoices) -> PreparedChoices:
        for target in targets:
            _PREPARED.setdefault(target, []).append(choices)
        return choices

    return register


def is_plain_form(plain: Any, prepared: Operation) -> None:
    """Say that `prepared` is `plain` with its weights prepared: where it can run, the plain one is not tried."""
    _PLAIN_FORMS[prepared] = plain


def find_choices(node: Node) -> list[Node]:
    """Nodes that may run in its stead."""
    return [other for choices in _CHOICES.get(node.target, ()) for other in choices(node)]


def find_prepared_choices(node: Node) -> dict[Node, Node]:
    """Nodes that may run in its stead, each with the one that prepares its weights."""
    return {
        other: preparation for choices in _PREPARED.get(node.target, ()) for other, preparation in choices(node).items()
    }


def plain_form_of(operation: Operation) -> Any:
    """What a kernel with prepared weights is the prepared form of."""
    return _PLAIN_FORMS[operation]
