"""Dashboards and alerts: they name what is exported, Prometheus can read them, and alerts come when they should."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from chart.catalogue import problems
from chart.helm import CHART, ROOT, Helm, alert_names, find, rules
from medha.observing.metric_catalogue import CONTROLLER_METRICS, RANK_METRICS

GUIDE = (ROOT / "docs" / "observing.md").read_text(encoding="utf-8")
DASHBOARDS = sorted((ROOT / "dashboards").glob("*.json"))


def queries(dashboard: Path) -> list[str]:
    document = json.loads(dashboard.read_text(encoding="utf-8"))
    panels = [target["expr"] for panel in document["panels"] for target in panel.get("targets", [])]
    variables = [each["query"]["query"] for each in document["templating"]["list"] if each["type"] == "query"]
    return panels + [re.sub(r"label_values\((.*), \w+\)", r"\1", query) for query in variables]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_series_and_labels_that_are_exported(dashboard: Path) -> None:
    assert [problem for query in queries(dashboard) for problem in problems(query)] == []


def test_the_dashboard_of_devices_shows_all_that_ranks_export() -> None:
    asked = {
        name for query in queries(ROOT / "dashboards" / "devices.json") for name in re.findall(r"\w+", query)
    }
    exported = {one.name + ("_total" if one.kind == "counter" else "") for one in RANK_METRICS}
    assert exported - asked == set()


def test_the_dashboard_of_replicas_shows_all_that_is_exported_of_tiers() -> None:
    asked = {
        name for query in queries(ROOT / "dashboards" / "replica.json") for name in re.findall(r"\w+", query)
    }
    subjects = (
        r"medha_(\w+_tier|tier|peer_kv|stream\w+|swaps?|long_swaps|sequences_swapped|avoided_prefill)(_|$)"
    )
    exported = {
        one.name + ("_total" if one.kind == "counter" else "")
        for one in CONTROLLER_METRICS
        if re.match(subjects, one.name)
    }
    assert len(exported) > 30
    assert exported - asked == set()


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


def test_every_alert_is_described_in_the_guide(helm: Helm) -> None:
    assert set(re.findall(r"`(Medha[A-Z]\w+)`", GUIDE)) == alert_names(helm)


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


PROMQL = re.findall(r"```promql\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.parametrize("query", PROMQL)
def test_the_guide_asks_for_series_that_are_exported(query: str) -> None:
    assert [one for one in problems(query) if "has a label" not in one] == []


def test_the_guides_queries_give_what_it_says_beside_dcgms_exporter(promtool: str, tmp_path: Path) -> None:
    """Two ranks of one replica on two GPUs, and DCGM's exporter of their node, which also sees a GPU of somebody else."""
    own = '{namespace="a", pod="r-l0-0", rank="%s"%s}'
    dcgm = 'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="%d", UUID="GPU-%s", device="nvidia%d", Hostname="n", pod="dcgm"}'
    series: dict[str, str] = {}
    for rank, gpu in ((0, "x"), (1, "y")):
        more = f', lane="0", stage="{rank}", tensor="0", rank_pod="r-l0-{rank}", device="NVIDIA H200", UUID="GPU-{gpu}"'
        series["medha_rank_info" + own % (rank, more)] = "1x10"
        series["medha_rank_step_seconds_total" + own % (rank, ', part="forward"')] = f"0+{45 - 15 * rank}x10"
        series["medha_rank_estimated_flops_total" + own % (rank, "")] = f"0+{(rank + 1) * 60 * 100}x10"
        series["medha_rank_peak_flops_per_second" + own % (rank, "")] = "1000x10"
        series[dcgm % (rank + 4, gpu, rank + 4)] = f"0.{rank + 5}x10"
    series[dcgm % (6, "z", 6)] = "0.9x10"
    parts, mfu, joined, compared = PROMQL
    expected = {
        parts: {'{rank="0", part="forward"}': 0.75, '{rank="1", part="forward"}': 0.5},
        mfu: {'{namespace="a", pod="r-l0-0", rank="0"}': 0.1, '{namespace="a", pod="r-l0-0", rank="1"}': 0.2},
        joined: {
            f'{{gpu="{4 + rank}", UUID="GPU-{gpu}", device="nvidia{4 + rank}", Hostname="n", pod="dcgm", rank="{rank}", rank_pod="r-l0-{rank}"}}': 0.5 + rank / 10
            for rank, gpu in ((0, "x"), (1, "y"))
        },
        compared: {
            '{namespace="a", pod="r-l0-0", rank="0", UUID="GPU-x"}': 0.1,
            '{namespace="a", pod="r-l0-0", rank="1", UUID="GPU-y"}': 0.2,
        },
    }  # fmt: skip
    tests = [
        {
            "expr": query,
            "eval_time": "8m",
            "exp_samples": [{"labels": one, "value": value} for one, value in found.items()],
        }
        for query, found in expected.items()
    ]
    played = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": tests,
    }
    file = tmp_path / "join.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [played]}), encoding="utf-8")
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
