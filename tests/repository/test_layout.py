"""The rules of the repository that no linter checks."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "undertow"
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = [*sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file()), ROOT / ".ci" / "run"]
MAX_LINES = 600
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "managers", "v2"}
NOT_OURS = {".git", ".venv", ".hypothesis", "build", "dist", "__pycache__"}
# Spelled in two halves, or this file would break its own rule.
MACHINE_PATH = re.compile(r"(?<![\w.~$}])/" + r"(work|tmp|root|home)/")
# Words that lengthen a sentence, that a reader has to look up, or that put work off, and what to write instead. Names
# are read too. A letter of each is in brackets, or this file would break its own rule.
REFUSED_WORDS = {
    "utili[sz]e": "use",
    "[l]everage": "use",
    "[i]n order to": "to",
    "[t]hereof": "its, of it",
    "[w]herein": "where, in which",
    "[h]ereby": "leave it out",
    "[a]forementioned": "this, these",
    "[a]new": "again",
    "[b]ehind it": "after it",
    "[b]ehind them": "after them",
    "[d]ear": "slow, large",
    "[b]ear": "carry, make, hold",
    "[l]et go": "free, drop",
    "[l]etting go": "freeing, dropping",
    "[s]imply": "leave it out",
    "[o]bviously": "leave it out",
    "[b]asically": "leave it out",
    "[p]lease": "leave it out",
    "[d]esign section": "the reason itself",
    "[w]orkaround": "what is wrong, and where",
    "[m]agic number": "what the number means",
    "[t]odo": "do it",
    "[f]ixme": "fix it",
    "[x]xx": "say what is open",
    "[h]ack": "say why it is so",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_made_by_tools(folder: str) -> bool:
    return folder in NOT_OURS or folder.startswith(".venv-torch-") or folder.endswith(("_cache", ".egg-info"))


def walk(root: Path) -> list[Path]:
    """Every file of the tree except what tools wrote there, for a copy without git."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not is_made_by_tools(name)]
        paths += [Path(folder, name) for name in files]
    return paths


def text_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        paths = [ROOT / name for name in listing.split("\0") if name]
    except (FileNotFoundError, subprocess.CalledProcessError):
        paths = walk(ROOT)
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()]


def test_there_is_something_to_check():
    assert len(MODULES) > 10
    assert {path.name for path in SCRIPTS} >= {"setup", "demo", "test", "check", "run"}
    assert ROOT / "pyproject.toml" in text_files()
    assert ROOT / "pyproject.toml" in walk(ROOT)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_is_one_idea_and_says_which(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES, "a file this long is two ideas"
    words = {word for part in path.relative_to(PACKAGE).with_suffix("").parts for word in part.split("_")}
    assert not words & VAGUE_NAMES, "the name does not say what is inside"
    assert ast.get_docstring(ast.parse(text)), "a module opens with what goes in, what comes out, and the idea"


@pytest.mark.parametrize("path", sorted((PACKAGE / "models").glob("*.py")), ids=name_of)
def test_models_import_torch_only(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            imported.add(node.module)
    others = {
        name
        for name in imported
        if name.split(".")[0] not in sys.stdlib_module_names | {"torch"} and not name.startswith("undertow.models.")
    }
    assert not others


def test_import_is_light():
    program = "import sys, undertow; print(*sorted({'rich', 'typer', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert result.stdout.split() == []


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_script_can_be_run(path):
    assert os.access(path, os.X_OK)
    interpreter, *rest = path.read_text().splitlines()
    assert interpreter.startswith("#!/usr/bin/env ")
    if interpreter.endswith("bash"):
        assert "set -euo pipefail" in rest
        subprocess.run(["bash", "-n", path], check=True)


def test_no_paths_of_one_machine():
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert not found


def pattern_of(refused: str) -> re.Pattern[str]:
    """Finds the words in prose, across the lines of a comment, and in names."""
    words = r"s?[\s#_]+".join(refused.split())
    return re.compile(rf"(?<![a-z]){words}(s|d|ed)?(?![a-z])", re.IGNORECASE)


def test_words_are_plain():
    patterns = {pattern_of(refused): instead for refused, instead in REFUSED_WORDS.items()}
    for pattern, refused in zip(patterns, REFUSED_WORDS, strict=True):
        assert pattern.search(re.sub(r"\[(.).*?\]", r"\1", refused)), "a pattern that finds nothing"
    found = [
        f"{name_of(path)}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}; instead: {instead}"
        for path in text_files()
        if path.name != "LICENSE"
        for text in [path.read_text(errors="replace")]
        for pattern, instead in patterns.items()
        for match in pattern.finditer(text)
    ]
    assert not found
