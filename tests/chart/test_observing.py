"""Dashboards and alerts: they name what is exported, Prometheus can read them, and alerts come when they should."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.catalogue import problems
from chart.helm import CHART, ROOT, Helm, find

DASHBOARDS = sorted((ROOT / "dashboards").glob("*.json"))


def queries(dashboard: Path) -> list[str]:
    document = json.loads(dashboard.read_text(encoding="utf-8"))
    panels = [target["expr"] for panel in document["panels"] for target in panel.get("targets", [])]
    variables = [each["definition"] for each in document["templating"]["list"] if "definition" in each]
    return panels + [re.sub(r"label_values\((.*), \w+\)", r"\1", query) for query in variables]


def rules(helm: Helm, **values: Any) -> dict[str, Any]:
    monitoring = {"monitoring": {"rules": {"enabled": True} | values}}
    return dict(find(helm.render(**monitoring), "PrometheusRule", "medha")["spec"])


@pytest.fixture(scope="session")
def promtool() -> str:
    """Prometheus' own checker. Where there is none its tests are skipped, but in CI they fail."""
    found = shutil.which("promtool")
    if found is None:
        assert not os.environ.get("CI"), "no promtool: install the package prometheus"
        pytest.skip("no promtool: install the package prometheus")
    return found


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_series_and_labels_that_are_exported(dashboard: Path) -> None:
    assert [problem for query in queries(dashboard) for problem in problems(query)] == []


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_has_a_source_to_choose_and_panels_that_do_not_overlap(dashboard: Path) -> None:
    document = json.loads(dashboard.read_text(encoding="utf-8"))
    taken = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["description"]
    identities = [panel["id"] for panel in document["panels"]]
    assert len(identities) == len(set(identities))


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_prometheus_can_read_a_dashboards_queries(promtool: str, tmp_path: Path, dashboard: Path) -> None:
    chosen = {"$__rate_interval": "5m", "$__range": "6h"}
    asked = [re.sub(r"\$__\w+", lambda found: chosen[found[0]], query) for query in queries(dashboard)]
    group = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(asked)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": group}]}), encoding="utf-8")
    done = subprocess.run(
        [promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_chart_holds_the_same_dashboards() -> None:
    copies = CHART / "files" / "dashboards"
    assert {path.name for path in copies.iterdir()} == {path.name for path in DASHBOARDS}
    for path in DASHBOARDS:
        assert (copies / path.name).read_bytes() == path.read_bytes(), "run `make gen`"


def test_the_sidecar_gets_each_dashboard_as_it_is(helm: Helm) -> None:
    manifests = helm.render(monitoring={"dashboards": True})
    for path in DASHBOARDS:
        found = find(manifests, "ConfigMap", f"medha-dashboard-{path.stem}")
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        (text,) = found["data"].values()
        assert json.loads(text) == json.loads(path.read_text(encoding="utf-8"))


def test_alerts_ask_for_series_and_labels_that_are_exported(helm: Helm) -> None:
    every = [rule for group in rules(helm)["groups"] for rule in group["rules"]]
    assert [problem for rule in every for problem in problems(rule["expr"])] == []
    recorded = {rule["record"] for rule in every if "record" in rule}
    asked = {name for rule in every for name in re.findall(r"\b\w+:medha_\w+:\w+", rule["expr"])}
    assert asked <= recorded


def test_every_alert_is_told_of_in_the_guide(helm: Helm) -> None:
    alerts = {rule["alert"] for group in rules(helm)["groups"] for rule in group["rules"] if "alert" in rule}
    guide = (ROOT / "docs" / "observing.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(Medha[A-Z]\w+)`", guide)) == alerts


def test_an_alert_names_only_labels_that_it_keeps(helm: Helm) -> None:
    every = [rule for group in rules(helm)["groups"] for rule in group["rules"]]
    kept = {rule["record"]: rule["expr"] for rule in every if "record" in rule}
    for rule in every:
        if "alert" in rule:
            query = " ".join([rule["expr"], *(kept[name] for name in kept if name in rule["expr"])])
            grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
            used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
            assert used <= grouped, rule["alert"]


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("rate(medha_requests[5m])", "medha_requests"),
        ('medha_requests_total{status="200"}', "status"),
        ("sum by (replica) (medha_requests_total)", "replica"),
        ("medha_step_observed_seconds", "medha_step_observed_seconds"),
        ("vllm:num_requests_swapped", "vllm:num_requests_swapped"),
    ],
)
def test_what_is_not_exported_is_noticed(query: str, wrong: str) -> None:
    assert any(wrong in problem for problem in problems(query))


