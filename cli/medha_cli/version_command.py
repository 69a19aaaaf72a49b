"""`medha version`."""

from __future__ import annotations

from importlib.metadata import version

import click


@click.command("version")
def command() -> None:
    """Print the version.

    \b
    Example:
      medha version
    """
    click.echo(f"medha {version('medha')}")
