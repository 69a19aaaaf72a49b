"""A docstring says what a thing does or is: none opens without a subject and a verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "core",
    "worker",
    "router",
    "operator",
    "sim",
    "cli",
    "papers",
    "release",
    "dashboards",
    "charts",
)
HEADLESS = re.compile(
    r"(Of|What|Whether|How|Who|Whose|Whom|Which|Where|When|By|As|That|In which|One|So|Those|From|For|With|Up to|On|To)\b"
)


def definitions(node: ast.AST) -> Iterator[ast.AST]:
    """A module and all statements in it. Expressions hold no docstrings, and they are most of a tree."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from definitions(child)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring of a file, those below attributes and constants included."""
    for node in definitions(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for line in node.body:
                if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
                    text = line.value.value
                    if isinstance(text, str):
                        yield line.lineno, text.strip()


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_opens_without_a_subject(folder: str) -> None:
    found = [
        (f"{path.relative_to(ROOT)}:{number}", text)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, text in docstrings(path)
    ]
    assert found
    headless = [f"{place}: {text.splitlines()[0]}" for place, text in found if HEADLESS.match(text)]
    assert headless == [], "\n".join(headless)


@pytest.mark.parametrize("text", ["Of the Secret.", "Whether it is ready.", "Who may connect."])
def test_a_docstring_without_a_subject_is_noticed(text: str) -> None:
    assert HEADLESS.match(text)
    assert not HEADLESS.match("Return whether it is ready.")
