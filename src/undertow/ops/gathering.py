"""Divided parameters as operations: a parameter is gathered when it is read, freed, and gathered again.

In: the elements that each rank keeps of a parameter. Out: the whole parameter, a value like any other. So the planner
decides when it is there: it weighs the bytes against the time on the link, as it does for whatever can be made again.
No rank has to gather what another gathers, nor when: the owner answers (`ranks/reading.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from undertow.ir import Node, Origin, TensorType, Value
from undertow.ir.operation import Operation, Parts, operation_maker, register_operation
from undertow.ops.communication import LINK, LINK_FACTS, LINK_LANE, Link
from undertow.ops.divided_parameters import DividedParameters
from undertow.ops.own_updates import update_elements, update_part_by
from undertow.ops.updates import OPTIMIZER, chain_of, update_by
from undertow.ranks.lane import Transfer


def divided_of(link: Link) -> DividedParameters:
    """The divided parameters of a link whose optimizer's state is divided."""
    assert link.own is not None
    return link.own.divided


def _start_gather(part: torch.Tensor, link: Link, name: str, sent_bytes: int) -> tuple[torch.Tensor, Transfer]:
    return divided_of(link).start(name)


# (this rank's elements, link, the parameter's name, bytes that are sent) -> the tensor that is filled, the transfer.
START_GATHER = register_operation(
    Operation(
        "start_gather",
        _start_gather,
        returns_tuple=True,
        is_fresh=True,
        is_measurable=False,
        needs_all_ranks=True,
        lane=LINK_LANE,
        sent_bytes=lambda node: node.args[3],
        assumed_workspace=lambda node: 0,
        why_not_captured=LINK_FACTS["why_not_captured"],
    )
)


def _finish_gather(whole: torch.Tensor, transfer: Transfer, link: Link, name: str) -> torch.Tensor:
    divided_of(link).finish(name, transfer)
    return whole


# (tensor, transfer, link, the parameter's name) -> the parameter, when it is there.
FINISH_GATHER = register_operation(
    Operation(
        "finish_gather",
        _finish_gather,
        shares=0,
        is_view=True,
        costs_nothing=True,
        is_measurable=False,
        needs_all_ranks=True,
        why_not_captured=LINK_FACTS["why_not_captured"],
    )
)


def _end_gathering(link: Link, names: tuple[str, ...], *parts: torch.Tensor) -> None:
    divided_of(link).end(names)


# (link, names, this rank's elements of these parameters): they are read no more before they are updated. What follows
# tells the other ranks so, which then update their elements.
END_GATHERING = register_operation(
    Operation("end_gathering", _end_gathering, writes=lambda node: node.args[2:], costs_nothing=True, **LINK_FACTS)
)


def _update_divided(
    optimizer: torch.optim.Optimizer, group_index: int, link: Link, name: str, gradient: torch.Tensor
) -> None:
    assert link.own is not None
    update_elements(optimizer, group_index, link.own.parameters[name], link.own.divided.own[name], gradient)


def _parts_of_update(node: Node, live: Mapping[str, Any]) -> Parts:
    """What it is measured by: the update of as many elements of a parameter that is whole."""
    optimizer, index, gradient = live[OPTIMIZER.name], node.args[1], node.args[4]
    parameter = Value("parameter", TensorType.of(live[LINK.name].own.parameters[node.args[3]]))
    args = (OPTIMIZER, index, parameter, Value("gradient", gradient.type), 0)
    return Parts([Node(update_part_by(optimizer, index), args, {}, (), Origin())], lambda costs: costs[0])


@operation_maker
def update_divided_part(kind: str, settings: str) -> Operation:
    """(optimizer, group, link, name of a divided parameter, gradient of this rank's elements): their update."""
    return Operation(
        f"update_divided_part_{kind}",
        _update_divided,
        must_run=True,
        chains=lambda node: (chain_of(node.args[3]),),
        can_repeat=False,
        is_measurable=False,
        settings=settings,
        parts=_parts_of_update,
        assumed_workspace=lambda node: 0,
        why_not_captured=LINK_FACTS["why_not_captured"],
    )


def update_divided_part_by(optimizer: torch.optim.Optimizer, group_index: int) -> Operation:
    """The update of this rank's elements of a divided parameter of a group."""
    whole = update_by(optimizer, group_index)
    return update_divided_part(type(optimizer).__name__.lower(), whole.settings)
