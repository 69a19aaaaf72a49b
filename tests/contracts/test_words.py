"""Prose uses the field's words (docs/glossary.md): no banned word in pages, docstrings, comments, messages, charts and names."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THIS = "tests/contracts/test_words.py"
CODE = ("core", "worker", "router", "operator", "sim", "cli", "papers", "release", "dashboards", "charts")
TEXTS = (
    "docs",
    "charts",
    "crds",
    "examples",
    ".ci",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
    "Dockerfile",
)

BANNED = {
    r"mend(s|ed|ing)?": "fix, correct or repair",
    r"muster(s|ed|ing)?|doorkeepers?": "membership, authenticator",
    r"(gives?|gave|given|giving)[ -]up": "demote; or end, stop",
    r"(?<!to )(?<!cannot )(tells?|told|telling)\b(?! (\w+ ){0,3}(apart|from)\b)": "report, notify, show or say",
    r"told (from|apart from)|tells? (it|them) from": "distinguish",
    r"promis(e[sd]?|ing)": "guarantee; predicted, required or offered",
    r"(draws?|drawn|drew) (a |the |its |one |next )?tokens?|tokens? (is |are |was |were )?(drawn|drew)": "sample",
    r"(draws?|drew|drawing) ((a|an|the|its|their|one|no|single|other|up|to|as|many) )*(guess(es)?|drafts?)|"
    r"(guess(es)?|drafts?) (that )?((is|are|be|may be) )?drawn": "propose",
    r"demot\w+ (evicted )?(KV|blocks?|pages?|extents?)|(KV|blocks?|extents?) (that )?(is|are|be) demoted": "offload",
    r"publish\w* (to|into|in) the (prefix )?cache|unpublished blocks?": "insert",
    r"(meets?|meeting|met) (again|anew|each other)|(ranks|pods) (meet|met)": "rendezvous",
    r"(quer(y|ies)|rows?|chunks?|latents?) meets?|meets? (the pool|latents?)": "attend to, are multiplied with",
    r"may (not )?say (it|so)": "send, report",
    r"(recorded|event) logs?": "record",
    r"(a|the|each|next|every|one|this|last|of|which) looks?(?! (at|like|for|up)\b)": "reconcile, poll, snapshot",
    r"look(s|ed|ing)? (again|at|into)": "poll, try, check, examine or search",
    r"anew|it is said|no more(?=[.,;:)]|$)|whereupon": "again, new; log; no longer",
    r"nothing of (the|it|what)|looked after|looks? after": "no part of; manage",
}
"""Patterns of words in the senses that the glossary replaces, with the words to use."""
IN_TESTS = frozenset(list(BANNED)[:3])
"""Patterns that also hold for tests and benchmarks, whose prose is otherwise free."""
BANNED_IN_NAMES = {
    "mend": "fix",
    "muster": "membership",
    "doorkeeper": "authenticator",
    "told": "message, reported",
    "promise": "guarantee, predicted",
    "promises": "guarantees",
    "promised": "guaranteed, predicted",
    "draws": "proposes, proposals, samples",
    "publishes": "inserts",
    "demotion": "offload",
}
"""Words of the names in code, with the words to use."""

OPENING = re.compile(r" *#+ *(-- )?(Of|Who|Whom|Whose|Whether|What)\b[^?]*$")
HELP = re.compile(r'\b(help|description|says)=f?"(Of|Who|Whom|Whose|Whether|What|How)\b[^?"]*"')
"""First line of a comment, and a help text or description, without a subject and a verb."""


def tracked(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of the files in these folders that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in listed.split("\0"):
        if name and name != THIS and (ROOT / name).is_file():
            yield name, (ROOT / name).read_text(encoding="utf-8", errors="replace")


def without_code(text: str) -> str:
    """Return `text` with identifiers in backticks and blocks of code replaced, so that lines keep their numbers."""
    return re.sub(
        r"```.*?```|`[^`\n]*`", lambda found: re.sub(r"[^\n]", "x", found[0]), text, flags=re.DOTALL
    )


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment and every string of a Python file, docstrings and messages included."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def banned_in(text: str, patterns: frozenset[str] = frozenset(BANNED)) -> list[tuple[int, str]]:
    """Return line and advice for each banned word of a text."""
    text = without_code(text)
    return [
        (text.count("\n", 0, match.start()), f"{match[0]!r}: {BANNED[pattern]}")
        for pattern in patterns
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
    ]


def found_in(name: str, text: str, patterns: frozenset[str] = frozenset(BANNED)) -> list[str]:
    """Return place and advice for each banned word in the prose of a file.

    Identifiers are no prose, and neither is what stands in backticks.
    """
    if not name.endswith(".py"):
        return [f"{name}:{line + 1}: {advice}" for line, advice in banned_in(text, patterns)]
    if not banned_in(text.replace("`", " "), patterns):  # nearly always: then there is no need to parse it
        return []
    return [
        f"{name}:{first + line}: {advice}"
        for first, prose in prose_of(text)
        for line, advice in banned_in(prose, patterns)
    ]


def test_prose_has_no_banned_word() -> None:
    found = [hit for name, text in tracked(*CODE, *TEXTS) for hit in found_in(name, text)]
    assert found == [], "\n".join(found)


def names_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every variable, argument, attribute, function and class of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def banned_names(name: str, text: str) -> list[str]:
    """Return place and advice for each name of a Python file that has a banned word."""
    if not any(word in text.lower() for word in BANNED_IN_NAMES):
        return []
    return [
        f"{name}:{line}: {found}: {BANNED_IN_NAMES[word]}"
        for line, found in names_of(text)
        for word in re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found).lower().split("_")
        if word in BANNED_IN_NAMES
    ]


def test_names_have_no_banned_word() -> None:
    found = [hit for name, text in tracked(*CODE) if name.endswith(".py") for hit in banned_names(name, text)]
    assert found == [], "\n".join(found)


def test_prose_of_tests_and_benchmarks_has_no_word_of_ours() -> None:
    found = [
        hit
        for name, text in tracked("tests", "benchmarks")
        if name.endswith(".py")
        for hit in found_in(name, text, IN_TESTS)
    ]
    assert found == [], "\n".join(found)


def headless(text: str) -> list[str]:
    """Return the comments, help texts and descriptions of a file that open without a subject and a verb."""
    lines = ["", *text.splitlines()]
    return [match[0] for match in HELP.finditer(text)] + [
        line.strip()
        for before, line in pairwise(lines)
        if OPENING.match(line) and not before.lstrip().startswith("#")
    ]


def test_comments_and_help_texts_have_a_subject() -> None:
    found = [
        f"{name}: {line}"
        for name, text in tracked(*CODE, "examples")
        if name.endswith((".py", ".yaml"))
        for line in headless(text)
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", "It mends itself."),
        ("page.md", "The router is told of it."),
        ("values.yaml", "# -- Names anew"),
        ("code.py", 'raise ValueError("mend it")'),
        ("code.py", "x = 1  # until it gives up"),
        ("code.py", 'def f():\n    """One token is drawn."""'),
        ("code.py", 'help="as its load promised"'),
        ("page.md", "A head draws as many guesses again, until none of the guesses is drawn."),
        ("page.md", "Blocks that are demoted go to host memory."),
        ("page.md", "The router looks again, and then looks into the queue."),
        ("page.md", "It cannot be told from others."),
        ("page.md", "Replay a recorded log."),
    ],
)
def test_a_banned_word_is_noticed(name: str, text: str) -> None:
    assert found_in(name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", "Settings call it `give up`, and nobody can tell one from the other."),
        ("page.md", "The GPU draws 300 W, a random number is drawn, and a request is demoted."),
        ("code.py", "mend = 1\nassert drawn.token"),
    ],
)
def test_identifiers_and_other_senses_are_not_noticed(name: str, text: str) -> None:
    assert not found_in(name, text)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("mend = 1", "amend = 1"),
        ("class BestDraws: ...", "withdrawn = 1"),
        ("def f(promised_in_seconds): ...", "x = 'told'  # mend"),
    ],
)
def test_a_banned_word_in_a_name_is_noticed(text: str, plain: str) -> None:
    assert banned_names("code.py", text)
    assert not banned_names("code.py", plain)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("    # Whether it runs.", "    # True if it runs."),
        ("  # -- What is scraped.\n", "  # -- What is scraped?\n"),
        ('option(help="Of the weights: float32.")', 'option(help="Type of the weights: float32.")'),
    ],
)
def test_a_text_without_a_subject_is_noticed(text: str, plain: str) -> None:
    assert headless(text)
    assert not headless(plain)
