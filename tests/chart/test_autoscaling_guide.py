"""docs/autoscaling.md: its values, queries and settings can be used as they are. `tests/cluster/test_autoscaling.py` does all of the second way."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from chart.catalogue import problems
from chart.helm import NAMESPACE, ROOT, Helm, Manifest, find, pods
from cluster.guide import blocks

PAGE = ROOT / "docs" / "autoscaling.md"
PREPARING, BY_KEDA, BY_HPA = (
    "Prepare deployment and Prometheus",
    "With KEDA",
    "With a HorizontalPodAutoscaler alone",
)


def made(helm: Helm, kind: str, heading: str) -> dict[str, Manifest]:
    """Name -> spec of the objects of a kind that the values below a heading make."""
    rendered = helm.render(**yaml.safe_load(blocks(PAGE, heading, "yaml")[-1]))
    return {one["metadata"]["name"]: one["spec"] for one in rendered if one["kind"] == kind}


def keda_query(helm: Helm) -> str:
    (trigger,) = made(helm, "ScaledObject", BY_KEDA)["chat"]["triggers"]
    return str(trigger["metadata"]["query"])


def test_the_values_make_an_autoscaler_for_each_deployment(helm: Helm) -> None:
    assert {
        name: (spec["minReplicaCount"], spec["maxReplicaCount"])
        for name, spec in made(helm, "ScaledObject", BY_KEDA).items()
    } == {"chat": (0, 8), "code": (2, 4)}
    assert {
        name: (spec["minReplicas"], spec["maxReplicas"])
        for name, spec in made(helm, "HorizontalPodAutoscaler", BY_HPA).items()
    } == {"chat": (0, 3)}


def test_every_query_of_the_page_is_keda_s_and_asks_for_what_is_exported(helm: Helm) -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = {block.strip() for block in re.findall(r"```text\n(sum.*?)```", text, re.DOTALL)}
    assert shown == {keda_query(helm)}
    assert problems(keda_query(helm)) == []


def test_the_adapter_serves_the_metric_that_the_autoscaler_asks_for(helm: Helm) -> None:
    adapter = yaml.safe_load(blocks(PAGE, BY_HPA, "yaml")[0])
    (rule,) = adapter["rules"]["external"]
    (metric,) = made(helm, "HorizontalPodAutoscaler", BY_HPA)["chat"]["metrics"]
    asked: dict[str, Any] = metric["external"]["metric"]
    assert rule["seriesQuery"] == asked["name"]
    matchers = ", ".join(f'{label}="{value}"' for label, value in asked["selector"]["matchLabels"].items())
    query = rule["metricsQuery"].replace("<<.Series>>", asked["name"]).replace("<<.LabelMatchers>>", matchers)
    assert sorted(re.findall(r'\w+="[^"]*"|\w+\(', query)) == sorted(
        re.findall(r'\w+="[^"]*"|\w+\(', keda_query(helm))
    )


def test_prometheus_can_read_its_settings(promtool: str, tmp_path: Path) -> None:
    (settings,) = blocks(PAGE, PREPARING, "yaml")
    file = tmp_path / "prometheus.yml"
    file.write_text(settings, encoding="utf-8")
    done = subprocess.run(
        [promtool, "check", "config", "--syntax-only", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_finds_the_routers_by_the_name_and_the_port_that_the_chart_gives_them(helm: Helm) -> None:
    (job,) = yaml.safe_load(blocks(PAGE, PREPARING, "yaml")[0])["scrape_configs"]
    ((name,),) = (one["names"] for one in job["dns_sd_configs"])
    service, namespace, _ = name.split(".")
    rendered = helm.render()
    found = find(rendered, "Service", service)
    assert (found["metadata"]["namespace"], found["spec"]["clusterIP"]) == (namespace, "None")
    (container,) = pods(rendered)["medha-router"]["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert [one["port"] for one in job["dns_sd_configs"]] == [ports["metrics"]]
    assert [one["replacement"] for one in job["relabel_configs"]] == [NAMESPACE]
