"""docs/ becomes a site: every page in the order of its index, every link leading somewhere, nothing of other hosts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from browser import Browser, browser, needs_browser

ROOT = Path(__file__).parents[2]
WIDE = ["docs/README.html", "docs/http-fields.html", "docs/observing.html", "docs/performance.html"]
"""The start page, and pages with wide tables, pictures and long lines of code."""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_builder", ROOT / "docs" / "site" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


builder = load()
pytestmark = pytest.mark.timeout(300)  # the whole site is built once


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site. Sphinx fails at a link or a heading that is missing."""
    out = tmp_path_factory.mktemp("site")
    assert builder.build(ROOT, out) == 0
    return out


class Page(HTMLParser):
    """The addresses that a page loads from, those that it links to, and the captions and links of its navigation."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag in ("script", "img", "iframe") and found.get("src"):
            self.loads.append(str(found["src"]))
        if tag == "link" and found.get("rel") != "canonical" and found.get("href"):
            self.loads.append(str(found["href"]))
        if tag == "a" and "reference internal" in str(found.get("class")):
            self.leads.append(str(found.get("href")))


def pages(site: Path) -> Iterator[tuple[Path, Page]]:
    for path in sorted(site.rglob("*.html")):
        yield path, Page(path.read_text(encoding="utf-8"))


def test_every_page_of_the_documentation_is_there(site: Path) -> None:
    written = {path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {path for path in written if not (site / path).is_file()} == set()
    assert all((site / f"{name}.html").is_file() for name in ("README", "CONTRIBUTING", "CHANGELOG"))


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    found = [(path.name, each) for path, page in pages(site) for each in page.loads if "//" in each]
    assert found == []
    for style in (site / "_static").rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8"))


def test_what_pages_link_to_is_there(site: Path) -> None:
    broken = [
        f"{path.relative_to(site)}: {target}"
        for path, page in pages(site)
        for target in page.leads
        if (name := target.partition("#")[0]) and not (path.parent / name).exists()
    ]
    assert broken == []


def test_the_navigation_is_in_the_order_of_the_index(site: Path) -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    wanted = [page for _, chapter in builder.chapters(index) for page in chapter if page.endswith(".md")]
    text = (site / "docs" / "glossary.html").read_text(encoding="utf-8")
    tree = text.partition('<div class="sidebar-tree">')[2].partition("</aside>")[0]
    shown = [
        (Path("docs") / target).as_posix().replace("docs/../", "").replace(".html", ".md")
        for target in Page(tree).leads
    ]
    assert [page for page in shown if page in wanted] == wanted
    assert all(heading in tree for heading, _ in builder.chapters(index))


def small(folder: Path, text: str) -> Path:
    """A checkout whose documentation has one more page."""
    (folder / "docs").mkdir()
    (folder / "docs" / "README.md").write_text("# Start\n\n## Read\n\n1. [more.md](more.md)\n")
    (folder / "docs" / "more.md").write_text(f"# More\n\n{text}\n\n## Sub heading\n\n[again](#sub-heading)\n")
    return folder


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = small(tmp_path, "[a](missing.md), [b](README.md#nothing), [c](missing.json)")
    assert builder.build(root, tmp_path / "out") != 0
    said = capfd.readouterr().err
    assert all(name in said for name in ("missing.md", "nothing", "missing.json"))


def test_links_to_folders_and_files_lead_there(tmp_path: Path) -> None:
    root = small(
        tmp_path, "[files](../data), [file](../data/one.json), [up](README.md)\n\n```text\n[x](gone.md)\n```"
    )
    (root / "data").mkdir()
    (root / "data" / "one.json").write_text("{}")
    assert builder.build(root, tmp_path / "out") == 0
    text = (tmp_path / "out" / "docs" / "more.html").read_text()
    assert '"../data/index.html"' in text
    assert "one.json" in (tmp_path / "out" / "data" / "index.html").read_text()
    assert len(list((tmp_path / "out").rglob("_downloads/**/one.json"))) == 1
    assert ">More<" in (tmp_path / "out" / "docs" / "README.html").read_text()  # and not more.md


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@needs_browser
def test_the_site_is_searched_without_a_server(site: Path, page: Browser) -> None:
    page.open(f"{(site / 'search.html').as_uri()}?q=drainSeconds")
    found = "[...document.querySelectorAll('#search-results li a')].map(link => link.textContent)"
    page.until(f"{found}.length > 0")
    assert "Install" in page.evaluate(found)
    assert page.problems == []


@needs_browser
@pytest.mark.parametrize("width", [400, 1600])
def test_no_page_is_wider_than_the_window(site: Path, page: Browser, width: int) -> None:
    page.show(width, 1000)
    for name in WIDE:
        page.open((site / name).as_uri())
        page.until("!!document.querySelector('article')")
        root = "document.documentElement"
        assert page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"), name
    assert page.problems == []
