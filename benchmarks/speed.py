"""Steps and evaluations beside PyTorch in every way a user could run it, interleaved in one run.

Every contestant has its own process, because allocators and their settings belong to a process. They take turns and
wait idle in between. A ratio is taken round by round; median and quartiles are reported. Since all would not fit in
memory, groups of peers take turns with ours.
With `--before SRC`, the folder `src` of another version, ours takes turns with that version instead.
Usage: scripts/bench speed [--evaluation] [--workloads vgg16 ...] [--rounds N] [--before SRC] [--out F]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")

# Name: how the model runs, and the environment of its process.
CONTESTANTS: dict[str, tuple[str, dict[str, str]]] = {
    "eager": ("eager", {}),
    "eager, malloc": ("eager", MALLOC),
    "eager, malloc, channels_last": ("eager channels_last", MALLOC),
    "eager, huge pages": ("eager", MALLOC | {"THP_MEM_ALLOC_ENABLE": "1"}),
    "eager, jemalloc": ("eager", {"LD_PRELOAD": str(LIBRARIES / "libjemalloc.so.2")}),
    "eager, tcmalloc": ("eager", {"LD_PRELOAD": str(LIBRARIES / "libtcmalloc_minimal.so.4")}),
    "compile, malloc": ("compile", MALLOC),
    "compile, malloc, channels_last": ("compile channels_last", MALLOC),
    "compile frozen, malloc": ("compile frozen", MALLOC),
    "compile frozen, malloc, channels_last": ("compile frozen channels_last", MALLOC),
    "jax": ("jax", {}),
    "exact": ("undertow exact", {}),
    "fast": ("undertow fast", {}),
    "before exact": ("undertow exact", {}),  # these two get their environment from --before
    "before fast": ("undertow fast", {}),
}
BEFORE = ("before exact", "before fast")
IN_EVALUATION = (
    "eager", "eager, malloc", "eager, malloc, channels_last", "compile, malloc", "compile, malloc, channels_last",
    "compile frozen, malloc", "compile frozen, malloc, channels_last", "jax", "fast",
)  # fmt: skip
IN_STEPS = tuple(name for name in CONTESTANTS if "frozen" not in name and name not in BEFORE)
OWN = ("exact", "fast")
BATCH = {"vgg16": 8, "resnet50": 8, "unet": 4, "gpt": 4, "mlp": 256}
EVALUATION_BATCHES = {"vgg16": (1, 8), "resnet50": (1, 8), "unet": (1, 8), "gpt": (1, 8), "mlp": (1, 8, 256)}
# A process of VGG-16 at batch 8 takes up to 2.5 GB, and a group with ours 12 GB at most.
PEERS_PER_GROUP = 4
TURN_S = 0.2


def prepare(workload: str, way: str, mode: str) -> Callable[[], Any]:
    """One step, or one evaluation, of a workload run in one way."""
    import torch
    from torch import nn

    import undertow as ut
    from undertow.models import ZOO

    torch.manual_seed(0)
    entry = ZOO[workload]
    batch = BATCH[workload] if mode == "step" else int(mode.removeprefix("evaluation "))
    if workload == "mlp":
        model: Any = nn.Sequential(
            nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
        )
    else:
        model = entry.build()
    args, targets = entry.example_inputs(batch), entry.example_targets(batch)
    if "channels_last" in way:
        model = model.to(memory_format=torch.channels_last)
        args = tuple(item.contiguous(memory_format=torch.channels_last) if item.dim() == 4 else item for item in args)
    if way == "jax":
        from jax_peer import jax_call

        return jax_call(model.train(mode == "step"), args, targets, entry.loss, workload == "mlp", mode == "step")
    is_own = way.startswith("undertow")
    numerics = way.removeprefix("undertow ")
    if mode != "step":
        model.eval()
        if "frozen" in way:
            import torch._inductor.config

            torch._inductor.config.freezing = True
        with torch.no_grad():
            run = ut.plan(model, args, numerics=numerics) if is_own else model
        run = torch.compile(run) if way.startswith("compile") else run

        def evaluate() -> None:
            with torch.no_grad():
                run(*args)

        return evaluate
    optimizer = torch.optim.Adam(model.parameters()) if workload == "mlp" else None
    if is_own:
        step = ut.train_step(model, args, targets=targets, loss=entry.loss, optimizer=optimizer, numerics=numerics)

        def own_step() -> None:
            if optimizer is None:
                model.zero_grad(set_to_none=True)
            step(*args, *targets)

        return own_step
    if workload == "mlp" and "channels_last" in way:  # the MLP has no images: this is the other tuning that a user has
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
    run = torch.compile(model) if way.startswith("compile") else model

    def peer_step() -> None:
        model.zero_grad(set_to_none=True)
        entry.loss(run(*args), *targets).backward()
        if optimizer is not None:
            optimizer.step()

    return peer_step


def measure_limits(workload: str, mode: str) -> tuple[float, float, float]:
    """GFLOP of one run by PyTorch's count, and this machine's fastest product (GFLOP/s) and copy (GB/s)."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    run = prepare(workload, "eager", mode)
    with FlopCounterMode(display=False) as counter:
        run()
    size = 2048
    x, weight = torch.randn(size, size), torch.randn(size, size)
    ways = [lambda: torch.mm(x, weight), lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")]
    big, other = torch.zeros(2**26), torch.ones(2**26)
    rates = []
    for act in (*ways, lambda: big.copy_(other)):
        seconds = []
        for _ in range(12):
            start = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - start)
        rates.append(1e-9 / min(seconds))
    return 1e-9 * counter.get_total_flops(), 2 * size**3 * max(rates[:2]), 8 * big.numel() * rates[2]


