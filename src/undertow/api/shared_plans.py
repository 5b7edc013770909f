"""One rank plans, the others check: what the ranks of a job tell each other before they run a step.

In: the step of a rank, and the shards of a batch. Out: steps that are planned alike on all ranks. Rank 0 measures and
plans, and sends its costs and its plans. Kernels are chosen by costs, so all ranks choose the same. A rank whose
shards make the same blocks as rank 0's takes its plans, checked; another plans for itself, from the same costs.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from undertow.errors import PlanError, RankLost
from undertow.hashing import hash_tensors
from undertow.ir.cost import Cost, read_cost
from undertow.ir.saving import SavedPlan, pack_plan, unpack_plan
from undertow.ir.structure import structure_key
from undertow.version import __version__

if TYPE_CHECKING:
    from undertow.api.sharding import ShardedStep


def describe_rank(step: ShardedStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same on all ranks."""
    terms = step.request.terms
    optimizer = step.optimizer
    tensors = {**dict(step.model.named_parameters()), **dict(step.model.named_buffers())}
    groups = [] if optimizer is None else optimizer.state_dict()["param_groups"]
    return {
        "the version of PyTorch": torch.__version__,
        "the version of Undertow": __version__,
        "the version of Python": platform.python_version(),
        "the number of threads": torch.get_num_threads(),
        "the number of shards": step.shards.tree.num_shards,
        "the seed": step.shards.seed,
        "numerics": str(terms.numerics),
        "the optimizer": None if optimizer is None else [type(optimizer).__name__, repr(groups)],
        "the shape of the batch": repr((structure_key(args), structure_key(kwargs))),
        "the model": type(step.model).__name__,
        "the names and shapes of its tensors": [[name, list(tensor.shape)] for name, tensor in tensors.items()],
        "the weights": hash_tensors(tensors),
    }


def share_plans(step: ShardedStep, parts: Sequence[Any]) -> None:
    """Plan the shards of this rank, by what rank 0 found."""
    assert step.link is not None
    ranks, spans = step.link.ranks, step.link.division.spans
    if ranks.rank == 0:
        try:
            step.plan_kinds(parts, spans, {})
        except Exception as error:
            ranks.send_bytes(json.dumps({"error": str(error)}).encode())
            raise
        ranks.send_bytes(_pack(step, parts))
        return
    found = _unpack(ranks.send_bytes(None))
    if found["error"] is not None:
        raise RankLost(f"rank 0 could not plan the step: {found['error']}", 0)
    step.request.terms.table.update(found["costs"])
    step.link.buckets = found["buckets"]
    own, first = (list(map(len, step.link.division.blocks[rank])) for rank in (ranks.rank, 0))
    takes_plans = own == first
    step.plan_kinds(parts, [spans[ranks.rank]], found["plans"] if takes_plans else {})


def _pack(step: ShardedStep, parts: Sequence[Any]) -> bytes:
    assert step.link is not None
    kinds = step.kinds_of(parts, step.link.division.spans)
    plans = {kind.name: pack_plan(step.plan_of(parts, kind), {}).decode() for kind in kinds}
    costs = {key: [cost.duration_ns, cost.workspace_bytes] for key, cost in step.request.terms.table.items()}
    return json.dumps({"error": None, "costs": costs, "plans": plans, "buckets": step.link.buckets}).encode()


def _unpack(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
        if found["error"] is not None:
            return {"error": str(found["error"])}
        costs: dict[str, Cost] = {str(key): read_cost(cost) for key, cost in found["costs"].items()}
        plans: dict[str, SavedPlan] = {
            str(name): unpack_plan(str(text).encode(), f"rank 0's plan of {name}")
            for name, text in found["plans"].items()
        }
        buckets = tuple(tuple(map(str, names)) for names in found["buckets"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PlanError(f"what rank 0 sent is not a plan ({error})") from None
    return {"error": None, "costs": costs, "plans": plans, "buckets": buckets}
