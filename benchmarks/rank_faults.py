"""Faults in one rank of a job: it ends or goes on within the bound, names the cause, and has the same bits after.

A small network with batch normalisation and dropout trains on several ranks, which `undertow train` starts. In one
rank a fault is injected, once, in one phase of the run: its process is killed, stopped, ends, hangs or raises; its
connections are shut down; its disk is full. The injector is in the model's own file, so nothing of it is in Undertow.
It writes down that it fires right before it does, and a case counts only if it has. The job starts again by itself,
or says why it does not and is then resumed. Its weights, its optimizer's state and its losses are compared with those
of an undisturbed run in one process.

A link that goes down breaks no connection. For that, two ranks run in two network namespaces, as torchrun would start
them on two machines, and one sets its interface down; it needs root and is left out without.

Usage: scripts/bench rank_faults [--ranks N] [--every N] [--cases NAME ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from machine import describe_machine
from rank_links import JoinedEnds, why_not

from undertow.hashing import hash_tensors
from undertow.train.checkpoint import GENERATOR
from undertow.train.folder import RunFolder

INJECTOR = Path(__file__).with_name("rank_fault_injector.py")
PHASES = ("forward", "backward", "reduce", "update", "save", "load")
KINDS = {
    "kill": "was killed by SIGKILL",
    "stop": "has not moved for",
    "exit": "ended with exit code 9",
    "hang": "has not moved for",
    "raise": "injected",
    "link": "its connection broke",
    "disk": "No space left on device",
    "down": "has not moved for",
}
LOST_AFTER_S = 10
# After a rank is given up, the others have this long to end by themselves, and their processes to be gone.
ENDING_S = 20
NEVER_S = 300
OPTIONS = ["--data", "data.npz", "--epochs", "2", "--batch", "24", "--shards", "6", "--save-every", "4", "--seed", "5"]
OPTIONS += ["--optimizer", "adamw", "--threads", "1", "--device", "cpu", "--lost-after", str(LOST_AFTER_S)]


@dataclass(frozen=True)
class Case:
    """One fault: what happens, in which phase, in which rank."""

    kind: str
    phase: str
    rank: int

    @property
    def name(self) -> str:
        """As `--cases` takes it."""
        return f"{self.kind}-{self.phase}-{self.rank}"


def all_cases(num_ranks: int) -> list[Case]:
    """Every kind in every phase and rank where it makes sense."""
    found = []
    for kind in KINDS:
        for phase in PHASES:
            if (kind in ("link", "down") and phase == "load") or (kind == "disk" and phase != "save"):
                continue  # there is no connection to shut down yet; nothing else is written
            found += [Case(kind, phase, rank) for rank in range(2 if kind == "down" else num_ranks)]
    return found


def write_inputs() -> None:
    """A model with the injector, and data, in the current folder."""
    shutil.copy(INJECTOR, "model.py")
    draw = numpy.random.default_rng(0)
    x = draw.standard_normal((240, 16)).astype("float32")
    numpy.savez("data.npz", x=x, y=x[:, :4].argmax(1))


def start(words: list[str], fault: Case | None, within: list[str], more: dict[str, str]) -> subprocess.Popen[str]:
    """`undertow train`, with a fault that waits for its moment."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | more
    if fault is not None:
        log = str(Path(f"{fault.name}.fired").resolve())
        environment["FAULT"] = json.dumps(asdict(fault) | {"log": log, "interface": JoinedEnds.interface})
    return subprocess.Popen(
        [*within, sys.executable, "-m", "undertow", "train", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_lines(process: subprocess.Popen[str]) -> list[tuple[float, str]]:
    """What a process says on stderr until it ends, with the time of each line; its end is a last, empty line."""
    deadline, lines = threading.Timer(NEVER_S, process.kill), []
    deadline.start()
    assert process.stderr is not None
    for line in process.stderr:
        lines.append((time.time(), line.strip()))
    process.wait()
    deadline.cancel()
    return [*lines, (time.time(), "")]


def run(words: list[str], fault: Case | None) -> tuple[int, list[tuple[float, str]]]:
    """The exit code of `undertow train`, and its lines on stderr with the time of each."""
    process = start(words, fault, [], {})
    lines = read_lines(process)
    return process.returncode, lines


def run_apart(words: list[str], fault: Case) -> tuple[int, list[tuple[float, str]]]:
    """The same for two ranks that have nothing in common but a link and the disk: the code of rank 0, all lines."""
    with JoinedEnds() as ends, ThreadPoolExecutor() as pool:
        where = {"WORLD_SIZE": "2", "MASTER_ADDR": ends.addresses[0], "MASTER_PORT": "29500"}
        ranks = [start(words, fault, ends.enter(rank), where | {"RANK": str(rank)}) for rank in range(2)]
        lines = sorted(line for found in pool.map(read_lines, ranks) for line in found)
    return ranks[0].returncode, lines


def state_of(folder: str) -> tuple[str, str]:
    """Hashes of a finished run: of its weights and its optimizer's state, and of its losses."""
    found = RunFolder(Path(folder))
    checkpoint = found.read_checkpoint()
    assert checkpoint.progress.stopped == "finished"
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith(GENERATOR)}
    losses = [(item["step"], item["loss"]) for item in found.read_metrics() if item["kind"] == "train"]
    return hash_tensors(tensors), json.dumps(losses)


def try_case(case: Case, num_ranks: int, expected: tuple[str, str]) -> dict[str, Any]:
    """Inject one fault; what went wrong is in `problems`."""
    parallel = ["--parallel", f"data={num_ranks}", "--max-restarts", "1"]
    if case.kind == "down":
        parallel = ["--parallel", "data=2"]
    words = ["model.py:make", "--out", case.name, *OPTIONS, *parallel]
    if case.phase == "load":  # of a checkpoint
        shutil.copytree("half", case.name)
        words = ["--resume", case.name, "--max-steps", "1000", *parallel]
    code, lines = (run_apart if case.kind == "down" else run)(words, case)
    problems = []
    fired = Path(f"{case.name}.fired")
    named = [at for at, line in lines if KINDS[case.kind] in line]
    bound_s = LOST_AFTER_S + ENDING_S
    noticed_s = None
    if not fired.exists():
        problems.append("the fault did not fire")
    elif not named:
        problems.append(f"no line has {KINDS[case.kind]!r}")
    else:
        noticed_s = named[0] - float(fired.read_text())
        if noticed_s > bound_s:
            problems.append(f"noticed after {noticed_s:.0f} s, and the bound is {bound_s}")
        ended_s = lines[-1][0] - float(fired.read_text())
        if code != 0 and ended_s > bound_s:
            problems.append(f"ended after {ended_s:.0f} s, and the bound is {bound_s}")
    has_gone_on = code == 0
    if not has_gone_on:
        if code not in (2, 5, 6):
            problems.append(f"exit code {code}")
        again = ["--resume", case.name] if Path(case.name, "config.json").exists() else words
        code, more = run(again, None)
        lines += more
        if code:
            problems.append(f"exit code {code} when it was resumed")
    if not problems and state_of(case.name) != expected:
        problems.append("other bits")
    left = find_processes(case.name)
    if left:
        problems.append(f"processes are left: {left}")
    return {
        "case": case.name,
        "fired": fired.exists(),
        "noticed_s": None if noticed_s is None else round(noticed_s, 2),
        "went_on_by_itself": has_gone_on,
        "problems": problems,
        "said": [line for _, line in lines if line.startswith("undertow:")],
    }


def find_processes(folder: str) -> list[int]:
    """The ranks of the run in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if f"--out={folder}\0" in command or f"--resume={folder}\0" in command:
            found.append(int(path.parent.name))
    return found


def measure(cases: list[Case], num_ranks: int) -> list[dict[str, Any]]:
    """Try the cases in the current folder."""
    write_inputs()
    runs = {"expected": []} | ({"half": ["--max-steps", "9"]} if any(case.phase == "load" for case in cases) else {})
    for folder, more in runs.items():
        code, lines = run(["model.py:make", "--out", folder, *OPTIONS, *more], None)
        assert code == 0, lines
    expected = state_of("expected")
    found = []
    for case in cases:
        found.append(try_case(case, num_ranks, expected))
        print(f"{case.name}: {'; '.join(found[-1]['problems']) or 'good'}, {found[-1]['noticed_s']} s", flush=True)
        if not found[-1]["problems"]:
            shutil.rmtree(case.name)
    return found


def main() -> None:
    """Try all cases, or those that are named; the exit code is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="try only each N-th case")
    parser.add_argument("--cases", nargs="*", help="names, such as kill-reduce-1")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = all_cases(options.ranks)
    known = {case.name: case for case in cases}
    cases = cases[:: options.every] if options.cases is None else [known[name] for name in options.cases]
    if any(case.kind == "down" for case in cases) and (reason := why_not()):
        print(f"links that go down are left out: {reason}", flush=True)
        cases = [case for case in cases if case.kind != "down"]
    machine, home = describe_machine(), os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = measure(cases, options.ranks)
        os.chdir(home)
    wrong = [item for item in found if item["problems"]]
    slowest_s = max((item["noticed_s"] or 0.0 for item in found), default=0.0)
    result = {"injected": sum(item["fired"] for item in found), "wrong": wrong, "noticed_after_at_most_s": slowest_s}
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine, "result": result, "cases": found}, indent=2) + "\n")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
