"""What is private to PyTorch goes through one file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "src" / "undertow" / "torch_internals.py"
MODULES = sorted(path for folder in ("src", "examples") for path in (ROOT / folder).rglob("*.py") if path != HOME)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_of(node: ast.AST) -> list[str]:
    """The dotted name that an attribute access spells, such as `torch._C._nn`; empty if it is something else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def private_uses(source: str) -> list[int]:
    """The lines that name something private to PyTorch. Operators (`torch.ops.aten._softmax`) are not private."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            dotted = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dotted = [[*(node.module or "").split("."), alias.name] for alias in node.names]
        else:
            dotted = [names_of(node)]
        for names in dotted:
            if names[:1] == ["torch"] and names[1:2] != ["ops"] and any(map(is_private, names)):
                found.append(node.lineno)
    return sorted(set(found))


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch._ops import OpOverload",
        "from torch.utils._pytree import tree_map",
        "from torch.optim.optimizer import _global_optimizer_pre_hooks",
        "x = torch._C._nn.gelu(y)",
        "def f():\n    return torch.nn.modules._functions",
    ],
)
def test_private_uses_are_seen(source):
    assert private_uses(source)


def test_operators_and_own_names_are_allowed():
    assert private_uses("torch.ops.aten._softmax(x, 0, False)\nself._torch = torch.__version__\n") == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_only_one_file_uses_what_is_private(path):
    lines = private_uses(path.read_text())
    assert not lines, f"lines {lines} use what is private to PyTorch: take it from undertow/torch_internals.py"
