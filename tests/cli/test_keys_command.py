"""`medha keys`: keys are printed once, and files hold only what proves them."""

from __future__ import annotations

import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from medha.api.api_keys import MOST_HASHES, ApiKey, ApiKeys
from medha_cli import keys_command
from medha_cli.main import main


def medha(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["keys", *(str(argument) for argument in arguments)])


def add(file: Path, name: str, *options: object) -> str:
    """Return the key that was made."""
    result = medha("add", name, "--file", file, *options)
    assert result.exit_code == 0, result.stderr
    return str(result.stdout).removesuffix("\n")


def found(file: Path, key: str) -> ApiKey | None:
    return ApiKeys.from_text(file.read_bytes(), str(file)).find(key.encode())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_a_key_is_printed_and_its_file_holds_its_hash_and_limits_alone(file: Path) -> None:
    limits = ("--requests-per-minute", 5, "--tokens-per-minute", 6, "--concurrency", 7)
    classes = ("--service-class", "batch", "--service-class", "chat", "--cache-group", "team")
    key = add(file, "search", *limits, *classes)
    assert len(key) == len("sk-medha-") + 43, "256 bits"
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    entry = found(file, key)
    assert entry is not None
    assert (entry.requests_per_minute, entry.tokens_per_minute, entry.concurrency) == (5, 6, 7)
    assert (entry.service_classes, entry.cache_group) == (("batch", "chat"), "team")
    assert add(file, "other") != key
    assert found(file, key) == entry


def test_a_second_key_of_a_client_replaces_the_first_in_two_steps(file: Path) -> None:
    old = add(file, "search", "--concurrency", 7)
    file.chmod(0o640)
    new = add(file, "search", "--tokens-per-minute", 9)
    for key in (old, new):
        entry = found(file, key)
        assert entry is not None
        assert (entry.concurrency, entry.tokens_per_minute) == (7, 9)
    assert medha("remove", "search", "--former", "--file", file).exit_code == 0
    assert found(file, old) is None
    assert found(file, new) is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o640, "as its owner had set it"
    assert medha("remove", "search", "--file", file).exit_code == 0
    assert found(file, new) is None


def test_keys_that_are_made_at_the_same_time_are_all_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, is_first = keys_command.read_keys, threading.Event()

    def read(option: str, path: Path) -> ApiKeys:
        """Read the file, and let another `medha keys add` come between reading and writing."""
        keys = own(option, path)
        if not is_first.is_set():
            is_first.set()
            other.start()
            other.join(0.3)
        return keys

    add(file, "first")
    monkeypatch.setattr(keys_command, "read_keys", read)
    other = threading.Thread(
        target=keys_command.add.callback, args=("other", file, None, None, None, (), None)
    )
    add(file, "second")
    other.join()
    assert set(ApiKeys.from_text(file.read_bytes(), "").names) == {"first", "second", "other"}


def test_keys_are_listed_without_hashes(file: Path) -> None:
    add(file, "search", "--tokens-per-minute", 9000, "--service-class", "batch")
    add(file, "other")
    (entry, _) = ApiKeys.from_text(file.read_bytes(), "f").keys
    shown = medha("list", "--file", file).stdout
    for text in ("search", "other", "9,000", "batch"):
        assert text in shown
    assert entry.sha256[0][:8] not in shown


def test_what_is_wrong_is_named_and_changes_nothing(file: Path, tmp_path: Path) -> None:
    for arguments, named in (
        (("remove", "search", "--file", file), "No such file"),
        (("list", "--file", file), f"--file {file}: No such file"),
        (("add", "a~b", "--file", file), "keys.0.name has a character or a length"),
        (("add", "a", "--file", tmp_path / "none" / "keys.yaml"), "cannot be written"),
    ):
        result = medha(*arguments)
        assert result.exit_code == 2
        assert named in result.stderr
    assert not file.exists()
    for _ in range(MOST_HASHES):
        add(file, "search")
    before = file.read_text()
    for arguments, named in (
        (("add", "search", "--file", file), f"{MOST_HASHES} keys already"),
        (("remove", "other", "--file", file), "'other' is not in"),
    ):
        result = medha(*arguments)
        assert result.exit_code == 2
        assert named in result.stderr
    assert file.read_text() == before
    file.write_text("keys: {")
    assert medha("add", "search", "--file", file).exit_code == 2
    assert file.read_text() == "keys: {"
    assert [path.name for path in tmp_path.iterdir()] == ["keys.yaml"], "nothing half-written is left"


def test_up_refuses_a_wrong_file_of_keys_before_anything_starts(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medha_cli.up_command.supervise", lambda *_, **__: pytest.fail("parts were started"))
    model = tmp_path / "tiny"
    assert CliRunner().invoke(main, ["model", "init", str(model)]).exit_code == 0
    manifest = tmp_path / "replica.yaml"
    manifest.write_text(
        "{apiVersion: medha.dev/v1alpha1, kind: MedhaReplica, metadata: {name: one}, "
        f"spec: {{model: {{name: tiny, source: {{path: {model}}}}}}}}}"
    )
    file.write_text("keys: [{name: a, sha256: sk-pasted}]")
    for content, named in ((file, "keys.0.sha256.0 has a character"), (tmp_path / "none", "No such file")):
        arguments = ["up", str(manifest), "--port", "0", "--api-keys", str(content)]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert named in result.stderr
        assert "sk-pasted" not in result.stderr
