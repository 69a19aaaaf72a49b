"""The page of the HTTP API names every code of an error that the router gives, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "http-api.md"
PLACES = {"ApiError": 3, "cls": 3}
"""Calls that make an error, and the place of `code` among their arguments; in other calls it is named."""


def codes_of(source: str) -> Iterator[str]:
    """Yield the codes of errors that Python source gives in a call, where they are written out."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
        if isinstance(node.func, ast.Name) and node.func.id in PLACES:
            place = PLACES[node.func.id]
            given = given or node.args[place : place + 1]
        yield from strings(given)


def strings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    return (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_codes_are_found_wherever_they_are_given() -> None:
    source = (
        "ApiError(400, text, None, 'a'); cls(400, text, code='b'); Other(text, code='c'); other(0, 0, 0, 'd')"
    )
    assert sorted(codes_of(source)) == ["a", "b", "c"]


def test_the_page_lists_the_codes_that_the_router_gives_and_no_other() -> None:
    folders = ("router/medha_router", "core/medha/routing", "core/medha/wire")
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    section = PAGE.read_text().partition("## Errors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [\d, ]+ \| ([^|]+) \|", section, re.MULTILINE)
    named = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}
    assert {code for source in sources for code in codes_of(source)} - named == set()
    assert named - {one for source in sources for one in strings(ast.walk(ast.parse(source)))} == set()
