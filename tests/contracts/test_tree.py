"""What is checked in says nothing about one machine, and generated pages are what the program would write."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from medha_cli.reference import pages

ROOT = Path(__file__).parents[2]

# Written in pieces, so that this file does not contain what it looks for.
HOSTS = (
    "py" + "pi.org",
    "python" + "hosted",
    "registry.np" + "mjs",
    "proxy.go" + "lang",
    "deb.deb" + "ian.org",
)
MACHINE_PATHS = ("/wo" + "rk/", "/ro" + "ot/", "/fa" + "rm/", "/home/" + r"\w")
FORBIDDEN = re.compile("|".join([*map(re.escape, HOSTS), *(f"(?<![\\w.]){path}" for path in MACHINE_PATHS)]))


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_tracked_files_name_no_registry_and_no_path_of_one_machine() -> None:
    found = []
    for path in tracked():
        text = path.read_text(encoding="utf-8", errors="replace")
        for match in FORBIDDEN.finditer(text):
            number = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert found == []


@pytest.mark.parametrize("line", ["index-url = https://" + HOSTS[0], "cd " + MACHINE_PATHS[1] + "x"])
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert FORBIDDEN.search(line)


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    """Generated pages by file name, made once."""
    return pages()


def test_generated_pages_are_up_to_date(generated: dict[str, str]) -> None:
    assert len(generated) >= 4
    for name, text in generated.items():
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert written == text, f"docs/{name}: run `make gen` and commit the result"


NEWCOMERS_QUESTIONS = (
    "Where is the order of prefills decided?",
    "What happens when a rank dies?",
    "Where is a field of a manifest validated?",
    "How does a chunk attend to the KV of another lane?",
)


def answers() -> dict[str, list[tuple[str, str]]]:
    """Return the questions of docs/structure.md, with each file that an answer names and the symbol behind it, if any."""
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+\?) \| (.+) \|$", page.partition("## Where to look\n")[2], re.MULTILINE)
    return {question: re.findall(r"`([\w/]+\.py)`(?: \(`([\w.]+)`\))?", answer) for question, answer in rows}


def defines(source: str, symbol: str) -> bool:
    """Return whether a module defines a function, a class, or a method of a class."""
    body: list[ast.stmt] = ast.parse(source).body
    for name in symbol.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


@pytest.mark.parametrize("question", NEWCOMERS_QUESTIONS)
def test_a_newcomers_question_is_answered_by_files_and_a_symbol(question: str) -> None:
    named = answers()[question]
    assert named
    assert any(symbol for _, symbol in named)


def test_the_files_and_symbols_that_answer_questions_are_there() -> None:
    named = [one for found in answers().values() for one in found]
    assert [file for file, _ in named if not (ROOT / file).is_file()] == []
    assert [
        f"{file}: {symbol}"
        for file, symbol in named
        if symbol and not defines((ROOT / file).read_text(encoding="utf-8"), symbol)
    ] == []


def test_a_symbol_that_is_missing_is_noticed() -> None:
    source = "class Order:\n    def select(self): ...\ndef place(): ..."
    assert all(defines(source, symbol) for symbol in ("Order", "Order.select", "place"))
    assert not any(defines(source, symbol) for symbol in ("select", "Order.place", "Orders"))


def test_every_module_says_in_its_docstring_what_it_is(generated: dict[str, str]) -> None:
    lines = generated["modules.md"].splitlines()
    assert [line for line in lines if line.startswith("- ") and line.endswith("** ")] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, target: str) -> bool:
    """Return whether a link in `page` names an existing file, and an existing heading if it names one."""
    name, _, anchor = target.partition("#")
    file = page.parent / name if name else page
    return file.exists() and (not anchor or anchor in anchors(file))


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in tracked()
        if page.suffix == ".md"
        for target in re.findall(r"\]\(([^)\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in target and not leads_somewhere(page, target)
    ]
    assert broken == []


def test_the_index_of_the_documentation_names_every_page() -> None:
    named = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert {*named, "README.md"} == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_references_of_the_code_to_pages_name_existing_headings() -> None:
    found = [
        (path, target)
        for path in tracked()
        if path.suffix in (".py", ".yaml")
        for target in re.findall(r"\bdocs/[\w-]+\.md(?:#[\w-]+)?", path.read_text(encoding="utf-8"))
    ]
    assert any("#" in target for _, target in found)
    root = ROOT / "README.md"
    assert [
        f"{path.relative_to(ROOT)}: {target}" for path, target in found if not leads_somewhere(root, target)
    ] == []


def test_the_design_is_referred_to_by_its_headings() -> None:
    unclear = re.compile(r"\bDES" + r"IGN\b|docs/design\.md(?!#)")
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked()
        if path.suffix in (".py", ".yaml")
        for match in unclear.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_a_link_to_a_heading_that_is_missing_is_noticed() -> None:
    page = ROOT / "docs" / "design.md"
    assert leads_somewhere(page, "#order")
    assert leads_somewhere(page, "structure.md#processes")
    assert not leads_somewhere(page, "#orders")
    assert not leads_somewhere(page, "structures.md")


def test_every_pinned_version_is_exact() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.!]+", pin)] == []
