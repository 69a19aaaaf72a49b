"""`benchmarks/autoscale.py`: a run goes on where an earlier one was stopped, and its page shows every signal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmark import benchmark

autoscale = benchmark("autoscale")
page = benchmark("autoscale_page")
harness = benchmark("harness")


def row(hours: float, on_time: float) -> dict[str, float]:
    late = 100 - on_time
    return asdict(page.Result(hours, on_time, late, 100, 0, 3, 4, 1.0, harness.revision()))


def figures(seeds: int = 3) -> dict[str, dict[str, dict[str, float]]]:
    rows = {
        autoscale.row_name(workload, signal, seed): row(1.0 + seed / 10 + number, 90.0 - seed)
        for workload in autoscale.MIXES
        for number, signal in enumerate(autoscale.SIGNALS)
        for seed in range(seeds)
    }
    return {"rows": rows}


def test_runs_that_a_file_holds_are_not_simulated_again(tmp_path: Path) -> None:
    target = tmp_path / "autoscale.json"
    runs = [("mix", autoscale.SIGNALS[0], 0)]
    name = autoscale.row_name(*runs[0])
    kept = {name: row(1.0, 90.0)}
    autoscale.save([], target, {"load": autoscale.LOAD, "rows": kept})
    assert autoscale.earlier(target, {"load": autoscale.LOAD}) == kept
    autoscale.simulate_all(runs, kept, target, {}, 1)
    assert json.loads(target.read_text())["rows"] == kept
    assert autoscale.earlier(tmp_path / "none.json", {}) == {}


def test_a_signal_is_renewed_alone_and_rows_of_other_code_are_not_mixed_in_otherwise(tmp_path: Path) -> None:
    target = tmp_path / "autoscale.json"
    names = {signal.name: autoscale.row_name("mix", signal, 0) for signal in autoscale.SIGNALS}
    rows = {name: row(1.0, 90.0) | {"revision": "other"} for name in names.values()}
    autoscale.save([], target, {"rows": rows})
    with pytest.raises(SystemExit, match=r"rows of .* are not of revision .* use --renew"):
        autoscale.earlier(target, {})
    kept = autoscale.earlier(target, {}, "demand")
    assert set(rows) - set(kept) == {names["demand"]}


def test_results_of_another_load_are_not_gone_on_with(tmp_path: Path) -> None:
    target = tmp_path / "autoscale.json"
    autoscale.save([], target, {"load": [], "rows": {}})
    with pytest.raises(SystemExit, match=r"was measured with load \[\], not .*; name another file"):
        autoscale.earlier(target, {"load": autoscale.LOAD})


def test_the_cheapest_signal_of_its_worst_workload_meets_the_claim() -> None:
    results = {
        (workload, autoscale.name_of(signal)): [page.Result(1.0 + number, 100.0, 0.0, 9, 0, 3, 4, 1.0)]
        for workload in autoscale.MIXES
        for number, signal in enumerate(autoscale.SIGNALS)
    }
    claims, worst = autoscale.claims_of(results)
    assert worst[autoscale.OURS] == 1.0
    assert all(harness.holds(one) for one in claims)


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_page_has_a_line_and_the_picture_a_point_for_each_signal_and_target(
    tmp_path: Path, seeds: int
) -> None:
    copy, picture = tmp_path / "page.md", tmp_path / "signals.svg"
    copy.write_text(page.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    page.write_page(figures(seeds), copy, picture)
    text = copy.read_text(encoding="utf-8")
    for signal in autoscale.SIGNALS:
        words = page.SIGNALS[signal.name][0]
        assert f"| {words}" in text
    assert ("interval" in page.page_table(figures(seeds))) == (seeds > 1)
    page.write_page(figures(seeds), copy, picture)
    assert copy.read_text(encoding="utf-8") == text, "written twice, it is the same"
    drawn = ET.fromstring(picture.read_text(encoding="utf-8"))  # noqa: S314 (we have just made it)
    titles = list(drawn.iter("{http://www.w3.org/2000/svg}title"))
    assert len(titles) == len(autoscale.MIXES) * len(autoscale.SIGNALS)
