"""A campaign continues where it was stopped, unless the code has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaign import results
from campaign.results import Results


def test_what_was_found_with_the_same_code_is_kept_and_with_other_code_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "code_digest", lambda: "this")
    file = tmp_path / "found.json"
    first = Results(file)
    first.add("apply/kill-before/1", {"wrong": []})
    first.add("apply/kill-before/2", {"wrong": ["an orphan"]})
    assert Results(file).rows == first.rows
    assert Results(file).failed == ["apply/kill-before/2"]
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(results, "code_digest", lambda: "other")
    assert Results(file).rows == {}
    assert "begin anew" in capsys.readouterr().out


def test_a_plan_that_was_skipped_is_tried_again_and_has_not_failed(tmp_path: Path) -> None:
    found = Results(tmp_path / "found.json")
    found.add("apply/kill-before/1", {"wrong": [], "is_skipped": False})
    found.add("apply/kill-before/98", {"wrong": ["an orphan"], "is_skipped": True})
    found.add("apply/kill-before/99", {"wrong": [], "is_skipped": True})
    assert found.skipped == ["apply/kill-before/99"]
    assert found.failed == ["apply/kill-before/98"]
    assert [found.is_done(f"apply/kill-before/{number}") for number in (1, 2, 98, 99)] == [
        True,
        False,
        True,
        False,
    ]


def test_they_depend_on_the_operator_and_what_it_imports_and_on_nothing_else() -> None:
    names = {str(file.relative_to(results.ROOT)) for file in results.sources()}
    assert {
        "operator/medha_operator/replica/plan.py",
        "core/medha/api/replica.py",
        "tests/campaign/runner.py",
    } <= names
    assert (
        not {"core/medha/scheduler/packer.py", "tests/campaign/promises.py", "tests/campaign/test_results.py"}
        & names
    )
