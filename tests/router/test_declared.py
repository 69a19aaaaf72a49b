"""The files that name models: read when they change, and believed no further than they can be read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from medha.api.declared import DeclaredModel, to_text, usable_aliases
from medha_router.declared import DeclaredFiles

A, B = (DeclaredModel(name=name, service_classes=("default",), replicas=1) for name in "ab")


def test_an_alias_that_two_models_claim_is_not_used_and_the_log_names_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    claims = {"a": ("b", "fast", "mine"), "b": ("fast",)}
    models = tuple(DeclaredModel(name=name, aliases=aliases) for name, aliases in claims.items())
    (tmp_path / "one.json").write_text(to_text(models))
    found = DeclaredFiles(tmp_path).changed()
    assert found is not None
    assert usable_aliases(found)[0] == {"mine": "a"}
    assert "model 'a' has the alias 'b', which is the name of a model" in caplog.text
    assert "the models 'a' and 'b' have the same alias 'fast'" in caplog.text


def write(folder: Path, name: str, *models: DeclaredModel) -> None:
    (folder / name).write_text(to_text(models), encoding="utf-8")


def test_all_files_count_together_and_only_a_change_is_reported(tmp_path: Path) -> None:
    files = DeclaredFiles(tmp_path)
    assert files.changed() is None
    write(tmp_path, "one.json", B, A)
    write(tmp_path, "two.json", A)
    (tmp_path / "notes.txt").write_text("no models")
    twice = A.model_copy(update={"replicas": 2})
    assert files.changed() == (twice, B)
    assert files.changed() is None
    (tmp_path / "one.json").unlink()
    assert files.changed() == (A,)
    (tmp_path / "two.json").unlink()
    assert files.changed() == ()


def test_a_folder_may_come_later(tmp_path: Path) -> None:
    files = DeclaredFiles(tmp_path / "later")
    assert files.changed() is None
    (tmp_path / "later").mkdir()
    write(tmp_path / "later", "one.json", A)
    assert files.changed() == (A,)


def test_a_volume_of_a_config_map_is_followed_as_the_kubelet_swaps_it(tmp_path: Path) -> None:
    for name, model in (("first", A), ("second", B)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "one.json", model)
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "one.json").symlink_to("..data/one.json")
    files = DeclaredFiles(tmp_path)
    assert files.changed() == (A,)
    (tmp_path / "..tmp").symlink_to("second")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    assert files.changed() == (B,)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "EOF"),
        ('{"models": [{"name": ""}]}', "models.0.name is ''"),
        ('{"models": [{"name": "a", "replicas": -1}]}', "models.0.replicas is -1"),
        ("\udcff", "one.json"),
    ],
)
def test_a_broken_file_is_reported_once_and_its_last_content_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, named: str
) -> None:
    files = DeclaredFiles(tmp_path)
    write(tmp_path, "one.json", A)
    assert files.changed() == (A,)
    (tmp_path / "one.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with caplog.at_level(logging.ERROR):
        assert files.changed() == (A,)
        assert files.changed() is None
    (message,) = caplog.messages
    assert "one.json" in message
    assert named in message
    write(tmp_path, "one.json", B)
    assert files.changed() == (B,)


def test_fields_of_a_newer_release_are_passed_over(tmp_path: Path) -> None:
    files = DeclaredFiles(tmp_path)
    (tmp_path / "one.json").write_text('{"models": [{"name": "a", "colour": "red"}], "version": 2}')
    assert files.changed() == (DeclaredModel(name="a"),)
