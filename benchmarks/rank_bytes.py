"""Bytes of a step over two ranks: what the formula says, what was given to gloo, and what the interface has sent.

The ranks are in two network namespaces, so nothing else is on the link. The formula is that of a ring, twice the
gradients divided by the ranks, and the records of shards, or less where factors of gradients are sent. The interface
also counts headers, what the receiver acknowledges, and a heartbeat each second. The link has a rate: without one, what
the other end has no time to take is lost and sent again (up to 4 % here). Needs root.

Usage: scripts/bench rank_bytes [--out F]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from machine import describe_machine
from rank_contestant import WORKLOADS, Task
from rank_links import JoinedEnds, why_not
from ranks import OURS, Contestant

NUM_STEPS = 20
BYTES_PER_S = 250e6


def count(workload: str, place: int, num_steps: int) -> dict[str, Any]:
    """The bytes of a step of one of the ways to run it, on each rank."""
    task = Task(workload, WORKLOADS[workload][1], 2, 1, 1, OURS[place])
    with JoinedEnds(BYTES_PER_S) as ends:
        contestant = Contestant(task, ends)
        try:
            assert contestant.is_ready()
            contestant.run(1)
            before = [ends.sent_bytes(rank) for rank in range(2)]
            contestant.run(num_steps)
            after = [ends.sent_bytes(rank) for rank in range(2)]
        finally:
            contestant.end()
    gradients = contestant.facts[0]["parameter_bytes"]
    given = [facts["sent_bytes"] for facts in contestant.facts]
    sent = [round((second - first) / (num_steps + 1)) for first, second in zip(before, after, strict=True)]
    return {
        "gradients": gradients,
        "given_to_gloo": given,
        "sent_by_the_interface": sent,
        "interface_over_given": [round(one / other, 4) for one, other in zip(sent, given, strict=True)],
    }


def main() -> None:
    """All ways to run some networks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["mlp", "resnet50", "gpt"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rank_bytes.json"))
    options = parser.parse_args()
    if reason := why_not():
        parser.error(f"counters of a link cannot be read: {reason}")
    cases = {}
    for workload in options.workloads:
        for place, way in enumerate(OURS):
            cases[f"{workload}, {way.name}"] = found = count(workload, place, NUM_STEPS)
            print(workload, way.name, json.dumps(found), flush=True)
    options.out.write_text(json.dumps({"machine": describe_machine(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
