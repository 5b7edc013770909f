"""Elementwise chains of a Program as one generated loop: what is folded, and that it computes the same."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from spread_cases import spread
from torch import nn

import undertow as ut
from undertow.ir.cost import Cost
from undertow.kernels.elementwise import compile_chain
from undertow.passes import chains

pytest.importorskip("numba")


class Chained(nn.Module):
    """Residual sums, scaled masks and activations: a transformer without its products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.silu(self.first(x)) * 0.5 + x
        return torch.tanh(-hidden) * nn.functional.hardtanh(self.second(hidden), -0.5, 2.0) + hidden / 3


@pytest.fixture
def always_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold whatever can be: what is faster depends on the machine."""
    plain = chains.fold_chains

    def fold(program, measure):
        return plain(program, lambda nodes: lambda node: Cost(1 if node.name.startswith("chain") else 1000, 0))

    monkeypatch.setattr("undertow.passes.choose.fold_chains", fold)


def folded(planned) -> list[str]:
    return [node.name for node in planned.plan.nodes if node.name.startswith("chain")]


def test_chains_compute_what_their_operations_do(always_fold: None) -> None:
    torch.manual_seed(0)
    model, x = Chained(), torch.randn(256, 128)
    exact = copy.deepcopy(model).double()
    step = ut.train_step(model, (x,), loss=lambda y: y.square().mean(), numerics="fast")
    assert len(folded(step)) >= 2
    expected = exact(x.double()).square().mean()
    expected.backward()
    torch.testing.assert_close(step(x).double(), expected, rtol=1e-5, atol=0)
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        error = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 128 * torch.finfo(torch.float32).eps


def test_a_result_that_two_read_is_made(always_fold: None) -> None:
    class Shared(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            twice = x * 2.0
            return torch.exp(twice), twice + x

    x = torch.rand(256, 128)
    with torch.no_grad():
        planned = ut.plan(Shared(), (x,), numerics="fast")
        first, second = planned(x)
    assert torch.equal(second, x * 2 + x)
    torch.testing.assert_close(first, torch.exp(2 * x), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(3, 5), (127, 129), (1, 70_001)], ids=str)
def test_sizes_that_fit_nothing(always_fold: None, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(chains, "LEAST_ELEMENTS", 1)
    x = torch.randn(shape)
    with torch.no_grad():
        planned = ut.plan(nn.Sequential(nn.SiLU(), nn.Tanh(), nn.Sigmoid()), (x,), numerics="fast")
        assert len(folded(planned)) == 1
        torch.testing.assert_close(planned(x), torch.sigmoid(torch.tanh(nn.functional.silu(x))), rtol=1e-6, atol=1e-6)


def test_nan_and_infinity_pass(always_fold: None) -> None:
    x = torch.randn(256, 128)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    model = nn.Sequential(nn.Hardtanh(-1.0, 1.0), nn.Tanh())
    with torch.no_grad():
        found = ut.plan(model, (x,), numerics="fast")(x)
        torch.testing.assert_close(found, model(x), equal_nan=True, rtol=1e-6, atol=1e-6)


def test_exact_folds_nothing() -> None:
    x = torch.randn(256, 128)
    step = ut.train_step(Chained(), (x,), loss=torch.sum)
    assert not folded(step)


def test_the_next_process_takes_what_this_one_compiled(tmp_path: Path) -> None:
    code = """
        import torch
        from undertow.kernels.elementwise import compile_chain

        x, out = torch.rand(9000), torch.empty(9000)
        compile_chain(("full",), (("mul", (0, 2.0)), ("tanh", (1,))), (2,))((x,), (out,))
        torch.testing.assert_close(out, torch.tanh(2 * x))
    """
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    seen = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True)
        seen.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")})
    assert seen[0] and seen[0] == seen[1]


def test_a_number_is_no_operand() -> None:
    """1 names the second input and 1.0 is a number, although the two are equal."""
    x, y = torch.rand(2, 5000)
    for last, expected in ((1, x * y + y), (1.0, x * y + 1)):
        out = torch.empty(5000)
        compile_chain(("full", "full"), (("mul", (0, 1)), ("add", (2, last))), (3,))((x, y), (out,))
        torch.testing.assert_close(out, expected)


class Powers(nn.Module):
    """Ends in a chain, whose cotangent is then the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.tanh(self.linear(x))) * 2


@pytest.mark.parametrize(
    "loss_of",
    [lambda y, w: (y.t() * w).sum(), lambda y, w: y.sum(), lambda y, w: (y * w.t()).sum()],
    ids=["transposed", "expanded", "contiguous"],
)
def test_a_cotangent_in_any_layout(always_fold: None, loss_of) -> None:
    torch.manual_seed(0)
    model, x, weights = Powers(), torch.randn(512, 64), torch.randn(256, 512)
    planned = ut.plan(copy.deepcopy(model), (x,), numerics="fast")
    assert folded(planned)
    for module in (model, planned):
        loss_of(module(x), weights).backward()
    for ours, theirs in zip(planned.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4 * float(theirs.grad.abs().max()))


def test_a_parameter_with_new_strides(always_fold: None) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(256, 256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * self.weight) * 2 + x

    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(256, 256)
    planned = ut.plan(model, (x,), numerics="fast")
    assert folded(planned)
    before = planned(x).detach().clone()
    model.weight.data = model.weight.data.t().contiguous().t()
    torch.testing.assert_close(planned(x).detach(), before)


@pytest.mark.parametrize("lowest", [-float("inf"), float("nan")])
def test_constants_without_a_literal(lowest: float) -> None:
    run = compile_chain(("full",), (("maximum", (0, lowest)), ("tanh", (1,))), (2,))
    x, y = torch.randn(100), torch.empty(100)
    run((x,), (y,))
    expected = torch.maximum(x, torch.tensor(lowest)).tanh()
    torch.testing.assert_close(y, expected, equal_nan=True)


DAMAGE = list(itertools.product(["*.py", "*.nbi", "*.nbc"], [b"", b"\xff\xfe garbage \x80"]))


@pytest.mark.parametrize(
    "damage", spread(DAMAGE, lambda case: f"{case[0]} {'garbage' if case[1] else 'empty'}", every=3)
)
def test_a_corrupt_cache_is_not_taken(tmp_path: Path, damage: tuple[str, bytes]) -> None:
    pattern, content = damage
    script = textwrap.dedent("""
        import torch
        from undertow.kernels.elementwise import compile_chain
        x = torch.linspace(-1, 1, 5000)
        y = torch.empty(5000)
        compile_chain(("full",), (("mul", (0, 3.0)), ("tanh", (1,))), (2,))((x,), (y,))
        print(float((y - (3 * x).tanh()).abs().max()) < 1e-5)
    """)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):
        found = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
        )
        assert found.stdout.strip() == "True", found.stderr
        files = list((tmp_path / "undertow" / "kernels").rglob(pattern))
        assert files
        for file in files:
            file.write_bytes(content)
