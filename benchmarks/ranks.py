"""Steps over ranks beside `DistributedDataParallel` and FSDP2, on gloo, interleaved in one run.

Every rank of every contestant is a process that is pinned to its cores. Contestants take turns and wait idle in
between; a turn is some steps, from the first to the last, with what is still on its way at the end. The rivals are
tuned: fused optimizers, static graph, gradients as views of buckets, several sizes of buckets. A first run ranks them;
the two best settings of DDP and the best of FSDP2 meet ours in a second run, and the best of them counts. Ratios are
taken round by round.

Two more contestants are parts of a step: `computing` is what a rank computes, without any other, on all cores at once;
`sending` is the bytes of a ring, both ways at once, and nothing else. A step cannot be faster than the longer of them.

Links: loopback as it is; and two network namespaces joined by a link whose rate is chosen so that sending takes as long
as computing, by the measured time of computing and the bytes. That needs root. With more shards on a rank only the last
backward pass overlaps; the rivals then add gradients up over as many passes.

Usage: scripts/bench ranks [--workloads mlp ...] [--links loopback capped] [--shards 1 4] [--rounds N] [--out FOLDER]
       scripts/bench ranks --many [--out FOLDER]      8 ranks of 2 threads on loopback, and the curve of 1, 2, 4, 8
       python benchmarks/ranks.py --many ...          the same, wherever PyTorch is, without scripts/setup
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))  # where nothing is installed

from machine import describe_machine
from rank_contestant import MANY_BATCH, WORKLOADS, Task, Way
from rank_links import JoinedEnds, why_not
from turns import compare, show

OURS = [
    Way("ours", "ours", {}),
    Way("ours, shard_state", "ours", {"shard_state": True}),
    Way("ours, late_parameters", "ours", {"shard_state": True, "late_parameters": True}),
]
PARTS = [Way("computing", "computing", {}), Way("sending", "sending", {})]
EAGER = Way("eager without ranks", "eager", {})
FSDP = [Way(f"FSDP2, {how}", "fsdp", {"reshard_after_forward": how == "freed"}) for how in ("kept", "freed")]
BUCKETS_MB = (1, 5, 25, 100)
CURVE = (1, 2, 4, 8)  # ranks of --many
NUM_TRIED = 3  # rounds of the run that ranks the settings of the rivals
TURN_S = 0.7  # at least one step
LONGEST_S = 300.0  # a rank that does not answer for so long is given up


def ddp_ways(shards_per_rank: int) -> list[Way]:
    """Settings of DDP. Its static graph does not know passes that are not sent."""
    tuned = {"gradient_as_bucket_view": True, "static_graph": shards_per_rank == 1}
    ways = [Way(f"DDP, buckets of {size} MB", "ddp", tuned | {"bucket_cap_mb": size}) for size in BUCKETS_MB]
    return [Way("DDP, by default", "ddp", {}), *ways]


class Contestant:
    """The ranks of one way to run a task, waiting for their turn."""

    def __init__(self, task: Task, ends: JoinedEnds | None, script: str = "rank_contestant.py") -> None:
        self.task, self._script = task, script
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._ranks = [self._start(rank, port, ends) for rank in range(task.num_ranks)]
        self.facts: list[dict[str, Any]] = []
        self.busy_ms = 0.0

    def _start(self, rank: int, port: int, ends: JoinedEnds | None) -> subprocess.Popen[str]:
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.task.num_ranks),
            "MASTER_ADDR": "127.0.0.1" if ends is None else ends.addresses[0],
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo" if ends is None else ends.interface,
            "OMP_NUM_THREADS": str(self.task.num_threads),
            "PYTHONPATH": str(Path(__file__).parent.parent / "src"),
        }
        words = [sys.executable, str(Path(__file__).with_name(self._script)), self.task.to_json()]
        return subprocess.Popen(
            [*([] if ends is None else ends.enter(rank)), *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def is_ready(self) -> bool:
        """Wait until every rank is prepared; says why if one cannot be."""
        answers = [self._answer(rank) for rank in self._ranks]
        if all(answers):
            self.facts = [json.loads(answer) for answer in answers]
            return True
        print(f"  {self.task.way.name} cannot run: {self._last_words()}", flush=True)
        return False

    def run(self, num_steps: int) -> float:
        """Milliseconds of a step: those of the slowest rank. What it kept its processors busy is noted."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{num_steps}\n")
            rank.stdin.flush()
        answers = [self._answer(rank) for rank in self._ranks]
        if not all(answers):
            raise RuntimeError(f"{self.task.way.name} has stopped: {self._last_words()}")
        found = [json.loads(answer) for answer in answers]
        self.busy_ms = 1e3 * max(busy_s for _, busy_s in found)
        return 1e3 * max(wall_s for wall_s, _ in found)

    def end(self) -> None:
        """End the processes: by the end of their stdin, or by force."""
        for rank in self._ranks:
            assert rank.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already
                rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(20)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()

    def _last_words(self) -> str:
        """What the ranks said at their end."""
        self.end()
        said = [rank.stderr.read().strip().splitlines() for rank in self._ranks if rank.stderr is not None]
        return " / ".join(lines[-1] for lines in said if lines)

    def _answer(self, rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        is_there, _, _ = select.select([rank.stdout], [], [], LONGEST_S)
        return rank.stdout.readline().strip() if is_there else ""


def take_turns(
    tasks: list[Task], ends: JoinedEnds | None, num_rounds: int, script: str = "rank_contestant.py"
) -> tuple[dict[str, list[float]], dict[str, list[dict[str, Any]]]]:
    """Milliseconds of a step of every contestant in every round, and what its ranks say of it."""
    contestants: dict[str, Contestant] = {}
    try:
        for task in tasks:
            contestant = Contestant(task, ends, script)
            if contestant.is_ready():
                contestants[_name_of(task, tasks)] = contestant
        num_steps = {name: max(1, int(TURN_S * 1e3 / item.run(1))) for name, item in contestants.items()}
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(num_rounds):
            order = list(contestants) if number % 2 else list(contestants)[::-1]
            for name in order:
                times[name].append(contestants[name].run(num_steps[name]))
    finally:
        for contestant in contestants.values():
            contestant.end()
    for item in contestants.values():
        item.facts[0]["busy_ms"] = round(item.busy_ms, 2)
    return times, {name: item.facts for name, item in contestants.items()}


def _name_of(task: Task, tasks: list[Task]) -> str:
    """Of a contestant; where contestants differ in the number of ranks, with that."""
    is_curve = len({item.num_ranks for item in tasks}) > 1
    return f"{task.way.name}, {task.num_ranks} ranks" if is_curve else task.way.name


def best_of(times: dict[str, list[float]], beginning: str, num: int = 1) -> list[str]:
    """The names of the fastest contestants whose names begin so."""
    found = [name for name in times if name.startswith(beginning)]
    return sorted(found, key=lambda name: statistics.median(times[name]))[:num]


def quartiles(values: list[float]) -> list[float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(item, 3) for item in (middle, low, high)]


def measure(
    workload: str, batch: int, num_ranks: int, num_threads: int, shards: int, ends: JoinedEnds | None, num_rounds: int
) -> dict[str, Any]:
    """One case: the rivals are ranked, then the best meet ours and the parts of a step."""

    def task(way: Way) -> Task:
        return Task(workload, batch, num_ranks, shards, num_threads, way)

    rivals = [*ddp_ways(shards), *FSDP]
    tried, _ = take_turns([task(way) for way in rivals], ends, NUM_TRIED)
    chosen = [*best_of(tried, "DDP", 2), *best_of(tried, "FSDP2")]
    ways = [*OURS, *PARTS, EAGER, *(way for way in rivals if way.name in chosen)]
    times, facts = take_turns([task(way) for way in ways], ends, num_rounds)
    ddp, fsdp = best_of(times, "DDP"), best_of(times, "FSDP2")
    found: dict[str, Any] = {
        "ranks": num_ranks,
        "threads": num_threads,
        "batch": batch,
        "shards_per_rank": shards,
        "rounds": num_rounds,
        "tried_ms": {name: round(statistics.median(values), 2) for name, values in tried.items()},
        "steps": compare(times, ddp[0]),
        "busy_ms": {name: items[0]["busy_ms"] for name, items in facts.items()},  # in the last round
        "parameter_bytes": facts["ours"][0]["parameter_bytes"],
        "sent_bytes": [item["sent_bytes"] for item in facts["ours"]],
        "planned_peak_bytes": [item["planned_peak_bytes"] for item in facts["ours"]],
    }
    limits = [max(pair) for pair in zip(times["computing"], times["sending"], strict=True)]
    for own in (way.name for way in OURS if way.name in times):
        for peer in (*ddp, *fsdp):
            found[f"{peer} / {own}"] = quartiles([a / b for a, b in zip(times[peer], times[own], strict=True)])
        found[f"{own} / the longer part"] = quartiles([a / b for a, b in zip(times[own], limits, strict=True)])
    return found


def choose_rate(workload: str, batch: int, num_threads: int) -> float:
    """Bytes per second at which sending takes two ranks as long as computing, with a shard on each."""
    way = Way("computing", "computing", {})
    times, facts = take_turns([Task(workload, batch, 2, 1, num_threads, way)], None, 5)
    return facts["computing"][0]["parameter_bytes"] / (1e-3 * statistics.median(times["computing"]))


def scale(workload: str, batch: int, num_threads: int, num_rounds: int) -> dict[str, Any]:
    """The same batch in as many shards on some numbers of ranks: ours, and DDP, which is eager on one."""
    ddp = next(way for way in ddp_ways(1) if way.options.get("bucket_cap_mb") == 25)
    tasks = []
    for num_ranks in CURVE:
        tasks.append(Task(workload, batch, num_ranks, CURVE[-1] // num_ranks, num_threads, OURS[0]))
        tasks.append(Task(workload, batch, num_ranks, 1, num_threads, ddp if num_ranks > 1 else EAGER))
    times, _ = take_turns(tasks, None, num_rounds)
    curve = compare(times, "ours, 1 ranks")
    show(f"{workload}: a batch of {batch} in {CURVE[-1]} shards, times as fast as one rank", curve)
    return {"batch": batch, "threads": num_threads, "rounds": num_rounds, "steps": curve}


def run_many(num_rounds: int, out: Path) -> None:
    """Many ranks of two threads each, and the curve."""
    results: dict[str, Any] = {"machine": describe_machine(), "cases": {}, "scaling": {}}
    for workload, batch in MANY_BATCH.items():  # what takes longest comes last
        found = measure(workload, batch, CURVE[-1], 2, 1, None, num_rounds)
        show(f"{workload}: {CURVE[-1]} ranks of 2 threads, a batch of {batch}", found["steps"])
        results["cases"][workload] = found
        write(out / "ranks_many.json", results)
    for workload, batch in MANY_BATCH.items():
        results["scaling"][workload] = scale(workload, batch, 2, max(3, num_rounds - 2))
        write(out / "ranks_many.json", results)


def run_two(workloads: list[str], links: list[str], shards: list[int], num_rounds: int, out: Path) -> None:
    """Two ranks, each pinned to a core; what was measured before of other cases stays."""
    path = out / "ranks.json"
    results = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    for workload in workloads:
        batch = WORKLOADS[workload][1]
        for link in links:
            for number in shards:
                name = f"{workload}, {link} link, {number} a rank"
                with ExitStack() as stack:
                    rate = choose_rate(workload, batch, 1) if link == "capped" else None
                    ends = None if rate is None else stack.enter_context(JoinedEnds(rate))
                    found = measure(workload, batch, 2, 1, number, ends, num_rounds)
                show(name, found["steps"])
                for key, value in found.items():
                    if " / " in key:
                        print(f"  {key:60} {value[0]:.3f} ({value[1]:.3f} to {value[2]:.3f})", flush=True)
                results["cases"][name] = found | {"bytes_per_s": rate, "machine": describe_machine()}
                write(path, results)


def write(path: Path, results: dict[str, Any]) -> None:
    """What was found so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Compare all cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--links", nargs="+", choices=["loopback", "capped"], default=["loopback", "capped"])
    parser.add_argument("--shards", nargs="+", type=int, default=[1, 4], help="on each rank")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--many", action="store_true", help="8 ranks of 2 threads, for a machine of 16 cores")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="a folder")
    options = parser.parse_args()
    start = time.monotonic()
    if options.many:
        run_many(options.rounds or 5, options.out)
    else:
        if "capped" in options.links and (reason := why_not()):
            parser.error(f"a capped link cannot be made: {reason}")
        run_two(options.workloads, options.links, options.shards, options.rounds or 9, options.out)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
