"""Each relative link of the documentation leads to a file, and its anchor to a heading of that file."""

import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from docs import pages

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SITE = ROOT / "mkdocs.yml"


def anchors(text):
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", prose, flags=re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def dead(page, text):
    """The relative links of a page that lead nowhere."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page):
    assert dead(page, page.read_text()) == []


def test_the_site_has_every_page_once():
    def leaves(node):
        values = node.values() if isinstance(node, dict) else node
        return [node] if isinstance(node, str) else [leaf for value in values for leaf in leaves(value)]

    named = leaves(yaml.safe_load(SITE.read_text().partition("\nnav:")[2]))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent != ROOT}
    assert sorted(named) == sorted({*pages, "index.md", "config.md"})


def test_each_page_is_three_clicks_from_the_first():
    reached, fresh = {ROOT / "README.md"}, {ROOT / "README.md"}
    for _ in range(3):
        links = [(page, link) for page in fresh for link in re.findall(r"\]\(([^)\s#:]+\.md)", page.read_text())]
        fresh = {(page.parent / link).resolve() for page, link in links} - reached
        reached |= fresh
    assert {*PAGES} - reached <= {ROOT / "CHANGELOG.md"}


def test_links_out_of_the_site_become_links_into_the_repository():
    text = "See [the loop](../rl/train.py#L3), [metrics](metrics.md), and [a](https://x)."
    link = "[the loop](https://example.org/r/blob/main/rl/train.py#L3)"
    expected = f"See {link}, [metrics](metrics.md), and [a](https://x)."
    assert pages.for_site(text, "operations.md", "https://example.org/r") == expected
    deep = pages.for_site("[x](../../README.md) [y](../log.md)", "decisions/trust.md", "https://example.org/r")
    assert deep == "[x](https://example.org/r/blob/main/README.md) [y](../log.md)"
    assert (
        pages.for_site(text, "operations.md", "")
        == "See the loop (`rl/train.py`), [metrics](metrics.md), and [a](https://x)."
    )
    index = pages.site_pages()["index.md"]
    assert "](docs/" not in index and "](operations.md)" in index


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "topology.metrics" in re.sub("<[^>]*>", "", (tmp_path / "config" / "index.html").read_text())
    assert "unrecognized relative link" not in result.stderr, result.stderr
    assert "http://fonts" not in (tmp_path / "index.html").read_text()
