"""What ranks read of each other when they need it: versions, order, a rank that leaves, one that asks for nonsense."""

import threading
import time

import pytest
import torch
from rank_processes import run_ranks

from undertow.errors import RankLost
from undertow.ranks.lane import Transfer
from undertow.ranks.ranks import Ranks, join


def start(ranks: Ranks, offer: int, item: int, version: int, memory: torch.Tensor) -> Transfer:
    def read():
        yield ranks.reading.ask(offer, item, version, {1 - ranks.rank: memory})

    return ranks.lane.start("a test", read())


def read_of_each_other(mesh):
    """Rank 1 asks often and early, rank 0 once; each has its new version late."""
    ranks = join(mesh)
    versions, changed = [0], threading.Condition()
    tensors = [torch.full((size,), 10.0 * ranks.rank + size % 7) for size in (3, 70_000, 600_000)]

    def find(item, version):
        with changed:
            changed.wait_for(lambda: versions[0] >= version)
        return tensors[item] + versions[0]

    offer = ranks.reading.offer(find)
    found, early = [], []
    order = [2, 0, 1, 2] if ranks.rank else [1]
    for item in order:
        memory = torch.empty(len(tensors[item]))
        early.append((start(ranks, offer, item, 1, memory), memory))
    time.sleep(0.5)
    found.append(any(transfer.is_done.is_set() for transfer, _ in early))
    ranks.gather_texts("both have asked")
    with changed:
        versions[0] = 1
        changed.notify_all()
    for transfer, memory in early:
        ranks.finish(transfer)
        found.append((len(memory), memory.unique().tolist()))
    ranks.gather_texts("both have read")
    return found


def test_an_answer_waits_for_its_version():
    first, second = run_ranks(read_of_each_other, 2)
    assert first == [False, (70_000, [11.0])]  # 10 * 1 + 70,000 % 7 + 1
    assert second == [False, (600_000, [3.0]), (3, [4.0]), (70_000, [1.0]), (600_000, [3.0])]


def leave(mesh):
    ranks = join(mesh)
    offer = ranks.reading.offer(lambda item, version: torch.zeros(3))
    ranks.gather_texts("both offer")
    if ranks.rank:
        ranks.close()
        return "left"
    deadline = time.monotonic() + 60
    while 1 not in ranks.reading._left and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RankLost, match="rank 1"):
        ranks.finish(start(ranks, offer, 0, 0, torch.empty(3)))
    return "noticed"


def test_nobody_waits_for_a_rank_that_has_left():
    assert run_ranks(leave, 2) == ["noticed", "left"]


def ask_for_nonsense(mesh):
    ranks = join(mesh)
    offer = ranks.reading.offer(lambda item, version: [torch.zeros(3)][item])
    if ranks.rank == 0:  # it has the store, by which the other says what is wrong
        ranks.finish(start(ranks, offer, 5, 0, torch.empty(3)))
    else:
        ranks.gather_texts("waits for the other")


def test_who_is_asked_for_nonsense_says_so():
    for message in run_ranks(ask_for_nonsense, 2):
        assert "RankLost: rank 1 failed with IndexError" in message
