"""The simulated allocator of CUDA graphs: blocks that are alive never overlap, and what a plan needs fits."""

from __future__ import annotations

import random

import torch

import undertow as ut
from undertow.models import SMALL
from undertow.runtime.graph_memory import (
    SEGMENT_UNIT_BYTES,
    SMALL_BYTES,
    _Allocator,
    _simulate,
    copied_output_bytes,
    find_graph_memory,
)

MIB = 1 << 20


def test_blocks_do_not_overlap_and_are_joined_when_free():
    chooser = random.Random(0)
    allocator = _Allocator(is_small=False)
    alive = []
    for _ in range(2000):
        if alive and chooser.random() < 0.5:
            allocator.free(*alive.pop(chooser.randrange(len(alive))))
        else:
            alive.append(allocator.allocate(chooser.choice([0, chooser.randrange(MIB + 1, 60 * MIB)])))
        places = sorted(block for block in alive if block[1])
        assert all(address + size <= after for (address, size), (after, _) in zip(places, places[1:], strict=False))
        assert allocator.alive_bytes == sum(size for _, size in alive) <= allocator.segment_bytes
    while alive:
        allocator.free(*alive.pop())
    assert len(allocator._free) == allocator.num_segments


def test_what_pytorch_does_not_cut_off_counts():
    allocator = _Allocator(is_small=False)
    assert allocator.allocate(25 * MIB)[1] == 26 * MIB  # a segment of 26: a MiB is left over
    assert allocator.allocate(int(18.75 * MIB))[1] == 18.75 * MIB  # of 20: more than a MiB
    assert allocator.num_segments == 2


def test_a_step_fits_into_the_stretch_that_was_found():
    zoo = SMALL["vgg_small"]
    args, targets = zoo.example_inputs(64), zoo.example_targets(64)
    torch.manual_seed(0)
    step = ut.train_step(zoo.build(), args, targets=targets, loss=zoo.loss, budget="1GiB", costs="model")
    plan = step.plan
    found = find_graph_memory(plan)
    alive_bytes = plan.peak_bytes - sum(plan.held.values())
    assert found.total_bytes >= found.stretch_bytes
    assert found.total_bytes >= alive_bytes
    assert _simulate(plan, found.stretch_bytes).total_bytes + copied_output_bytes(plan.program) == found.total_bytes
    assert found.total_bytes <= 1.2 * alive_bytes + 2 * SEGMENT_UNIT_BYTES + SMALL_BYTES
