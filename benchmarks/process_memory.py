"""Steps in containers: the memory of the whole process, with a budget and in eager PyTorch.

Each step runs in a process of its own: first free of limits, to see by how much the process grows beyond what it was
before planning; then in control groups of several sizes, to see which of them it survives. The budget in a container is
"auto". The limit of a control group is on memory and swap together. Needs the right to make control groups.

What it costs to keep to the process's memory: the same plan also runs without returning free memory ("memory kept").

Usage: scripts/bench process_memory [--models resnet50:16,unet:4] [--limits 1500,2000,3000] [--out F]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "process_memory.json"
MIB = 1 << 20
SHARES = (0.4, 0.6)  # of eager's growth: the budgets of the runs without a limit
NUM_STEPS = 3

STEP = """
import json, sys, time
import torch
from undertow.models import ZOO

def resident(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

name, batch, budget = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
zoo = ZOO[name]
model, args, targets = zoo.build(), zoo.example_inputs(batch), zoo.example_targets(batch)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
about = {}
if budget == "eager":
    def step(*batch):
        loss = zoo.loss(model(*batch[:len(args)]), *batch[len(args):])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    import undertow as ut
    from undertow.runtime import step as running
    if sys.argv[5] == "kept":
        running.rooms_of = lambda plan: {}
    step = ut.train_step(model, args, targets=targets, loss=zoo.loss, optimizer=optimizer, budget=budget)
    about = {"budget_mib": step.plan.budget_bytes >> 20, "predicted_mib": step.plan.peak_bytes >> 20}
times = []
for _ in range(int(sys.argv[4])):
    start = time.perf_counter()
    step(*args, *targets)
    times.append(time.perf_counter() - start)
print(json.dumps(about | {"grown_mib": resident("VmHWM") - before >> 20, "before_mib": before >> 20,
                          "step_s": round(min(times), 3)}))
"""


def run(model: str, budget: str, limit_mib: int | None = None, memory: str = "returned") -> dict[str, Any]:
    """What the process reported; `{"killed": ...}` where the system ended it."""
    name, _, batch = model.partition(":")
    command = [sys.executable, "-c", STEP, name, batch, budget, str(NUM_STEPS), memory]
    start = time.perf_counter()
    with Group(limit_mib) as group:
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=group.enter)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] if done.returncode != -9 else []
        return {"killed": done.returncode == -9, "said": " ".join(reason)[:200]}
    return json.loads(done.stdout) | {"whole_s": round(time.perf_counter() - start, 1)}


class Group:
    """A control group with a limit; without one, nothing."""

    def __init__(self, limit_mib: int | None) -> None:
        root = Path("/sys/fs/cgroup")
        self._is_first = (root / "memory").is_dir()
        self._folder = (root / "memory" if self._is_first else root) / f"undertow-{os.getpid()}"
        self._limit_mib = limit_mib

    def __enter__(self) -> Group:
        if self._limit_mib is not None:
            self._folder.mkdir()
            names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if self._is_first else ("memory.max",)
            for name in names:
                if (self._folder / name).exists():
                    (self._folder / name).write_text(str(self._limit_mib * MIB))
        return self

    def enter(self) -> None:
        """Called in the child, before it starts."""
        if self._limit_mib is not None:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def __exit__(self, *error: Any) -> None:
        if self._limit_mib is not None:
            self._folder.rmdir()


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50:16,unet:4,gpt:4")
    parser.add_argument("--limits", default="1000,1250,1500,2000,3000", help="MiB of the control groups")
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args()
    rows = []
    for model in options.models.split(","):
        eager = run(model, "eager")
        rows.append({"model": model, "how": "eager", "limit_mib": None} | eager)
        print(rows[-1], flush=True)
        for share in SHARES:
            for how, memory in (("budget", "returned"), ("budget, memory kept", "kept")):
                found = run(model, f"{int(eager['grown_mib'] * share)}MiB", memory=memory)
                rows.append({"model": model, "how": how, "limit_mib": None} | found)
                print(rows[-1], flush=True)
        for limit_mib in map(int, options.limits.split(",")):
            for how in ("eager", "auto"):
                rows.append({"model": model, "how": how, "limit_mib": limit_mib} | run(model, how, limit_mib))
                print(rows[-1], flush=True)
    Path(options.out).write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
