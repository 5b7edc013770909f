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

from undertow.api.dividing import Attempt, attempt_here, choose_divided
from undertow.costs.links import knows_link, link_costs
from undertow.errors import PlanError, RankLost
from undertow.hashing import hash_tensors
from undertow.ir.cost import Cost, read_cost
from undertow.ir.saving import SavedPlan, pack_plan, unpack_plan
from undertow.ir.structure import structure_key
from undertow.ops.communication import Link
from undertow.ranks.processor import describe_processor
from undertow.terms import CostSource, Terms
from undertow.version import __version__

if TYPE_CHECKING:
    from undertow.api.sharding import ShardedStep
    from undertow.api.staged_step import StagedStep
    from undertow.ranks.tree import Span


def describe_rank(
    step: ShardedStep | StagedStep, spans: Sequence[Span], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What has to be the same on all ranks. `spans` are the shards of each."""
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
        "the shards of each rank": [str(span) for span in spans],
        "the seed": step.shards.seed,
        "numerics": str(terms.numerics),
        "shard_state": "off" if step.training.own is None else "late" if step.training.own.is_late else "on",
        "the optimizer": None if optimizer is None else [type(optimizer).__name__, repr(groups)],
        "the shape of the batch": repr((structure_key(args), structure_key(kwargs))),
        "the model": type(step.model).__name__,
        # Plans and costs name devices, so each rank has to call its GPU as the others call theirs.
        "the device (let each process see one GPU alone, by CUDA_VISIBLE_DEVICES)": sorted(
            {str(tensor.device) for tensor in tensors.values()}
        ),
        "the names and shapes of its tensors": [[name, list(tensor.shape)] for name, tensor in tensors.items()],
        "the weights": hash_tensors(tensors),
    }


def know_link(link: Link, device: torch.device, terms: Terms) -> None:
    """Measure how fast the link is, unless rank 0 was given that with its costs, or measures nothing.

    Also whether all ranks have the same kind of processor.
    """
    ranks = link.ranks
    kind = describe_processor() if device.type == "cpu" else torch.cuda.get_device_name(device)
    link.is_uniform = len(set(ranks.gather_texts(kind))) == 1
    is_wanted = terms.costs is CostSource.MEASURED and not knows_link(terms.table)
    if ranks.send_number(int(is_wanted)):
        terms.table.update(link_costs(ranks.link_times(device)))


def share_plans(step: ShardedStep, parts: Sequence[Any]) -> None:
    """Plan the shards of this rank, by what rank 0 found."""
    assert step.link is not None
    ranks, spans = step.link.ranks, step.link.division.spans
    if ranks.rank == 0:
        try:
            # Parameters of a GPU stay whole: pieces are read from memory of the CPU.
            is_on_cpu = all(item.device.type == "cpu" for item in step.model.parameters())
            if step.link.own is not None and step.request.terms.budget_bytes is not None and is_on_cpu:
                _choose_together(step, parts)
            step.plan_kinds(parts, spans, {})
        except Exception as error:
            ranks.send_bytes(json.dumps({"error": str(error)}).encode())
            raise
        ranks.send_bytes(_pack(step, parts, is_trial=False))
        return
    while (found := _unpack(ranks.send_bytes(None)))["is_trial"]:
        _follow(step, found)
        attempt = attempt_here(lambda: step.try_plans(parts, [spans[ranks.rank]]))
        ranks.gather_texts(json.dumps([attempt.step_us, attempt.runs_again]))
    _follow(step, found)
    own, first = (list(map(len, step.link.division.blocks[rank])) for rank in (ranks.rank, 0))
    takes_plans = own == first and step.link.own is None  # each updates its own pieces
    step.plan_kinds(parts, [spans[ranks.rank]], found["plans"] if takes_plans else {})


def _choose_together(step: ShardedStep, parts: Sequence[Any]) -> None:
    """Choose which buckets are divided, by what all ranks find. Rank 0 calls it, the others follow."""
    assert step.link is not None and step.link.own is not None
    ranks, own, spans = step.link.ranks, step.link.own, step.link.division.spans

    def attempt(buckets: Sequence[int]) -> Attempt:
        step.divide_buckets(buckets)
        found = attempt_here(lambda: step.try_plans(parts, spans))
        if not found.fits:
            return found
        ranks.send_bytes(_pack(step, parts, is_trial=True))
        answers = map(json.loads, ranks.gather_texts(json.dumps([found.step_us, found.runs_again])))
        times, again = zip(*answers, strict=True)
        return Attempt(max(map(float, times)), any(again))

    # After other shapes were planned, another choice would mean another plan for them too.
    if step.is_prepared and attempt(own.divided_buckets).fits:
        return
    chosen = choose_divided(own, attempt)
    if chosen is None and not step.is_prepared:
        step.link.has_smallest_buckets = True
        step.change_buckets(None)
        chosen = choose_divided(own, attempt)
    # Where nothing fits, the refusal is that of the least.
    step.divide_buckets(sorted(own.pieces) if chosen is None else chosen)


def _follow(step: ShardedStep, found: dict[str, Any]) -> None:
    """Take over from rank 0 what plans are made from."""
    if found["error"] is not None:
        raise RankLost(f"rank 0 could not plan the step: {found['error']}", 0)
    assert step.link is not None
    step.request.terms.table.update(found["costs"])
    step.link.factored = frozenset(found["factored"])
    if step.link.own is None:
        step.link.buckets = found["buckets"]
        return
    step.change_buckets(found["buckets"])
    step.divide_buckets(found["divided"])


def _pack(step: ShardedStep, parts: Sequence[Any], *, is_trial: bool) -> bytes:
    assert step.link is not None
    kinds = [] if is_trial else step.kinds_of(parts, step.link.division.spans)
    packed = {
        "error": None,
        "is_trial": is_trial,
        "costs": {key: [cost.duration_ns, cost.workspace_bytes] for key, cost in step.request.terms.table.items()},
        "plans": {kind.name: pack_plan(step.plan_of(parts, kind), {}).decode() for kind in kinds},
        "buckets": step.link.buckets,
        "factored": sorted(step.link.factored),
        "divided": [] if step.link.own is None else step.link.own.divided_buckets,
    }
    return json.dumps(packed).encode()


def _unpack(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
        if found["error"] is not None:
            return {"error": str(found["error"]), "is_trial": False}
        costs: dict[str, Cost] = {str(key): read_cost(cost) for key, cost in found["costs"].items()}
        plans: dict[str, SavedPlan] = {
            str(name): unpack_plan(str(text).encode(), f"rank 0's plan of {name}")
            for name, text in found["plans"].items()
        }
        buckets = tuple(tuple(map(str, names)) for names in found["buckets"])
        factored = tuple(map(str, found["factored"]))
        divided = [range(len(buckets))[number] for number in found["divided"]]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise PlanError(f"what rank 0 sent is not a plan ({error})") from None
    is_trial = found.get("is_trial") is True
    return {
        "error": None,
        "is_trial": is_trial,
        "costs": costs,
        "plans": plans,
        "buckets": buckets,
        "factored": factored,
        "divided": divided,
    }
