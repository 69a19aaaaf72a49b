"""Result files of long runs: checked before the run begins, written whole or not at all, and not lost if that fails."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click

from medha.errors import ConfigInvalid, MedhaError


class ResultsUnwritten(MedhaError):
    """Results could not be written to their place. Fixed by making room there; the text says where they are."""


def figures_beside(page: Path) -> Path:
    """Return the path of the JSON beside an HTML page."""
    return page.with_suffix(".json")


def require_writable(option: str, *files: Path, inputs: Sequence[Path] = ()) -> None:
    """Check, before the work begins, that its results can be written.

    Permissions alone do not show that (root, read-only file systems). So a file is created beside each, and removed
    again.

    Raises:
        ConfigInvalid: a file cannot be written, or is one of `inputs`; names the option, the file and the fix.
    """
    for file in files:
        try:
            target = file.resolve()
            if not target.parent.is_dir():
                wrong = "is a file" if target.parent.exists() else "does not exist"
                raise ConfigInvalid(f"{option} is {file}, whose folder {wrong}; make it or choose another")
            if target.exists() and not target.is_file():
                raise ConfigInvalid(f"{option}: {file} exists and is not a plain file; choose another")
            if target in [given.resolve() for given in inputs]:
                raise ConfigInvalid(f"{option}: {file} is read by this command; choose another, to keep it")
            partial = _partial(target)
            partial.touch()
            partial.unlink()
        except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
            raise ConfigInvalid(
                f"{option}: {file} cannot be written ({_reason(error)}); name a file in a folder that can be written"
            ) from error


def write_results(option: str, page_file: Path, figures: str, page: Callable[[], str]) -> None:
    """Write the figures, a JSON text, and then the page that is made of them.

    Raises:
        ResultsUnwritten: a file cannot be written. If it is the figures, they were saved elsewhere (`write_figures`).
    """
    beside = figures_beside(page_file)
    write_figures(option, beside, figures)
    write_page(option, page_file, page(), f"the figures are in {beside}")


def write_figures(option: str, file: Path, figures: str) -> None:
    """Write the figures of a long run, a JSON text.

    Raises:
        ResultsUnwritten: the file cannot be written. The figures were saved in the folder of temporary files or, if that fails
            too, printed.
    """
    try:
        _write_whole(file, figures)
    except OSError as error:
        kept = _keep_elsewhere(figures)
        raise ResultsUnwritten(f"{_unwritten(option, file, error)}; the figures are {kept}") from error


def write_page(option: str, page_file: Path, page: str, kept: str) -> None:
    """Write a page; `kept` says where else its content can be found.

    Raises:
        ResultsUnwritten: it cannot be written.
    """
    try:
        _write_whole(page_file, page)
    except OSError as error:
        raise ResultsUnwritten(f"{_unwritten(option, page_file, error)}; {kept}") from error


@contextmanager
def results_file(option: str, file: Path) -> Iterator[BinaryIO]:
    """Provide a file to write to during a run; it replaces `file` at the end, unless an error ends the run.

    Raises:
        ResultsUnwritten: it cannot be written.
    """
    try:
        with _whole(file) as results:
            yield results
    except OSError as error:
        raise ResultsUnwritten(f"{_unwritten(option, file, error)}; nothing was kept") from error


def _write_whole(file: Path, text: str) -> None:
    with _whole(file) as whole:
        whole.write(text.encode())


@contextmanager
def _whole(file: Path) -> Iterator[BinaryIO]:
    """Provide a file that replaces `file` once it is written whole."""
    target = file.resolve()
    partial = _partial(target)
    try:
        with partial.open("wb") as whole:
            yield whole
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _keep_elsewhere(figures: str) -> str:
    """Save or print the figures, and return where they are."""
    name = ""
    try:
        descriptor, name = tempfile.mkstemp(prefix="medha-", suffix=".json")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(figures)
    except OSError:
        if name:
            Path(name).unlink()
        click.echo(figures)
        return "on standard output"
    return f"in {name}"


def _partial(target: Path) -> Path:
    return target.with_name(f"{target.name}.{os.getpid()}.partial")


def _unwritten(option: str, file: Path, error: OSError) -> str:
    return f"{option}: {file} cannot be written ({_reason(error)}); make room, or choose another place"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
