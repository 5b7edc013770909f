"""Sequences of many lengths in random order, beside eager: the first pass over all of them, and later ones.

A GPT of two layers, batch 2; each length is a batch of its own. In the later passes every length runs once with eager
and once with the plan, in alternating order, so that the machine's other load falls on both. `later_over_eager` is the
ratio of their total times. Times are processor time on one thread, in which other load of the machine counts little.
Usage: scripts/bench lengths [--lengths N] [--passes N] [--out F]
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch.nn.functional import cross_entropy

import undertow as ut
from undertow.models.gpt import char_gpt

SHORTEST, BATCH, VOCABULARY = 16, 2, 65
BUDGET_SHARE = 0.8  # of the peak of the longest sequence without a budget


class LanguageModel(torch.nn.Module):
    """Returns its loss."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.gpt = char_gpt(VOCABULARY, context=longest, num_layers=2, width=64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


Call = Callable[[torch.Tensor], Any]


def make_calls(kind: str, model: LanguageModel, example: torch.Tensor, budget: int | None) -> tuple[Call, Call]:
    """One step of eager on a copy of the model, and one of ours."""
    eager = copy.deepcopy(model)
    if kind == "train_step":
        optimizer = torch.optim.AdamW(eager.parameters())
        step = ut.train_step(model, (example,), optimizer=torch.optim.AdamW(model.parameters()), budget=budget)

        def train_eagerly(tokens: torch.Tensor) -> None:
            eager(tokens).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return train_eagerly, step

    def differentiate(module: Any) -> Call:
        def call(tokens: torch.Tensor) -> None:
            module(tokens).backward()
            module.zero_grad(set_to_none=True)

        return call

    return differentiate(eager), differentiate(ut.plan(model, (example,), budget=budget))


def run(kind: str, has_budget: bool, num_lengths: int, num_passes: int) -> dict[str, Any]:
    """Measure one way to train."""
    torch.manual_seed(0)
    longest = SHORTEST + num_lengths
    model = LanguageModel(longest)
    batches = [torch.randint(VOCABULARY, (BATCH, length + 1)) for length in range(SHORTEST, longest)]
    budget = None
    if has_budget:
        peak = ut.train_step(copy.deepcopy(model), (batches[-1],)).plan.peak_bytes
        budget = int(BUDGET_SHARE * peak)
    eager, ours = make_calls(kind, model, batches[num_lengths // 2], budget)
    random.Random(0).shuffle(batches)
    for tokens in batches:
        eager(tokens)
    first_s = _time(lambda: [ours(tokens) for tokens in batches])
    times: dict[Call, list[float]] = {eager: [], ours: []}
    for index in range(num_passes):
        for tokens in random.Random(index).sample(batches, len(batches)):
            for call in (eager, ours) if index % 2 else (ours, eager):
                times[call].append(_time(lambda call=call, tokens=tokens: call(tokens)))
    return {
        "kind": kind,
        "budget_mib": None if budget is None else round(budget / 2**20, 2),
        "num_lengths": num_lengths,
        "first_pass_s": round(first_s, 2),
        "first_pass_ms_per_length": round(1e3 * first_s / num_lengths, 1),
        "eager_ms": round(1e3 * statistics.median(times[eager]), 2),
        "later_ms": round(1e3 * statistics.median(times[ours]), 2),
        "later_over_eager": round(sum(times[ours]) / sum(times[eager]), 3),
        "first_pass_in_eager_steps": round(first_s / num_lengths / statistics.median(times[eager]), 1),
    }


def _time(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    """Run all ways and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, default=200)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lengths.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("undertow").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*different types of arguments")
    result: dict[str, Any] = {"machine": describe_machine(), "results": []}
    for has_budget in (False, True):
        for kind in ("plan", "train_step"):
            result["results"].append(run(kind, has_budget, options.lengths, options.passes))
            print(json.dumps(result["results"][-1]), flush=True)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
