"""Model parallel by stages: speed beside torch.distributed.pipelining, idle time, and the cut beside all cuts.

Every rank of every contestant is a process that is pinned to its cores. Contestants take turns. Ratios are taken round
by round.

- Speed: blocks of equal time, which `torch.distributed.pipelining` can divide. Its schedules 1F1B, Interleaved1F1B,
  InterleavedZeroBubble and ZBV, on gloo, beside ours. The fastest of its counts.
- Idle time: what ranks of ours do not compute during a step, beside the schedule's formula.
- Cuts: VGG, ResNet, U-Net and GPT on two stages, with a cut at the beginning of each layer, tried one by one. The cut
  that was found should be within 5 % of the best of them.

Usage: scripts/bench stages [--parts speed cuts] [--workloads mlp ...] [--models vgg ...] [--rounds N] [--out FOLDER]
       scripts/bench stages --many [--out FOLDER]      4 and 8 stages, for 16 cores
       python benchmarks/stages.py --many ...          the same, wherever PyTorch is, without scripts/setup
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))  # where nothing is installed

from machine import describe_machine
from rank_contestant import Task, Way
from ranks import Contestant, best_of, quartiles, take_turns, write
from turns import compare, show

SCRIPT = "stage_contestant.py"
OURS = [Way(f"ours, {name}", "ours", {"schedule": name}) for name in ("1f1b", "zero-bubble", "interleaved", "gpipe")]
RIVALS = [
    Way(f"pipelining, {name.removeprefix('Schedule')}", "pipelining", {"schedule": name, "stages_a_rank": number})
    for name, number in (
        ("Schedule1F1B", 1),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
    )
]
BATCH = {"mlp": 512, "transformer": 32}
CUT_BATCH = {"vgg": 32, "resnet": 32, "unet": 16, "gpt": 16}
SHARDS_A_STAGE = 4


def measure_speed(workload: str, num_ranks: int, num_threads: int, num_rounds: int) -> dict[str, Any]:
    """One workload: all contestants, and how idle ours are."""
    from undertow.stages.timing import idle_by_formula

    shards = SHARDS_A_STAGE * num_ranks
    ways = [way for way in (*OURS, *RIVALS) if way.options.get("stages_a_rank", 1) * num_ranks <= 8]
    ways = [way for way in ways if way.name != "ours, interleaved" or 2 * num_ranks <= 8]
    tasks = [Task(workload, BATCH[workload], num_ranks, shards, num_threads, way) for way in ways]
    times, facts = take_turns(tasks, None, num_rounds, SCRIPT)
    rivals = best_of(times, "pipelining")
    found: dict[str, Any] = {
        "ranks": num_ranks,
        "threads": num_threads,
        "batch": BATCH[workload],
        "shards": shards,
        "rounds": num_rounds,
        "steps": compare(times, rivals[0] if rivals else next(iter(times))),
        "idle": {},
    }
    for own in best_of(times, "ours", len(OURS)):
        if rivals:
            values = [a / b for a, b in zip(times[rivals[0]], times[own], strict=True)]
            found[f"{rivals[0]} / {own}"] = quartiles(values)
        said = facts[own]
        busy = sum(item["busy_ns"] for item in said)
        name = own.removeprefix("ours, ")
        stages_a_rank = 2 if name == "interleaved" else 1
        found["idle"][name] = {
            "measured": 1 - busy / sum(item["step_ns"] for item in said),
            "formula": idle_by_formula(name, num_ranks, shards, stages_a_rank=stages_a_rank),
            "planned": said[0]["idle_planned"],
            "starts": said[0]["starts"],
            "bound": said[0]["bound"],
        }
    return found


class AllCuts(Contestant):
    """Two ranks that run all cuts in each turn."""

    def run_all(self, num_steps: int) -> list[float]:
        """Milliseconds of a step for each cut: those of the slower rank."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{num_steps}\n")
            rank.stdin.flush()
        answers = [json.loads(self._answer(rank)) for rank in self._ranks]
        return [1e3 * max(pair) for pair in zip(*answers, strict=True)]


def measure_cuts(model: str, num_rounds: int) -> dict[str, Any]:
    """The cut that was found beside all others, on two stages with a core each."""
    task = Task(model, CUT_BATCH[model], 2, 8, 1, Way("cuts", "cuts", {}))
    contestant = AllCuts(task, None, SCRIPT)
    if not contestant.is_ready():
        return {}
    try:
        rounds = [contestant.run_all(3) for _ in range(num_rounds)]
    finally:
        contestant.end()
    starts = contestant.facts[0]["starts"]
    medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
    best = min(range(len(medians)), key=medians.__getitem__)
    return {
        "batch": task.batch,
        "rounds": num_rounds,
        "found": {"starts": starts[0], "ms": medians[0]},
        "best": {"starts": starts[best], "ms": medians[best]},
        "found / best": quartiles([values[0] / values[best] for values in rounds]),
        "cuts": [{"starts": cut, "ms": ms} for cut, ms in zip(starts, medians, strict=True)],
    }


def report_speed(name: str, found: dict[str, Any]) -> None:
    """What was measured, as text."""
    show(name, found["steps"])
    for key, value in found.items():
        if " / " in key:
            print(f"  {key:60} {value[0]:.3f} ({value[1]:.3f} to {value[2]:.3f})", flush=True)
    for schedule, idle in found["idle"].items():
        shares = f"{idle['measured']:.1%} idle, {idle['planned']:.1%} planned, {idle['formula']:.1%} by the formula"
        print(f"  {schedule:12} {shares}", flush=True)


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["speed", "cuts"], choices=["speed", "cuts"])
    parser.add_argument("--workloads", nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--models", nargs="+", default=list(CUT_BATCH), choices=list(CUT_BATCH))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--many", action="store_true", help="4 and 8 stages, 2 threads each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    path = options.out / ("stages_many.json" if options.many else "stages.json")
    results: dict[str, Any] = {"machine": describe_machine(), "speed": {}, "cuts": {}}
    for num_ranks, num_threads in ((4, 2), (8, 2)) if options.many else ((2, 1),):
        for workload in options.workloads if "speed" in options.parts else ():
            name = f"{workload}, {num_ranks} ranks"
            found = measure_speed(workload, num_ranks, num_threads, options.rounds)
            report_speed(name, found)
            results["speed"][name] = found
            write(path, results)
    for model in options.models if "cuts" in options.parts and not options.many else ():
        found = measure_cuts(model, options.rounds)
        if found:
            low = found["found / best"]
            print(f"{model}: {low[0]:.3f} ({low[1]:.3f} to {low[2]:.3f}) times the best of {len(found['cuts'])} cuts")
        results["cuts"][model] = found
        write(path, results)


if __name__ == "__main__":
    main()
