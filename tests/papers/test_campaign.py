"""`benchmarks/campaign.py`: a campaign of two short runs, stopped, resumed and written again."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmark import benchmark
from medha_papers.campaign_adopt import kind, sample
from medha_papers.campaign_plan import FULL, runs
from medha_papers.campaign_run import Run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "campaign.py"
RUNS = [Run("medha-lars", 0.05, seed, 4.0, rate=2.0) for seed in range(2)]


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = benchmark("campaign")
    monkeypatch.setattr(module, "runs", lambda scale: RUNS)
    monkeypatch.setattr(module, "loaded_files", lambda: [SCRIPT])  # others have a test of their own
    return module


@pytest.fixture
def call(campaign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The script, quick, with a page and results of its own."""
    places = ["--results", str(tmp_path / "results"), "--page", str(tmp_path / "page.md")]

    def run(*arguments: str) -> int:
        monkeypatch.setattr(
            sys, "argv", ["campaign", "--quick", "--interpreted", "--jobs", "1", *places, *arguments]
        )
        found: int = campaign.main()
        return found

    return run


def test_a_quick_campaign_resumes_and_writes_its_page_again(  # type: ignore[no-untyped-def]
    call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--list") == 0
    assert "2 runs" in capsys.readouterr().out
    assert call("--minutes", "0") == 0
    (file,) = (tmp_path / "results").glob("campaign-quick-*.json")
    assert json.loads(file.read_text())["runs"] == {}
    assert call() == 0
    capsys.readouterr()
    kept = json.loads(file.read_text())
    assert set(kept["runs"]) == {run.key for run in RUNS}
    assert kept["sources"] in file.name
    assert call() == 0
    assert "2 runs, 2 done before" in capsys.readouterr().out
    page = (tmp_path / "page.md").read_text()
    assert "2 of 2 runs" in page
    assert re.search(r"; 2 of them took [\d.]+ minutes with 1 processes\.", page)
    assert "**This is a quick run**" in page
    (tmp_path / "page.md").unlink()
    assert call("--page-only") == 0
    assert (tmp_path / "page.md").read_text() == page


def test_a_page_of_results_of_older_code_says_so(  # type: ignore[no-untyped-def]
    call,
    campaign: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="has no results of mode quick"):
        call("--page-only")
    assert call("--minutes", "0") == 0
    monkeypatch.setattr(campaign, "digest", lambda files: "0" * 12)
    capsys.readouterr()
    assert call("--page-only") == 0
    assert "no results of the present code (000000000000)" in capsys.readouterr().out


@pytest.fixture
def earlier(call, campaign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # type: ignore[no-untyped-def]
    """Results of code that has been changed since."""
    assert call() == 0
    (file,) = (tmp_path / "results").glob("campaign-quick-*.json")
    monkeypatch.setattr(campaign, "digest", lambda files: "f" * 12)
    return file


def test_results_of_earlier_code_are_adopted_where_runs_come_out_the_same_and_the_page_says_so(  # type: ignore[no-untyped-def]
    call, tmp_path: Path, earlier: Path
) -> None:
    assert call("--adopt", str(earlier), "--sample", "1") == 0
    before = json.loads(earlier.read_text())
    after = json.loads((tmp_path / "results" / f"campaign-quick-{'f' * 12}.json").read_text())
    assert after["runs"] == before["runs"]
    assert after["sources"] == "f" * 12
    (adopted,) = after["adopted"]
    assert adopted["sources"] == before["sources"]
    assert len(adopted["again"]) == 1
    assert f"taken over from sources `{before['sources']}`" in (tmp_path / "page.md").read_text()
    with pytest.raises(SystemExit, match="holds results of the present code"):
        call("--adopt", str(earlier))


def test_a_deployment_that_a_change_was_meant_for_is_not_adopted_and_left_to_be_simulated(  # type: ignore[no-untyped-def]
    call,
    campaign: ModuleType,
    tmp_path: Path,
    earlier: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changed = replace(RUNS[0], deployment="70B-3D")
    monkeypatch.setattr(campaign, "runs", lambda scale: [*RUNS, changed])
    results = json.loads(earlier.read_text())
    results["runs"][changed.key] = results["runs"][RUNS[0].key]  # of the code before
    earlier.write_text(json.dumps(results))
    assert call("--adopt", str(earlier), "--sample", "3", "--except", "70B-3D") == 0
    target = tmp_path / "results" / f"campaign-quick-{'f' * 12}.json"
    after = json.loads(target.read_text())
    assert set(after["runs"]) == {run.key for run in RUNS}
    assert after["adopted"][0]["except"] == ["70B-3D"]
    page = (tmp_path / "page.md").read_text()
    assert "but those of 70B-3D, which were simulated again. 2 runs" in page
    assert "2 of 3 runs" in page
    capsys.readouterr()
    assert call("--list") == 0
    left = capsys.readouterr().out
    assert changed.key in left


def test_an_exception_that_no_run_has_is_refused(  # type: ignore[no-untyped-def]
    call, earlier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call("--adopt", str(earlier), "--except", "80B")
    assert f"--except 80B: no run has this name; use one of {RUNS[0].deployment}, " in capsys.readouterr().err


def test_results_are_not_adopted_where_one_run_that_is_drawn_comes_out_different(  # type: ignore[no-untyped-def]
    call, tmp_path: Path, earlier: Path
) -> None:
    results = json.loads(earlier.read_text())
    for outcome in results["runs"].values():
        outcome["all"]["tpot_seconds"]["max"] = 0.123456
    earlier.write_text(json.dumps(results))
    with pytest.raises(SystemExit, match=r"not adopted: .*: all was .*0\.123456"):
        call("--adopt", str(earlier), "--sample", "1")
    assert [earlier] == list((tmp_path / "results").iterdir())


def test_a_sample_has_one_run_of_each_kind_before_a_second_of_any() -> None:
    planned = runs(FULL)
    kinds = {kind(run) for run in planned}
    chosen = sample(planned, len(kinds), "a seed")
    assert {kind(run) for run in chosen} == kinds
    assert chosen == sample(planned, len(kinds), "a seed")
    assert chosen != sample(planned, len(kinds), "another")
    assert sample(planned, 3, "a seed") == chosen[:3]
