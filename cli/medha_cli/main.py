"""The `medha` command. Each subcommand is imported when it is called, so that `medha --help` is instant.

Exit status: 0 on success, 1 when something failed, 2 when a manifest, a flag, a setting or a checkpoint is
wrong, or no grid of `medha plan` meets the targets. It is 130 if Ctrl-C ends `medha simulate` or `medha profile`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click
from rich.console import Console

from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError, ModelUnsupported

_COMMANDS = {
    "keys": ("medha_cli.keys_command", "Make, list and remove the API keys of a router's clients."),
    "model": ("medha_cli.model_command", "Make checkpoints, and measure scales for keys and values in FP8."),
    "plan": ("medha_cli.plan_command", "Find the grids of GPUs that meet latency targets, and their cost."),
    "profile": ("medha_cli.profile_command", "Measure the time of steps on this machine, for the predictor."),
    "render": ("medha_cli.render_command", "Print the Kubernetes objects that a manifest becomes."),
    "replay": (
        "medha_cli.replay_command",
        "Replay a record, and simulate its requests under other policies.",
    ),
    "simulate": ("medha_cli.simulate_command", "Compare policies under a virtual clock, on one HTML page."),
    "top": (
        "medha_cli.top_command",
        "Watch a running replica: lanes, steps, KV, and every request's progress.",
    ),
    "trace": (
        "medha_cli.trace_command",
        "Record what every rank of a running replica does, for ui.perfetto.dev.",
    ),
    "up": ("medha_cli.up_command", "Serve a MedhaReplica on this machine until Ctrl-C."),
    "version": ("medha_cli.version_command", "Print the version."),
}
"""Each command's module, which defines `command`, and the line that `medha --help` shows without importing it."""


_WRONG_INPUT = (ConfigInvalid, CheckpointInvalid, ModelUnsupported)
"""Errors that the user of the command can fix: exit status 2, as for a wrong flag."""


class LazyGroup(click.Group):
    """A group whose commands are modules, and that shows our errors as messages, not as tracebacks."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (the same)
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MedhaError as error:
            console = Console(stderr=True, highlight=False, soft_wrap=True)
            console.print("[bold red]error:[/] ", end="")
            console.print(str(error), markup=False)
            sys.exit(2 if isinstance(error, _WRONG_INPUT) else 1)


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
def main() -> None:
    """Medha serves language models with long contexts: chats do not wait behind books.

    \b
    Examples:
      medha model init .medha/tiny --preset tiny     make a small random checkpoint
      medha up examples/tiny.yaml                    serve it on http://127.0.0.1:8000
    """


if __name__ == "__main__":
    main(prog_name="medha")
