"""The process that `costs/apart.py` starts: it reads nodes from its input, runs them, and writes what they cost.

In: the number of threads as an argument; a node a line, as JSON. Out: a line for each, `[nanoseconds, bytes]`; or
"unknown" where there is no such operation here, "refused" where the kernel takes no made-up arguments. With `compile`
as its argument it compiles the planner's loops (`costs/compiling.py`).
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress

import torch
from torch import nn

from undertow import pipeline as pipeline  # registers every operation
from undertow.api.training import train_step
from undertow.costs.measuring import measure_costs
from undertow.errors import InfeasibleBudget, UndertowError
from undertow.ir.cost import Cost
from undertow.ir.saving import read_node
from undertow.ops.interpret import NO_LIVE
from undertow.runtime.allocator import keep_memory_mapped


def main() -> None:
    """Answer until the input ends."""
    _volunteer_for_death()
    if sys.argv[1] == "compile":
        _plan_something()
        return
    torch.set_num_threads(int(sys.argv[1]))
    keep_memory_mapped()  # as in the process that will run the step
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a kernel prints must not look like an answer
    for line in sys.stdin:
        answers.write(json.dumps(_measure(line)) + "\n")
        answers.flush()


def _measure(line: str) -> tuple[int, int] | str:
    try:
        node = read_node(json.loads(line))
    except UndertowError:
        return "unknown"
    costs: dict[str, Cost] = {}
    measure_costs([node], costs, NO_LIVE)
    return next(((cost.duration_ns, cost.workspace_bytes) for cost in costs.values()), "refused")


def _plan_something() -> None:
    """Plan and run a small step within its least memory: all loops of the planner are compiled on the way."""
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten()]
    model, x = nn.Sequential(*layers, nn.Linear(36, 2)), torch.randn(4, 2, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for budget in (1, 1 << 30):
        with suppress(InfeasibleBudget):
            train_step(model, (x,), optimizer=optimizer, loss=torch.sum, budget=budget, costs="model")(x)


def _volunteer_for_death() -> None:
    """Ask to be killed first when memory runs out: the process that waits for this one is the user's."""
    if sys.platform.startswith("linux"):
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


if __name__ == "__main__":
    main()
