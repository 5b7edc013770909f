"""Which operations have other kernels. Each family's file registers its own.

`@stands_for(target, ...)` registers a function from a node to the nodes that may run instead of it.
`@prepared_for(target, ...)` registers a function that also gives the node that prepares their weights, for weights that
are the same in every call. `passes/choose.py` chooses the best measured one among them.
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
    """Register `prepared` as `plain` with its weights prepared: where it can run, the plain one is not tried."""
    _PLAIN_FORMS[prepared] = plain


def find_choices(node: Node) -> list[Node]:
    """Nodes that may run instead of this one."""
    return [other for choices in _CHOICES.get(node.target, ()) for other in choices(node)]


def find_prepared_choices(node: Node) -> dict[Node, Node]:
    """Nodes that may run instead of this one, each with the node that prepares its weights."""
    return {
        other: preparation for choices in _PREPARED.get(node.target, ()) for other, preparation in choices(node).items()
    }


def plain_form_of(operation: Operation) -> Any:
    """The plain form of a kernel with prepared weights."""
    return _PLAIN_FORMS[operation]
