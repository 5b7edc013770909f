"""The pages as a site: it is built without a warning, and its links lead somewhere, as they do in the repository."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r'(?:href|src)="([^"#]+)')


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_site(site):
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.stem / "index.html").is_file()
    assert (site / "CONTRIBUTING" / "index.html").is_file()
    first = (site / "index.html").read_text()
    assert "What happens to a model" in first and "examples/plain_loop.py" in first


def test_links_of_the_site_lead_somewhere(site):
    missing = []
    for page in site.rglob("*.html"):
        for link in LINK.findall(page.read_text()):
            if urlparse(link).scheme or page.name == "404.html":
                continue
            target = (page.parent / unquote(urlparse(link).path)).resolve()
            if not (target.is_file() or (target / "index.html").is_file()):
                missing.append(f"{page.relative_to(site)}: {link}")
    assert not missing


def test_blocks_of_code_are_blocks(site):
    for page in site.rglob("index.html"):
        assert "```" not in page.read_text(), page
