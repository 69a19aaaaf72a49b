"""Shared helpers for options: finite numbers, and whether an option was really given."""

from __future__ import annotations

from math import isfinite
from typing import Any

import click
from click.core import ParameterSource

from medha.errors import ConfigInvalid


class Number(click.FloatRange):
    """A finite number in a range. Every comparison with NaN is false, so click's own range accepts it."""

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