@pytest.mark.parametrize("objective", [0.5, 0.9, 0.95, 0.999])
def test_prometheus_can_read_the_rules(helm: Helm, promtool: str, tmp_path: Path, objective: float) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules(helm, objective=objective)), encoding="utf-8")
    done = subprocess.run(
        [promtool, "check", "rules", "--lint=all", "--lint-fatal", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_that_no_share_of_misses_could_reach_is_left_out(helm: Helm) -> None:
    """With an objective of 90 %, 14.4 times the budget is more than all requests."""

    def windows(objective: float) -> set[str]:
        return {
            rule["labels"]["window"]
            for group in rules(helm, objective=objective)["groups"]
            for rule in group["rules"]
            if rule.get("alert") == "MedhaTtftBudgetBurns"
        }

    assert windows(0.95) == {"1h", "6h", "1d", "3d"}
    assert windows(0.9) == {"6h", "1d", "3d"}


def attained(met: str, per_minute: int, minutes: int) -> dict[str, str]:
    labels = f'namespace="n", model="m", service_class="chat", prompt_tokens="le_1024", met="{met}"'
    return {
        "series": f"medha_request_ttft_attainment_total{{{labels}}}",
        "values": f"0+{per_minute}x{minutes}",
    }


def fires(window: str, severity: str) -> dict[str, Any]:
    return {"window": window, "severity": severity}


CASES: dict[str, tuple[list[dict[str, str]], int, list[dict[str, Any]]]] = {
    # series, minute at which is asked, alerts that fire
    "every request in time": ([attained("true", 60, 400)], 390, []),
    "three in a hundred late": ([attained("true", 97, 400), attained("false", 3, 400)], 390, []),
    "all late, and none ever in time": (
        [attained("false", 60, 400)],
        65,
        [fires("1h", "critical"), fires("6h", "critical"), fires("1d", "warning"), fires("3d", "warning")],
    ),
    "every second late": (
        [attained("true", 60, 800), attained("false", 60, 800)],
        400,
        [fires("6h", "critical"), fires("1d", "warning"), fires("3d", "warning")],
    ),
    "one in ten late": (
        [attained("true", 90, 800), attained("false", 10, 800)],
        400,
        [fires("3d", "warning")],
    ),
    "too few requests to say": ([{**attained("false", 1, 5), "values": "0+1x10 10x60"}], 60, []),
    "late once, in time now": (
        [
            {**attained("false", 0, 0), "values": "0+60x60 3600x60"},
            {**attained("true", 0, 0), "values": "0x60 0+60x60"},
        ],
        110,
        # Over 6 h and longer it is still most of them, and the short windows of those hold some.
        [fires("1d", "warning"), fires("3d", "warning")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_alerts_fire_when_a_budget_burns_and_stay_silent_otherwise(
    helm: Helm, promtool: str, tmp_path: Path, name: str
) -> None:
    series, minute, expected = CASES[name]
    labels = {"namespace": "n", "model": "m", "service_class": "chat"}
    alerts = [labels | alert for alert in expected]
    fire_as_expected(helm, promtool, tmp_path, series, minute, {"MedhaTtftBudgetBurns": alerts})


def resources(condition: str, status: str, reason: str) -> dict[str, str]:
    labels = f'kind="MedhaReplica", condition="{condition}", status="{status}", reason="{reason}"'
    return {"series": f"medha_operator_resources{{{labels}}}", "values": "1x60"}


READY = resources("Ready", "True", "Serving")
HINDERED: dict[str, tuple[list[dict[str, str]], int, list[str]]] = {
    # what is said of a replica, minute at which is asked, alerts that fire
    "it serves": ([READY, resources("Reconciling", "False", "Serving")], 50, []),
    "it serves, and a write is refused": (
        [READY, resources("Reconciling", "True", "Refused"), resources("Stalled", "False", "Refused")],
        16,
        ["MedhaNotCarriedOut"],
    ),
    "that was refused a moment ago": ([READY, resources("Reconciling", "True", "Refused")], 14, []),
    "it serves, and every look fails": (
        [READY, resources("Reconciling", "True", "ApiServerFails")],
        16,
        ["MedhaNotCarriedOut"],
    ),
    "it serves, and its spec is refused": (
        [READY, resources("Reconciling", "False", "Invalid"), resources("Stalled", "True", "Invalid")],
        16,
        ["MedhaStalled"],
    ),
    "it is on its way": (
        [resources("Ready", "False", "Loading"), resources("Reconciling", "True", "Loading")],
        16,
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HINDERED)
def test_an_alert_tells_of_a_spec_that_is_not_carried_out_though_its_replica_serves(
    helm: Helm, promtool: str, tmp_path: Path, name: str
) -> None:
    series, minute, firing = HINDERED[name]
    expected: dict[str, list[dict[str, str]]] = {}
    for alert in ("MedhaNotCarriedOut", "MedhaStalled", "MedhaNotReady"):
        (reason,) = {
            one["series"].rpartition('reason="')[2].rstrip('"}') for one in series if one is not READY
        }
        labels = {"kind": "MedhaReplica", "reason": reason, "severity": "warning"}
        expected[alert] = [labels] if alert in firing else []
    fire_as_expected(helm, promtool, tmp_path, series, minute, expected)


def fire_as_expected(
    helm: Helm,
    promtool: str,
    folder: Path,
    series: list[dict[str, str]],
    minute: int,
    expected: dict[str, list[dict[str, str]]],
) -> None:
    """Whether, with these series, each alert fires at that minute with the expected labels, and with no others."""
    spec = rules(helm)
    for group in spec["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)  # whose numbers are not what is tested here
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "alert_rule_test": [
                    {
                        "eval_time": f"{minute}m",
                        "alertname": name,
                        "exp_alerts": [{"exp_labels": labels} for labels in alerts],
                    }
                    for name, alerts in expected.items()
                ],
            }
        ],
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    (folder / "test.yaml").write_text(yaml.safe_dump(test), encoding="utf-8")
    done = subprocess.run(
        [promtool, "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
