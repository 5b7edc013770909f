#!/usr/bin/env python3
"""Workers that share parameters without locks, beside locks, steps together, data parallel, and plain PyTorch.

In: MNIST's folder, if given. Out: benchmarks/results/hogwild.json, which docs/asynchronous.md shows.

    sparse   updates a second of one and of two workers, and the loss after as many updates, over seeds
    dense    LeNet: examples a second and accuracy after one pass, in turns
    lost     additions of 1 that were lost, dense and sparse
    memory   one sum of gradients for all workers beside one each

Whoever is compared runs in turns, each round gives one ratio, and medians and quartiles of the ratios are reported.
Each worker has half of the cores, one worker alone as well. Usage: scripts/bench hogwild [--data FOLDER] [--rounds N]
[--seeds N] [--small] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from hogwild_workers import Team, count_lost, run_team, train_documents, train_images
from machine import describe_machine

RESULTS = Path(__file__).resolve().parent / "results" / "hogwild.json"
ALONE, TWO = Team("alone"), Team("hogwild", 2)
DENSE = {
    "alone": ALONE,
    "no lock": TWO,
    "one lock": Team("hogwild", 2, "one"),
    "a lock for each parameter": Team("hogwild", 2, "parameter"),
    "steps begun together": Team("hogwild", 2, "step"),
    "data parallel": Team("in_step", 2),
    "plain PyTorch": Team("plain_pytorch", 2),
}


def rate(found: list[dict[str, Any]], what: str = "updates") -> float:
    """How many a second, of all workers together."""
    return sum(item[what] for item in found) / max(item["seconds"] for item in found)


def spread(ratios: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def measure_sparse(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rates in turns, and losses over seeds; each run is one pass over the documents."""
    settings = {"num_documents": 2_000 if arguments.small else 40_000, "batch": 8, "lr": 2.0}
    runs: dict[str, list[list[dict[str, Any]]]] = {"one": [], "two": []}
    for seed in range(arguments.seeds):
        for name, team in (("one", ALONE), ("two", TWO)):
            runs[name].append(run_team(train_documents, team, {**settings, "seed": seed}))
    losses = {name: [found[0]["loss"] for found in rounds] for name, rounds in runs.items()}
    ratios = [rate(two) / rate(one) for one, two in zip(runs["one"], runs["two"], strict=True)]
    return {
        **settings,
        "updates_per_s": {name: round(statistics.median(map(rate, rounds))) for name, rounds in runs.items()},
        "two_over_one": spread(ratios),
        "losses": losses,
        "difference_of_means": statistics.mean(losses["two"]) - statistics.mean(losses["one"]),
        "deviation_over_seeds": statistics.stdev(losses["one"]) if arguments.seeds > 1 else None,
    }


def measure_dense(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each contender once in each round, with the round's seed; each run is one pass over the images."""
    settings = {"data": arguments.data, "num_images": 1_024 if arguments.small else 60_000, "batch": 64, "lr": 0.01}
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in DENSE}
    for seed in range(arguments.rounds):
        for name, team in DENSE.items():
            runs[name].append(run_team(train_images, team, {**settings, "seed": seed}))
    rows = {}
    for name, rounds in runs.items():
        ratios = [
            rate(found, "examples") / rate(alone, "examples")
            for found, alone in zip(rounds, runs["alone"], strict=True)
        ]
        rows[name] = {
            "examples_per_s": round(statistics.median(rate(found, "examples") for found in rounds)),
            "over_alone": spread(ratios),
            "accuracies": [round(found[0]["accuracy"], 4) for found in rounds],
        }
    return {**settings, "data": "MNIST" if arguments.data else "drawn", "rows": rows}


def measure_lost(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Additions of 1 by two workers, with and without locks."""
    rows = []
    for num_elements in (1, 1_000, 100_000, 0):  # 0: rows of a table, by the power law
        for locking in ("none", "parameter"):
            num_updates = 300 if arguments.small else 1_000 if num_elements == 100_000 else 5_000
            settings = {"num_updates": num_updates, "num_elements": num_elements}
            found = run_team(count_lost, Team("hogwild", 2, locking), settings)
            added = sum(item["added"] for item in found)
            lost = (added - found[0]["found"]) / added
            rows.append({"elements": num_elements or "76 rows of 47,236", "locking": locking, "added": added})
            rows[-1]["lost_share"] = round(lost, 6)
            print(json.dumps(rows[-1]))
    return rows


def measure_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """What both processes take, with a sum of gradients for each and with one for both."""
    settings = {"data": None, "num_images": 1_024, "batch": 64, "lr": 0.01, "accumulate": 2, "seed": 0}
    rows: dict[str, Any] = {}
    for name, has_one in (("one each", False), ("one for all", True)):
        found = run_team(train_images, Team("hogwild", 2, has_one_gradient=has_one), settings)
        rows[name] = {"process_bytes": sum(item["proportional_bytes"] for item in found), "says": found[0]["shared"]}
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="MNIST's folder; without it images are drawn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="see that it works; nothing is written")
    measures = {"sparse": measure_sparse, "dense": measure_dense, "lost": measure_lost, "memory": measure_memory}
    parser.add_argument("--only", nargs="*", choices=measures, default=list(measures))
    arguments = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in arguments.only:
        found[name] = {"machine": describe_machine(), "found": measures[name](arguments)}
        print(name, json.dumps(found[name]["found"], indent=1), flush=True)
    if not arguments.small:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