def serve(workload: str, name: str, mode: str) -> None:
    """Run whenever a line arrives, and answer with the seconds and the page faults of one run.

    Short runs are repeated: the first ones of a turn meet cold caches and waiting threads of the last contestant.
    """
    run = prepare(workload, CONTESTANTS[name][0], mode)
    for _ in range(2):
        run()
    print("ready", flush=True)
    for _ in sys.stdin:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds: list[float] = []
        while sum(seconds) < TURN_S:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // len(seconds)
        print(json.dumps([statistics.median(seconds), faults]), flush=True)


class Contestant:
    """A process that runs on request."""

    def __init__(self, workload: str, name: str, mode: str) -> None:
        environment = os.environ | CONTESTANTS[name][1] | {"KINETO_LOG_LEVEL": "99"}
        command = [sys.executable, __file__, "--serve", workload, name, mode]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self) -> tuple[float, int]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        seconds, faults = json.loads(self.answer())
        return seconds, faults

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def start(workload: str, mode: str, names: list[str]) -> dict[str, Contestant]:
    """The contestants that this machine can run, ready to run."""
    contestants: dict[str, Contestant] = {}
    for name in names:
        preload = CONTESTANTS[name][1].get("LD_PRELOAD")
        if preload is not None and not Path(preload).exists():
            continue
        contestant = Contestant(workload, name, mode)
        if contestant.answer() == "ready":
            contestants[name] = contestant
        else:
            print(f"{workload}, {mode}: {name} did not start", flush=True)
            contestant.end()
    return contestants


def take_turns(contestants: dict[str, Contestant], num_rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of every contestant in every round, and page faults in the last; ends all processes."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    faults: dict[str, int] = {}
    for number in range(num_rounds):
        order = list(contestants) if number % 2 else list(contestants)[::-1]
        for name in order:
            elapsed, faults[name] = contestants[name].run()
            seconds[name].append(elapsed)
    for contestant in contestants.values():
        contestant.end()
    return seconds, faults


def compare(workload: str, mode: str, names: list[str], num_rounds: int) -> dict[str, Any]:
    """Medians of every contestant, and ratios of peers to ours; the best peer has the least ratio."""
    own = [name for name in names if name in OWN]
    peers = [name for name in names if name not in OWN]
    seconds: dict[str, list[float]] = {}
    faults: dict[str, int] = {}
    ratios: dict[tuple[str, str], list[float]] = {}
    for first in range(0, len(peers), PEERS_PER_GROUP):
        group = [*peers[first : first + PEERS_PER_GROUP], *own]
        found, found_faults = take_turns(start(workload, mode, group), num_rounds)
        faults |= found_faults
        for name, times in found.items():
            seconds.setdefault(name, []).extend(times)
        for ours in set(own) & set(found):
            for peer in set(found) - set(OWN):
                ratios[peer, ours] = [a / b for a, b in zip(found[peer], found[ours], strict=True)]
    reference = own[-1]
    ranked = sorted({peer for peer, _ in ratios}, key=lambda peer: statistics.median(ratios[peer, reference]))
    best = ranked[0]
    best_not_frozen = next(peer for peer in ranked if "frozen" not in peer)
    result: dict[str, Any] = {
        "median_s": {name: round(statistics.median(times), 4) for name, times in seconds.items()},
        "page_faults": faults,
        "best_peer": best,
        "best_peer_not_frozen": best_not_frozen,
    }
    for peer in dict.fromkeys(("eager", "eager, malloc", best, best_not_frozen, *BEFORE)):
        for ours in own:
            if (peer, ours) in ratios:
                low, middle, high = statistics.quantiles(ratios[peer, ours], n=4)
                result[f"{peer} / {ours}"] = [round(item, 3) for item in (middle, low, high)]
    gflop, products, copies = measure_limits(workload, mode)
    result["limits"] = {"gflop": gflop, "product_gflop_per_s": products, "copy_gb_per_s": copies}
    # Winograd's products do the same work with fewer operations: its share may exceed 1.
    result["share_of_limit"] = {name: round(gflop / result["median_s"][name] / products, 3) for name in (*own, best)}
    return result


def main() -> None:
    """Compare all workloads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", nargs=3)
    parser.add_argument("--workloads", nargs="+", default=list(BATCH))
    parser.add_argument("--evaluation", action="store_true", help="forward passes in eval() instead of steps")
    parser.add_argument("--modes", nargs="+", help='"step", "evaluation 8" and so on, instead of the usual ones')
    parser.add_argument("--contestants", nargs="+")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    from machine import describe_machine

    if options.before is not None:
        options.contestants = [*BEFORE, *OWN]
        for name in BEFORE:
            environment = {
                "PYTHONPATH": f"{options.before}:{os.environ.get('PYTHONPATH', '')}",
                "XDG_CACHE_HOME": str(options.before / ".cache"),
            }
            CONTESTANTS[name] = (CONTESTANTS[name][0], environment)
    name = "speed_evaluation" if options.evaluation else "speed"
    out = Path(options.out or f"benchmarks/results/{name}.json")
    results = json.loads(out.read_text()) if out.exists() else {}
    for workload in options.workloads:
        evaluations = [f"evaluation {batch}" for batch in EVALUATION_BATCHES[workload]]
        for mode in options.modes or (evaluations if options.evaluation else ["step"]):
            names = options.contestants or list(IN_STEPS if mode == "step" else IN_EVALUATION)
            if importlib.util.find_spec("jax") is None and "jax" in names:
                print("JAX is not installed: it is left out", flush=True)
                names.remove("jax")
            found = compare(workload, mode, names, options.rounds)
            results[f"{workload}, {mode}"] = found | {"machine": describe_machine()}
            print(f"{workload}, {mode}", json.dumps(found), flush=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
