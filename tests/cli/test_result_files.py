"""Files that a run ends in are tried before it, written whole or not at all, and not lost."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from medha.errors import ConfigInvalid
from medha_cli.result_files import ResultsUnwritten, require_writable, write_results


def test_trying_a_file_leaves_nothing_and_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "old.html").write_text("old")
    require_writable("--out", tmp_path / "old.html", tmp_path / "new.html")
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]
    assert (tmp_path / "old.html").read_text() == "old"


def test_what_cannot_be_written_is_refused_with_option_file_and_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken.json").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for file, words in (
        (tmp_path / "none" / "a.html", "whose folder does not exist; make it or choose another"),
        (tmp_path / "file" / "a.html", "whose folder is a file; make it or choose another"),
        (tmp_path / "taken.json", "exists and is not a plain file; choose another"),
        (tmp_path / "circle" / "a.html", "name a file in a folder that can be written"),
        (tmp_path / ("n" * 250), r"\(File name too long\); name a file in a folder that can be written"),
    ):
        with pytest.raises(ConfigInvalid, match=f"^--out.*{file.name}.*{words}"):
            require_writable("--out", file)


def test_what_the_command_reads_is_not_overwritten(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    log.write_text("{}")
    link = tmp_path / "link.json"
    link.symlink_to(log)
    for file in (log, link):
        with pytest.raises(ConfigInvalid, match="is read by this command"):
            require_writable("--out", file, inputs=[log])


def test_both_files_are_written_and_replace_what_was_there(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    write_results("--out", page, "{}", lambda: "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "page.html": "new",
        "page.json": "{}",
    }


def test_figures_go_to_the_temporary_folder_if_their_own_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ResultsUnwritten, match=r"No such file or directory.*the figures are in") as caught:
        write_results("--out", tmp_path / "gone" / "page.html", '{"a": 1}', lambda: "page")
    (kept,) = tmp_path.iterdir()
    assert str(kept) in str(caught.value)
    assert kept.read_text() == '{"a": 1}'
