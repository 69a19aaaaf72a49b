"""What commands share about their options: numbers that are numbers, and which options were really given."""

from __future__ import annotations

from math import isfinite
from typing import Any

import click
from click.core import ParameterSource

from medha.errors import ConfigInvalid


class Number(click.FloatRange):
    """A finite number in a range: every comparison with NaN is false, so click's own range lets it pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        assert isinstance(number, float | int)
        if not isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


def given(context: click.Context, name: str) -> bool:
    """Whether the user gave this parameter, and it is not its default."""
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def refuse_unused(context: click.Context, unused: dict[str, str]) -> None:
    """An option that would change nothing was given by mistake; nobody reads from the result that it was ignored.

    `unused`: name of a parameter -> why it changes nothing, and what to do instead.

    Raises:
        ConfigInvalid: one of them is given; names the option and its value.
    """
    for param in context.command.params:
        if param.name in unused and given(context, param.name):
            value = context.params[param.name]
            said = param.opts[0] if value is True else f"{param.opts[0]} {value}"
            raise ConfigInvalid(f"{said} changes nothing here: {unused[param.name]}")
