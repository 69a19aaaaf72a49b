"""A digest of the code that a simulation runs, so that results are kept exactly as long as they are valid.

It covers the modules that a fresh process has loaded after short simulations. Only their code counts, not
comments, docstrings or layout.
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ASK = """
import sys
from medha_papers.campaign_run import Run, simulate
for system in ("medha-guarded", "loongserve"):
    simulate(Run(system, 0.0, 0, 3.0, rate=1.0))
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] in ("medha", "medha_sim", "medha_papers"):
        print(module.__file__)
"""


def loaded_files() -> list[Path]:
    """Return the files of Medha's modules that a simulation loads, in the order of the modules' names."""
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True)
    return [Path(line) for line in asked.stdout.split()]


def digest(files: Sequence[Path]) -> str:
    """Return a digest of the code of `files`; it ignores comments, docstrings and layout."""
    found = hashlib.sha256()
    for file in files:
        tree = ast.parse(file.read_bytes())
        found.update(f"{file.parent.name}/{file.name}\n".encode())
        found.update(ast.dump(_without_docstrings(tree)).encode())
    return found.hexdigest()[:12]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not _is_text(line)]
    return tree


def _is_text(line: ast.stmt) -> bool:
    """Return whether a statement is the docstring of a module, a class, a function or a constant."""
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )
