"""Every Python block and every command of the README and the docs runs, and prints what the page says.

The blocks of a page run in order, in one namespace, in an empty folder beside the repository's `benchmarks`. A `sh`
block holds calls of `undertow`, one per line, which succeed. The `text` block that directly follows a block is its
output. `text no-compare` marks output that differs from run to run, such as times. A block marked `python in FILE` does
not run but is quoted from that file. What a page writes under `docs` must equal the file in the repository. Lines are
numbered as in the page, so that a reader finds line 12 of the page where `page.md:12` is printed.

`python tests/cpu/test_docs.py` writes the outputs, and the files that pages make, again.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from undertow.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@dataclass
class Block:
    """A block, the line at which its code starts, and where in the page its output is, if there is one."""

    kind: str
    code: str
    line: int
    output: re.Match[str] | None

    @property
    def is_compared(self) -> bool:
        return self.output is None or self.output["kind"] == "text"


def blocks_of(page: str) -> list[Block]:
    fences = list(FENCE.finditer(page))
    found = []
    for fence, following in itertools.pairwise([*fences, None]):
        if fence["kind"] not in ("python", "sh"):
            continue
        is_output = (
            following is not None
            and following["kind"].split()[:1] == ["text"]
            and not page[fence.end() : following.start()].strip()
        )
        line = page.count("\n", 0, fence.start("body")) + 1
        found.append(Block(fence["kind"], fence["body"], line, following if is_output else None))
    return found


def run(blocks: list[Block], page: Path) -> Iterator[str]:
    """What each block prints."""
    namespace = {"__name__": "__main__"}
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if block.kind == "sh":
                for line in block.code.splitlines():
                    command, *words = shlex.split(line)
                    assert command == "undertow" and main(words) == 0, line
            else:
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)
        yield "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


@contextlib.contextmanager
def folder_of_a_reader() -> Iterator[Path]:
    """A folder to run in, with only the files that pages read."""
    with tempfile.TemporaryDirectory() as name, torch.random.fork_rng(devices=[]), contextlib.chdir(name):
        folder = Path(name)
        (folder / "docs" / "pictures").mkdir(parents=True)
        os.symlink(ROOT / "benchmarks", folder / "benchmarks")
        yield folder


def written_files(folder: Path) -> dict[Path, bytes]:
    """The files that a page wrote, by path in the repository."""
    files = [path for path in (folder / "docs").rglob("*") if path.is_file()]
    return {ROOT / path.relative_to(folder): path.read_bytes() for path in files}


def links_of(page: Path) -> list[str]:
    return LINK.findall(FENCE.sub("", page.read_text()))


def test_there_are_pages():
    assert len(PAGES) >= 5
    # The commands of a parameter server start a cluster: tests/cluster has them.
    without_code = {"design.md", "glossary.md", "small-file-format.md", "parameter-server.md"}
    assert all(blocks_of(page.read_text()) for page in PAGES if page.name not in without_code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_prints_what_it_says(page):
    blocks = blocks_of(page.read_text())
    with folder_of_a_reader() as folder:
        for block, printed in zip(blocks, run(blocks, page), strict=True):
            if block.is_compared:
                said = block.output["body"].rstrip("\n") if block.output else ""
                lines = difflib.unified_diff(
                    said.splitlines(), printed.splitlines(), "the page", "the code", lineterm=""
                )
                assert said == printed, "\n".join([f"{page.name}:{block.line}", *lines])
        for path, content in written_files(folder).items():
            assert path.is_file() and path.read_bytes() == content, (
                f"{path.relative_to(ROOT)} is not what {page.name} makes"
            )
        shown = {ROOT / "docs" / name for name in links_of(page) if name.startswith("pictures/")}
        assert shown <= written_files(folder).keys(), "a picture that the page's code does not make"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_quotations_are_exact(page):
    for fence in FENCE.finditer(page.read_text()):
        if fence["kind"].startswith("python in "):
            source = (ROOT / fence["kind"].removeprefix("python in ")).read_text()
            assert fence["body"] in source, f"{page.name} quotes what is not there:\n{fence['body']}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    missing = [link for link in links_of(page) if not (page.parent / link).exists()]
    assert not missing


def rewrite(page: Path) -> None:
    """Write what the code now prints into the page, and the files that it makes beside it."""
    text = page.read_text()
    blocks = blocks_of(text)
    with folder_of_a_reader() as folder:
        pairs = list(zip(blocks, run(blocks, page), strict=True))
        for path, content in written_files(folder).items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    # From the end, so that earlier blocks do not move; line numbers in outputs are right after a second run.
    for block, printed in reversed(pairs):
        if block.output is not None and block.is_compared:
            text = text[: block.output.start("body")] + printed + "\n" + text[block.output.end("body") :]
    page.write_text(text)


if __name__ == "__main__":
    for path in PAGES * 2:
        rewrite(path)
