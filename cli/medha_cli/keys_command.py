"""`medha keys`: makes, lists and removes the API keys of a router's clients."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from medha.api.api_keys import MOST_HASHES, ApiKeys, hash_of
from medha.errors import ConfigInvalid
from medha_cli.options import FILE

_PREFIX = "sk-medha-"  # scanners of repositories look for keys by such beginnings
_RANDOM_BYTES = 32

_file_option = click.option(
    "--file",
    "path",
    type=FILE,
    required=True,
    help="File of API keys, as a router reads it.",
)


@click.group("keys")
def command() -> None:
    """Make, list and remove the API keys of a router's clients (docs/api-keys.md).

    A file of keys holds hashes of them: nobody can learn a key from it. A router reads the file again when it changes.
    """


@command.command("add")
@click.argument("name")
@_file_option
@click.option("--requests-per-minute", type=click.IntRange(1), help="Largest number of requests a minute.")
@click.option(
    "--tokens-per-minute",
    type=click.IntRange(1),
    help="Largest number of tokens a minute, prompts and outputs together.",
)
@click.option("--concurrency", type=click.IntRange(1), help="Largest number of requests at the same time.")
@click.option(
    "--service-class",
    "service_classes",
    multiple=True,
    help="Service class that the client may use; repeat it for several. Default: all.",
)
@click.option(
    "--cache-group", help="Share cached prompts with the other keys of this group. Default: with none."
)
def add(
    name: str,
    path: Path,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    concurrency: int | None,
    service_classes: tuple[str, ...],
    cache_group: str | None,
) -> None:
    """Make a key for the client NAME, add its hash to a file, and print the key. It cannot be shown again.

    If the file has NAME already, its former keys stay valid, so that the client can change over; then remove them with
    `medha keys remove NAME --former`. A limit that is given replaces the former one. Comments in the file are lost.

    \b
    Examples:
      medha keys add search --file keys.yaml
      medha keys add reports --file keys.yaml --concurrency 4 --tokens-per-minute 1000000 --service-class batch
    """
    value = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    given = {
        "requestsPerMinute": requests_per_minute,
        "tokensPerMinute": tokens_per_minute,
        "concurrency": concurrency,
        "serviceClasses": service_classes or None,
        "cacheGroup": cache_group,
    }
    with _locked(path):
        keys = read_keys("--file", path) if path.exists() else ApiKeys(())
        former = next((key for key in keys.keys if key.name == name), None)
        hashes = (*(former.sha256 if former is not None else ()), hash_of(value))
        if len(hashes) > MOST_HASHES:
            raise ConfigInvalid(
                f"NAME {name!r} has {MOST_HASHES} keys already; remove the former ones: medha keys remove {name} --former"
            )
        entry = {} if former is None else former.model_dump(by_alias=True, exclude_none=True)
        entry |= {field: value for field, value in given.items() if value is not None}
        _write(path, keys.with_entry(entry | {"name": name, "sha256": hashes}))
    click.echo(value)
    note = (
        "" if former is None else f"; its {len(former.sha256)} former ones stay valid until they are removed"
    )
    click.echo(f"{path}: {name} has this new key; only its hash is stored, so keep it now{note}", err=True)


@command.command("remove")
@click.argument("name")
@_file_option
@click.option("--former", is_flag=True, help="Keep the client and its newest key; remove its former keys.")
def remove(name: str, path: Path, former: bool) -> None:
    """Remove the client NAME from a file, or only its former keys.

    \b
    Examples:
      medha keys remove search --file keys.yaml --former
      medha keys remove search --file keys.yaml
    """
    with _locked(path):
        keys = read_keys("--file", path)
        if name not in keys.names:
            known = ", ".join(sorted(keys.names)) or "none"
            raise ConfigInvalid(f"NAME {name!r} is not in {path}; it has {known}")
        kept = [
            key.model_copy(update={"sha256": key.sha256[-1:]}) if key.name == name else key
            for key in keys.keys
            if former or key.name != name
        ]
        _write(path, ApiKeys(kept))
    click.echo(f"{path}: {'the former keys of ' if former else ''}{name} removed", err=True)


@command.command("list")
@_file_option
def list_keys(path: Path) -> None:
    """List the clients of a file with their limits.

    \b
    Example:
      medha keys list --file keys.yaml
    """
    table = Table(
        "name", "keys", "requests/min", "tokens/min", "concurrency", "service classes", "cache group"
    )
    for key in read_keys("--file", path).keys:
        limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrency)
        table.add_row(
            key.name,
            str(len(key.sha256)),
            *("-" if limit is None else f"{limit:,}" for limit in limits),
            ", ".join(key.service_classes or ()) or "all",
            key.cache_group or "-",
        )
    Console(highlight=False).print(table)


def read_keys(option: str, path: Path) -> ApiKeys:
    """Return the keys of the file that an option names.

    Raises:
        ConfigInvalid: it cannot be read, or is invalid.
    """
    try:
        return ApiKeys.from_text(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigInvalid(f"{option} {path}: {error.strerror}; name a file of API keys") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let no other `medha keys` change files of this folder meanwhile. The lock is the folder's, so no file is left."""
    try:
        descriptor = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # reading or writing reports it
        yield
        return
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, keys: ApiKeys) -> None:
    """Replace the file as a whole: a router that reads it never finds a half. A new file is its owner's alone."""
    target = path.resolve()
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
        descriptor, partial = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(keys.text())
            Path(partial).chmod(mode)
            Path(partial).replace(target)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigInvalid(f"--file {path}: cannot be written: {error.strerror}") from error
