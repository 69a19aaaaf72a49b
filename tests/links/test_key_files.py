"""Key files: made for their owner alone, and refused by name where they cannot be right."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from medha.errors import ConfigInvalid
from medha_links.key_files import KeyFiles, KeyPair, read_public_key, read_public_keys, read_tokens


@pytest.fixture
def files(tmp_path: Path) -> KeyFiles:
    return KeyFiles.create(tmp_path / "keys")


def test_fresh_files_are_their_owners_alone_and_belong_together(files: KeyFiles) -> None:
    assert stat.S_IMODE(files.directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.directory.iterdir()} == {0o600}
    for secret, public in (
        (files.router, files.router_public),
        (files.controller, files.controller_public),
        (files.ranks, files.ranks_public),
    ):
        assert KeyPair.read(secret).public == read_public_key(public)
    assert len({path.read_bytes() for path in files.directory.iterdir()}) == 7


def test_keys_are_never_made_over_others(files: KeyFiles) -> None:
    with pytest.raises(FileExistsError):
        KeyFiles.create(files.directory)


def test_a_secret_is_not_shown_by_what_prints_a_pair() -> None:
    pair = KeyPair.new()
    assert pair.secret.decode() not in f"{pair!r} {pair}"


def test_who_holds_the_same_token_has_the_same_pair_and_who_holds_another_does_not() -> None:
    token = "a" * 32
    assert KeyPair.of_token(token) == KeyPair.of_token(token)
    assert KeyPair.of_token(token).public != KeyPair.of_token("a" * 31 + "b").public


def test_several_keys_and_tokens_may_be_listed_while_one_takes_the_place_of_another(tmp_path: Path) -> None:
    keys = [KeyPair.new().public for _ in range(2)]
    (tmp_path / "k").write_bytes(b"\n".join([*keys, b"", b""]))
    assert read_public_keys(tmp_path / "k") == frozenset(keys)
    (tmp_path / "t").write_text("x" * 40 + "\n" + "y" * 40 + "\n")
    (tmp_path / "t").chmod(0o440)
    assert read_tokens(tmp_path / "t") == ("x" * 40, "y" * 40)


@pytest.mark.parametrize("read", [KeyPair.read, read_public_key, read_public_keys, read_tokens])
def test_a_file_that_is_missing_or_empty_is_named_with_its_fix(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(f"{tmp_path}/none: ") + ".*docs/security.md"):
        read(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigInvalid, match=re.escape(f"{tmp_path}/empty: is empty")):
        read(tmp_path / "empty")


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644])
@pytest.mark.parametrize("name", ["router", "enrolment"])
def test_a_secret_that_anybody_may_read_is_refused(files: KeyFiles, name: str, mode: int) -> None:
    path: Path = getattr(files, name)
    path.chmod(mode)
    with pytest.raises(ConfigInvalid, match=rf"has mode {mode:04o}.*chmod 600"):
        (KeyPair.read if name == "router" else read_tokens)(path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"short", id="short"),
        pytest.param(b"a" * 41, id="long"),
        pytest.param(b"a" * 39 + b"~", id="no Z85"),
        pytest.param(b"#" * 40, id="more than 32 bits"),
        pytest.param(b"\xff" * 40, id="no ASCII"),
    ],
)
def test_what_is_no_key_is_refused_by_its_line_and_not_shown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    for read in (KeyPair.read, read_public_key):
        with pytest.raises(
            ConfigInvalid, match="line 1 is not a key: expected 40 characters of Z85"
        ) as caught:
            read(path)
        assert content.decode("latin-1") not in str(caught.value)


def test_one_key_is_expected_where_there_is_one_server(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(KeyPair.new().secret + b"\n" + KeyPair.new().secret)
    path.chmod(0o600)
    for read in (KeyPair.read, read_public_key):
        with pytest.raises(ConfigInvalid, match=r"2 (lines|keys), expected"):
            read(path)


@pytest.mark.parametrize("token", ["short", "é" * 40])
def test_a_token_that_can_be_guessed_is_refused_and_not_shown(tmp_path: Path, token: str) -> None:
    path = tmp_path / "tokens"
    path.write_text("x" * 40 + "\n" + token)
    path.chmod(0o600)
    with pytest.raises(
        ConfigInvalid, match=r"line 2 is not an enrolment token.*secrets.token_urlsafe"
    ) as caught:
        read_tokens(path)
    assert token not in str(caught.value)
