"""Machines, processes and caches without something: a step still runs, or says what is missing; it never hangs."""

import json
import os
import subprocess
import sys
import textwrap
from collections import OrderedDict

import pytest
import torch
from torch import nn

import undertow as ut
from undertow.calls import runner
from undertow.costs.cache import MAX_COSTS, cache_path, keep_costs, load_costs
from undertow.ir.cost import Cost
from undertow.kernels.draws import has_pytorch_bits
from undertow.planner import curve

# A network that uses every kernel of `fast`, trained by eager and by Undertow; returns the losses.
TRAINING = """
import copy, os, warnings, torch, undertow as ut
from torch import nn
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(),
    nn.MaxPool2d(2), nn.Conv2d(16, 8, 1), nn.Flatten(), nn.Linear(8 * 64, 64), nn.LayerNorm(64), nn.Linear(64, 300),
)
x, y = torch.randn(4, 3, 16, 16), torch.randint(300, (4,))


def train(numerics, budget=None, steps=3):
    model = copy.deepcopy(network)
    optimizer = torch.optim.AdamW(model.parameters())
    if numerics is not None:
        terms = dict(loss=cross_entropy, optimizer=optimizer, numerics=numerics, budget=budget)
        step = ut.train_step(model, (x,), targets=(y,), **terms)
        return [step(x, y) for _ in range(steps)]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def check():
    expected = train(None)
    for budget in (None, "3MiB"):
        assert all(torch.equal(a, b) for a, b in zip(train("exact", budget), expected))
        torch.testing.assert_close(train("fast", budget), expected, rtol=1e-3, atol=1e-4)
    model = copy.deepcopy(network).eval()
    with torch.no_grad():
        found = ut.plan(model, (x,), numerics="fast")(x)
        torch.testing.assert_close(found, model(x), rtol=1e-3, atol=1e-4)
"""


