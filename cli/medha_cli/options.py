"""Shared options and helpers for them: finite numbers, and whether an option was really given."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from medha.errors import ConfigInvalid

_Command = TypeVar("_Command", bound=Callable[..., Any])

FILE = click.Path(path_type=Path, dir_okay=False)
"""The type of an option that names a file, which need not exist."""
FOLDER = click.Path(path_type=Path, file_okay=False)
"""The type of an option that names a folder, which need not exist."""


def page_option(default: str, meaning: str) -> Callable[[_Command], _Command]:
    """Return the option `--out`: the file of a command's HTML page, `default` if it is not given."""
    return click.option("--out", "-o", type=FILE, default=Path(default), show_default=True, help=meaning)


def run_options(purpose: str) -> Callable[[_Command], _Command]:
    """Return the options `--run-dir` and `--url`, which name a running replica to `purpose` (a verb)."""

    def decorate(command: _Command) -> _Command:
        url = click.option(
            "--url", help="Address of a controller on another machine, as that of its metrics."
        )
        run_directory = click.option(
            "--run-dir",
            type=FOLDER,
            help=f"Run directory of the `medha up` to {purpose}.",
        )
        return run_directory(url(command))

    return decorate


class Number(click.FloatRange):
    """A finite number in a range. Click's own range accepts NaN, because every comparison with NaN is false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        assert isinstance(number, float | int)
        if not isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


def given(context: click.Context, name: str) -> bool:
    """Return whether the user gave this parameter; False if it has its default."""
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def refuse_unused(context: click.Context, unused: dict[str, str]) -> None:
    """Refuse options that change nothing: they were given by mistake, and the result would not show that.

    `unused`: name of a parameter -> why it changes nothing, and what to do instead.

    Raises:
        ConfigInvalid: one of them is given; names the option and its value.
    """
    for param in context.command.params:
        if param.name in unused and given(context, param.name):
            value = context.params[param.name]
            said = param.opts[0] if value is True else f"{param.opts[0]} {value}"
            raise ConfigInvalid(f"{said} changes nothing here: {unused[param.name]}")
