"""The generated pages of `docs/`: `python -m medha_cli.reference docs` (`make gen`)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from medha.observing.metric_catalogue import reference_page
from medha_cli.main import main
from medha_router.field_page import fields_page

_ROOT = Path(__file__).resolve().parents[2]  # the pages are written in a checkout, never in an installation
_FOLDERS = ("core", "router", "worker", "operator", "sim", "cli", "papers", "release")


def pages() -> dict[str, str]:
    """Return the content of each generated page, by file name in `docs/`."""
    return {
        "cli.md": cli_page(),
        "http-fields.md": fields_page(),
        "metrics.md": reference_page(),
        "modules.md": modules_page(),
    }


def cli_page() -> str:
    """Return the page with the help of `medha` and of every command below it."""
    parts = ["# The command line\n\nWritten by `make gen` from the program's own help.\n"]
    for path, command in _commands("medha", main):
        context = click.Context(command, info_name=path, terminal_width=100, max_content_width=100)
        context.help_option_names = ["-h", "--help"]
        text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
        parts.append(f"## {path}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def modules_page() -> str:
    """Return the page of every module of the repository with the first paragraph of its docstring."""
    parts = ["# The modules\n\nWritten by `make gen` from the modules' own docstrings.\n"]
    inits = (init for top in _FOLDERS for init in sorted((_ROOT / top).rglob("__init__.py")))
    for folder in (init.parent for init in inits):
        package = folder.relative_to(_ROOT).as_posix()
        rows = [f"- **{path.stem}** {_first_paragraph(path)}" for path in sorted(folder.glob("[!_]*.py"))]
        text = "\n".join([f"## {package}", "", _first_paragraph(folder / "__init__.py"), "", *rows])
        parts.append(text.rstrip() + "\n")
    return "\n".join(parts)


def _first_paragraph(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def _commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _commands(f"{path} {name}", below)


if __name__ == "__main__":
    for file_name, page in pages().items():
        target = Path(sys.argv[1]) / file_name
        target.write_text(page, encoding="utf-8")
        sys.stdout.write(f"wrote {target}\n")
