"""Updates of a rank's own parts, as operations: sums of gradients that come to one rank, and updates of pieces.

In: the gradients of a bucket on each rank. Out: on each rank the sum of its own part, by which it updates that part of
the parameters, which are then sent to the others. The next forward pass waits for them where it reads them (`ARRIVE`),
or the step does at its end (`FINISH_PARAMETERS`). What is known of the parts is in the step's `OwnParts`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from undertow.errors import CallError
from undertow.ir import Node, Origin, TensorType, Value
from undertow.ir.cost import Cost
from undertow.ir.operation import Operation, Parts, operation_maker, register_operation
from undertow.ops.clipping import block_norms, in_memory_order
from undertow.ops.communication import LINK, LINK_FACTS, LINK_LANE, Link
from undertow.ops.own_parts import OwnParts, count_blocks
from undertow.ops.updates import (
    LATER_STEP,
    OPTIMIZER,
    LaterStep,
    chain_of,
    gradient_chain,
    rehearse_update,
    update_by,
    update_with,
)
from undertow.ranks.lane import Steps, Transfer
from undertow.ranks.messages import Messages
from undertow.ranks.reduction import OwnSum, gather, scatter

NORMS_TAG = (1 << 20) - 2  # buckets have smaller tags
COUNTS = "step"  # the entry of an optimizer's state that is one number; the others are of the elements
_OWN_CHAIN = "gradients of own parts"
_PARAMETERS = "parameters"  # that are on their way


def _name_of(parameter: str) -> str:
    return f"parameter {parameter}"


def own_parts_of(link: Link) -> OwnParts:
    """The parts of a link whose optimizer's state is divided."""
    assert link.own is not None
    return link.own


def _start_scatter(
    link: Link, bucket: int, cuts: Sequence[int], sent_bytes: int, *flats: torch.Tensor
) -> tuple[Transfer, OwnSum]:
    found = OwnSum(flats[0].device)

    def exchange(messages: Messages, at: Callable[[torch.Tensor], torch.Tensor]) -> Steps:
        return scatter(messages, link.division, cuts, bucket, list(map(at, flats)), found)

    return link.ranks.start(f"the sum of bucket {bucket}", exchange, found.device, flats, ()), found


def _finish_scatter(started: tuple[Transfer, OwnSum], link: Link) -> torch.Tensor:
    transfer, found = started
    link.ranks.finish(transfer)
    return found.take()


# (link, bucket, cuts, bytes that are sent, a flat tensor for each block of this rank) -> the transfer.
START_SCATTER = register_operation(
    Operation(
        "start_scatter",
        _start_scatter,
        borrows=True,
        lane=LINK_LANE,
        sent_bytes=lambda node: node.args[3],
        **LINK_FACTS,
    )
)

# (transfer, link) -> the sum over all shards of this rank's part of the bucket.
FINISH_SCATTER = register_operation(
    Operation("finish_scatter", _finish_scatter, is_fresh=True, costs_nothing=True, **LINK_FACTS)
)


def _start_parameters(
    link: Link, bucket: int, urgency: int, sent_bytes: int, names: tuple[str, ...], *others: torch.Tensor
) -> None:
    own = own_parts_of(link)
    if own.has_new_parameters:
        own.start(bucket, urgency)


# (link, bucket, urgency, bytes that are sent, names of the parameters that were updated here, the other parameters of
# the bucket): they are sent to the other ranks, and received from them, those with the least urgency first.
START_PARAMETERS = register_operation(
    Operation(
        "start_parameters",
        _start_parameters,
        lane=LINK_LANE,
        sent_bytes=lambda node: node.args[3],
        urgency=lambda node: node.args[2] + 1,  # sums of gradients go first
        announces=lambda node: (_PARAMETERS, *map(_name_of, (*node.args[4], *(item.name for item in node.args[5:])))),
        writes=lambda node: node.args[5:],
        **(LINK_FACTS | {"chains": lambda node: (LINK_LANE, *map(chain_of, node.args[4]))}),
    )
)

# (link): all parameters are there.
FINISH_PARAMETERS = register_operation(
    Operation(
        "finish_parameters",
        lambda link: own_parts_of(link).wait(),
        costs_nothing=True,
        awaits=lambda node: (_PARAMETERS,),
        **LINK_FACTS,
    )
)


def _arrive(parameter: torch.Tensor, link: Link, name: str) -> torch.Tensor:
    own_parts_of(link).arrive(name)
    return parameter


# (parameter, link, its name) -> the parameter, when it is there. It waits once, so it may be repeated.
ARRIVE = register_operation(
    Operation(
        "arrive",
        _arrive,
        shares=0,
        is_view=True,
        costs_nothing=True,
        awaits=lambda node: (_name_of(node.args[2]),),
        is_measurable=False,
        needs_all_ranks=True,
        why_not_captured=LINK_FACTS["why_not_captured"],
    )
)


def _update_part(
    optimizer: torch.optim.Optimizer, group_index: int, parameter: torch.Tensor, gradient: torch.Tensor, first: int
) -> None:
    elements = in_memory_order(parameter.detach())[first : first + gradient.numel()]
    update_elements(optimizer, group_index, parameter, elements, gradient)


def update_elements(
    optimizer: torch.optim.Optimizer,
    group_index: int,
    parameter: torch.Tensor,
    elements: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Update elements of a parameter by a copy of the optimizer that knows nothing else."""
    state = optimizer.state.get(parameter, {})
    for key, item in state.items():
        if key != COUNTS and isinstance(item, torch.Tensor) and item.shape != gradient.shape:
            raise CallError(
                f"the optimizer's state of a parameter has the shape {list(item.shape)}, and this rank updates "
                f"{gradient.numel()} elements of it; give a whole state to step.load_optimizer_state()"
            )
    piece = torch.nn.Parameter(elements)
    single = copy.copy(optimizer)
    single.state = defaultdict(dict, {piece: state})
    update_with(single, group_index, piece, gradient)
    if state:
        optimizer.state[parameter] = state


def _rehearse_part(
    optimizer: torch.optim.Optimizer, group_index: int, parameter: torch.Tensor, gradient: torch.Tensor, first: int
) -> Callable[[], Any]:
    return rehearse_update(optimizer, group_index, torch.zeros_like(gradient), gradient)


@operation_maker
def update_part(kind: str, settings: str) -> Operation:
    """(optimizer, group, parameter, gradient of a piece of it, where the piece begins): the update of that piece."""
    return Operation(
        f"update_part_{kind}",
        _update_part,
        writes=lambda node: (node.args[2],),
        must_run=True,
        chains=lambda node: (gradient_chain(node.args[2]),),
        can_repeat=False,
        settings=settings,
        rehearse=_rehearse_part,
        assumed_workspace=lambda node: 0,
        why_not_captured=LINK_FACTS["why_not_captured"],
    )


def update_part_by(optimizer: torch.optim.Optimizer, group_index: int) -> Operation:
    """The update of a piece of a parameter of a group."""
    whole = update_by(optimizer, group_index)
    return update_part(type(optimizer).__name__.lower(), whole.settings)


def _add_own(link: Link, bucket: int, gradient: torch.Tensor) -> None:
    sums = own_parts_of(link).sums
    sums[bucket] = sums[bucket].add_(gradient) if bucket in sums else gradient.clone()


# (link, bucket, sum of this rank's part): adds it to that of earlier calls.
ADD_OWN = register_operation(
    Operation("add_own_part", _add_own, **(LINK_FACTS | {"chains": lambda node: (_OWN_CHAIN,)}))
)


def _sums_of(own: OwnParts, buckets: Sequence[int], gradients: Sequence[torch.Tensor]) -> Mapping[int, torch.Tensor]:
    """The sums of this rank's parts: of this call, or where calls are added up, of all."""
    return dict(zip(buckets, gradients, strict=True)) if buckets else own.sums


def _start_norms(
    link: Link, later: LaterStep, accumulate: int, sent_bytes: int, buckets: tuple[int, ...], *gradients: torch.Tensor
) -> tuple[Transfer, list[torch.Tensor]] | None:
    if (later.num_calls + 1) % accumulate:
        return None
    own, ranks = own_parts_of(link), link.ranks
    found = own.empty_norms()
    parts = own.parts_of(_sums_of(own, buckets, gradients))
    norms = torch.cat([found[ranks.rank].new_empty(0), *(block_norms(part) for _, part in parts)])

    def exchange(messages: Messages, at: Callable[[torch.Tensor], torch.Tensor]) -> Steps:
        return gather(messages, NORMS_TAG, at(norms), list(map(at, found)))

    return ranks.start("norms of gradients", exchange, norms.device, [norms], found), found


# (link, later step, calls to accumulate, bytes that are sent, buckets, *sums of this rank's part of each) -> the
# transfer of the norms of their blocks. With accumulation there are no buckets: the sums are those that were added up.
START_NORMS = register_operation(
    Operation(
        "start_norms",
        _start_norms,
        lane=LINK_LANE,
        sent_bytes=lambda node: node.args[3],
        **(LINK_FACTS | {"chains": lambda node: (LINK_LANE, _OWN_CHAIN)}),
    )
)


def _step_own(
    link: Link,
    later: LaterStep,
    clip_norm: float | None,
    accumulate: int,
    started: tuple[Transfer, list[torch.Tensor]] | None,
    names: tuple[str, ...],
    parameters: tuple[torch.Tensor, ...],
    buckets: tuple[int, ...],
    *gradients: torch.Tensor,
) -> None:
    own = own_parts_of(link)
    later.num_calls += 1
    own.has_new_parameters = later.num_calls % accumulate == 0
    if not own.has_new_parameters:
        return
    parts = own.parts_of(_sums_of(own, buckets, gradients))
    if clip_norm is not None:
        assert started is not None and later.norm is not None
        transfer, found = started
        link.ranks.finish(transfer)
        norm = torch.linalg.vector_norm(own.in_order(found))
        later.norm.copy_(norm)
        factor = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
        for _, part in parts:
            part.mul_(factor)
    group_of = _groups_by_id(later.optimizer)
    for piece, part in parts:
        parameter = own.parameters[piece.name]
        elements = own.divided.elements_of(parameter, piece)
        update_elements(later.optimizer, group_of[id(parameter)], parameter, elements, part)
    own.sums.clear()


def _groups_by_id(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    return {id(item): index for index, group in enumerate(optimizer.param_groups) for item in group["params"]}


def _parts_of_step(node: Node, live: Mapping[str, Any]) -> Parts:
    """What the step of own parts is measured by: the updates of its pieces, one after the other, and the norms."""
    own, optimizer = own_parts_of(live[LINK.name]), live[LATER_STEP.name].optimizer
    group_of = _groups_by_id(optimizer)
    nodes = []
    for piece in own.own:
        parameter = own.parameters[piece.name]
        kind = TensorType(parameter.dtype, (piece.num_elements,), (1,), parameter.device)
        index = group_of[id(parameter)]
        args = (OPTIMIZER, index, Value("parameter", TensorType.of(parameter)), Value("gradient", kind), piece.first)
        nodes.append(Node(update_part_by(optimizer, index), args, {}, (), Origin()))
    norm_bytes = 2 * norms_bytes(own) if node.args[2] is not None else 0

    def combine(costs: Sequence[Cost]) -> Cost:
        most = max((cost.workspace_bytes for cost in costs), default=0)
        return Cost(sum(cost.duration_ns for cost in costs), most + norm_bytes)

    return Parts(nodes, combine)


def norms_bytes(own: OwnParts) -> int:
    """What the norms of all blocks of all ranks take, each kept in an allocation of at least 64 bytes."""
    return sum(64 + 8 * count_blocks(piece) for piece in own.of_all())


# (link, later step, norm to clip to, calls to accumulate, transfer of norms, names, parameters, buckets, *sums): clips
# and updates this rank's part, once in so many calls.
STEP_OWN = register_operation(
    Operation(
        "step_own_part",
        _step_own,
        writes=lambda node: node.args[6],
        parts=_parts_of_step,
        **(LINK_FACTS | {"chains": lambda node: (_OWN_CHAIN, *map(chain_of, node.args[5]))}),
    )
)