def run(code, tmp_path, **environment):
    """What a new process with a cache of its own prints; it shares compiled kernels, unless told not to."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING + textwrap.dedent(code)],
        env={**inherited, "XDG_CACHE_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def test_without_numba(tmp_path):
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text(
        textwrap.dedent("""
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("numba", "llvmlite"):
                    raise ImportError(f"no {name} here")

        sys.meta_path.insert(0, Blocker())
        """)
    )
    paths = os.pathsep.join([str(tmp_path), *(item for item in sys.path if item)])
    _, err = run("check()", tmp_path, PYTHONPATH=paths)
    assert err.count("Numba cannot be imported (no numba here)") == 1


def test_on_one_core(tmp_path):
    out, _ = run(
        """
        check()
        import numba
        print(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        """,
        tmp_path,
        NUMBA_NUM_THREADS="1",
        OMP_NUM_THREADS="1",
    )
    assert out.split() == ["1", "1"]


@pytest.mark.skipif("UNDERTOW_SLOW_TESTS" not in os.environ, reason="compiles every kernel again, for two minutes")
def test_without_wide_vectors(tmp_path):
    """The least instruction set of x86-64, in Numba's kernels and PyTorch's: no AVX, no fused multiply-add."""
    run(
        "check()",
        tmp_path,
        NUMBA_CPU_NAME="generic",
        NUMBA_CPU_FEATURES="",
        NUMBA_CACHE_DIR=str(tmp_path),
        ATEN_CPU_CAPABILITY="default",
        ONEDNN_MAX_CPU_ISA="SSE41",
    )


def test_in_forked_processes(tmp_path):
    out, _ = run(
        """
        torch.set_num_threads(2)
        exact = train("exact")
        child = os.fork()  # before any loop of Numba's has run
        if not child:
            train("fast")
            print("first child on", torch.get_num_threads(), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        expected = train("fast")

        class Planned(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return torch.stack(train("exact"))

        for found in torch.utils.data.DataLoader(Planned(), num_workers=2, multiprocessing_context="fork"):
            torch.testing.assert_close(list(found[0]), exact)  # on one thread, where sums have another order
        child = os.fork()
        if not child:
            torch.testing.assert_close(train("fast"), expected, rtol=1e-3, atol=1e-4)
            print("child on", torch.get_num_threads(), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        train("fast")
        print("parent on", torch.get_num_threads())
        """,
        tmp_path,
    )
    assert out.splitlines() == ["first child on 1", "child on 1", "parent on 2"]


@pytest.mark.parametrize(
    "text",
    [
        '{"mm": [1, 2], "con',
        "",
        "null",
        "[[1, 2]]",
        '{"mm": 3}',
        '{"mm": [1]}',
        '{"mm": ["1", 2]}',
        '{"mm": [-1, 2]}',
        '{"mm": [1.5, NaN]}',
        f'{{"mm": [1, {10**30}]}}',
        "\x00\xff",
        "[" * 100_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_a_corrupt_tuning_cache_is_rebuilt(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path(torch.device("cpu"))
    path.parent.mkdir()
    path.write_text(text)
    x = torch.randn(4, 16)
    ut.plan(nn.Linear(16, 8), (x,), numerics="fast")(x).sum().backward()
    assert load_costs(path)


def test_the_tuning_cache_of_another_machine_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("undertow.costs.cache.processor_name", lambda: "another")
    foreign = cache_path(torch.device("cpu"))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    foreign.parent.mkdir()
    foreign.write_text("{}")
    x = torch.randn(4, 16)
    ut.plan(nn.Linear(16, 8), (x,), numerics="fast")
    assert foreign.read_text() == "{}"
    assert load_costs(cache_path(torch.device("cpu")))


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_ever_new_shapes_do_not_pile_up(numerics, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(runner, "LEAST_CAPTURES", 4)
    monkeypatch.setattr(runner, "CAPTURES_BYTES", 0)
    monkeypatch.setattr(curve, "MAX_KNOWN", 3)
    monkeypatch.setattr(curve, "_KNOWN", OrderedDict())
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    planned = ut.plan(network, (torch.randn(1, 2, 8, 8),), numerics=numerics, budget="64MiB", costs="model")
    for batch in range(1, 8):
        planned(torch.randn(batch, 2, 8, 8)).sum().backward()
    assert len(planned.undertow_runner._variants) == 4
    assert len(curve._KNOWN) <= 3


def test_costs_are_kept_up_to_a_number(tmp_path):
    path = tmp_path / "costs.json"
    keep_costs(path, {f"mm {index}": Cost(1, 1) for index in range(MAX_COSTS + 1)})
    kept = json.loads(path.read_text())
    assert len(kept) == MAX_COSTS and "mm 0" not in kept


@pytest.mark.parametrize("numerics", ["exact", "fast", "bf16"])
@pytest.mark.parametrize("budget", [None, "2MiB"])
def test_gradients_asked_for_twice(numerics, budget, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(2)]
    network = nn.Sequential(*layers, nn.Conv2d(16, 8, 3), nn.ReLU())
    x = torch.randn(4, 3, 16, 16)
    planned = ut.plan(network, (x,), numerics=numerics, budget=budget)
    loss = planned(x).float().square().mean()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in planned.parameters()]
    loss.backward()
    for parameter, gradient in zip(planned.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_the_first_draw_may_be_made_while_a_model_is_recorded_whatever_the_defaults():
    class Branching(nn.Module):
        def forward(self, x):
            y = nn.functional.dropout(x, 0.5)
            return y * 2 if y.sum() > -1 else y

    has_pytorch_bits.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        planned = ut.plan(Branching(), (torch.ones(100, dtype=torch.float32),))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    expected = Branching()(torch.ones(100))
    torch.manual_seed(0)
    assert torch.equal(planned(torch.ones(100)), expected)
    with torch.device("meta"):
        has_pytorch_bits.cache_clear()
        has_pytorch_bits()


def test_costs_of_nothing_are_planned_with():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(64, 8)
    costs = ut.train_step(model, (x,), loss=torch.sum, budget="1MiB").costs
    nothing = {key: (0, workspace) for key, (_, workspace) in costs.items()}
    ut.train_step(model, (x,), loss=torch.sum, budget="1MiB", costs=nothing)
