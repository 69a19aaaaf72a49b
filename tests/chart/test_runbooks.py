"""Every alert has a page of what to do, whose queries can be asked; and leads to it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.catalogue import problems, series
from chart.helm import ROOT, Helm, HelmFailed, alert_names, rules
from medha.observing.metric_catalogue import CATALOGUE

RUNBOOKS = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "runbooks").glob("*.md")}
PARTS = ("What it means", "What users notice", "Diagnosis", "What to do")


def asked(page: str) -> list[str]:
    """All queries of a page."""
    return re.findall(r"```promql\n(.*?)```", page, re.DOTALL)


def test_every_alert_has_its_page_and_every_page_its_alert(helm: Helm) -> None:
    assert RUNBOOKS.keys() == alert_names(helm)


@pytest.mark.parametrize("alert", RUNBOOKS)
def test_a_page_has_its_parts_in_order_and_something_to_ask_or_run(alert: str) -> None:
    page = RUNBOOKS[alert]
    assert page.startswith(f"# {alert}\n")
    assert re.findall(rf"^\*\*({'|'.join(PARTS)})[.*]", page, re.MULTILINE) == list(PARTS)
    assert asked(page) or "```sh" in page


@pytest.mark.parametrize("alert", [name for name, page in RUNBOOKS.items() if asked(page)])
def test_a_page_asks_for_series_that_are_exported_in_queries_that_prometheus_reads(
    promtool: str, tmp_path: Path, alert: str
) -> None:
    queries = asked(RUNBOOKS[alert])
    assert [problem for query in queries for problem in problems(query)] == []
    group = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": group}]}), encoding="utf-8")
    done = subprocess.run(
        [promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", RUNBOOKS)
def test_a_page_names_metrics_that_exist(alert: str) -> None:
    named = set(re.findall(r"`(medha_\w+)`", RUNBOOKS[alert]))
    assert named <= {metric.name for metric in CATALOGUE} | series().keys()


def links(helm: Helm, **values: Any) -> dict[str, str | None]:
    """The address to which each alert leads, if it leads to one."""
    every = [rule for group in rules(helm, **values)["groups"] for rule in group["rules"]]
    return {rule["alert"]: rule["annotations"].get("runbook_url") for rule in every if "alert" in rule}


@pytest.mark.parametrize("base", ["https://docs.example/runbooks", "https://docs.example/runbooks/"])
def test_every_alert_leads_to_its_page_where_the_pages_are_published(helm: Helm, base: str) -> None:
    found = links(helm, runbooks=base)
    assert found == {name: f"https://docs.example/runbooks/{name}.md" for name in RUNBOOKS}


def test_alerts_lead_nowhere_where_the_pages_are_not_published(helm: Helm) -> None:
    assert set(links(helm).values()) == {None}


def test_what_is_no_address_of_pages_is_refused(helm: Helm) -> None:
    with pytest.raises(HelmFailed, match="runbooks"):
        links(helm, runbooks="docs/runbooks")
