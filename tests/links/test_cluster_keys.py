"""Secrets of a cluster: what their entries hold, mounted as files, is what the links read."""

from __future__ import annotations

from pathlib import Path

import pytest

from medha.errors import ConfigInvalid
from medha_links.cluster_keys import (
    CONTROLLER_KEY,
    CONTROLLER_PUBLIC,
    RANKS_KEY,
    RANKS_PUBLIC,
    ROUTER_KEY,
    ROUTER_PUBLIC,
    TOKEN,
    TOKENS,
    enrolment_secret,
    replica_secret,
    router_secret,
)
from medha_links.key_files import KeyPair, read_public_key, read_tokens


def mounted(folder: Path, *secrets: dict[str, bytes]) -> Path:
    """A Secret's volume with `defaultMode: 0440`."""
    for secret in secrets:
        for name, content in secret.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o440)
    return folder


def test_the_pairs_of_a_replica_belong_together(tmp_path: Path) -> None:
    keys = mounted(tmp_path, replica_secret())
    assert KeyPair.read(keys / CONTROLLER_KEY).public == read_public_key(keys / CONTROLLER_PUBLIC)
    assert KeyPair.read(keys / RANKS_KEY).public == read_public_key(keys / RANKS_PUBLIC)
    assert len({path.read_bytes() for path in keys.iterdir()}) == 4


def test_who_holds_a_routers_enrolment_is_admitted_by_it_and_knows_it(tmp_path: Path) -> None:
    router = router_secret()
    keys = mounted(tmp_path, router, enrolment_secret(router))
    assert KeyPair.read(keys / ROUTER_KEY).public == read_public_key(keys / ROUTER_PUBLIC)
    assert read_tokens(keys / TOKEN)[0] in read_tokens(keys / TOKENS)


def test_no_two_secrets_are_the_same() -> None:
    assert not set(replica_secret().values()) & set(replica_secret().values())
    assert not set(router_secret().values()) & set(router_secret().values())


def test_replicas_enrol_with_the_first_of_several_tokens() -> None:
    router = router_secret() | {TOKENS: b"\n" + b"n" * 43 + b"\n" + b"o" * 43 + b"\n"}
    assert enrolment_secret(router)[TOKEN] == b"n" * 43 + b"\n"


@pytest.mark.parametrize(("entry", "content"), [(ROUTER_KEY, b"short"), (ROUTER_KEY, b""), (TOKENS, b"\n")])
def test_a_secret_that_holds_something_else_is_named(entry: str, content: bytes) -> None:
    with pytest.raises(ConfigInvalid, match=f"'{entry}'"):
        enrolment_secret(router_secret() | {entry: content})
