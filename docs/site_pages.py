"""A hook of mkdocs: pages and files outside of `docs` become part of the site, and links lead to them there.

In the repository, README.md and CONTRIBUTING.md are beside `docs`, and pages link to examples and measured pictures. In
the site everything is under one root: README.md is its first page, and what pages link to is copied.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
COPIED = ("examples/*.py", "benchmarks/results/*.svg", "LICENSE")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
BLOCK = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
FIRST_LINE = re.compile(r"^```(\w+)[^\n]*")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files that are outside of `docs`."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    for pattern in COPIED:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the site; of a block's first line, only the language."""
    source = {target: name for name, target in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def to_site(match: re.Match[str]) -> str:
        in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        return PAGES.get(in_repository, in_repository.removeprefix("docs/"))

    parts = BLOCK.split(markdown)  # text and blocks take turns
    parts[::2] = [LINK.sub(to_site, text) for text in parts[::2]]
    parts[1::2] = [FIRST_LINE.sub(r"```\1", block) for block in parts[1::2]]
    return "".join(parts)
