"""Alerts come when they should and not otherwise, given what processes have really exported in each situation."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart.helm import NAMESPACE, Helm, alert_names, rules
from situations.recording import ASKED, Spell, played, situations

Labels = dict[str, str]
Process = tuple[Labels, list[Spell]]


def router(*spells: Spell, pod: str = "medha-router-a") -> Process:
    return {"namespace": NAMESPACE, "pod": pod}, list(spells)


def operator(*spells: Spell, pod: str = "medha-operator-a", namespace: str = NAMESPACE) -> Process:
    return {"namespace": namespace, "pod": pod}, list(spells)


def controller(*spells: Spell) -> Process:
    return {"namespace": "team-a", "pod": "tiny-l0-0"}, list(spells)


def crashing(minutes: int) -> list[Spell]:
    """Pods that crash again and again, once the kubelet waits for five minutes between two tries."""
    return [Spell("operator-crash-waits", 5), Spell("operator-crash-runs", 1)] * (minutes // 6)


@dataclass(frozen=True)
class Case:
    """What is said of one alert at one minute of what was played."""

    alert: str
    processes: tuple[Process, ...]
    minute: int
    fires: tuple[Labels, ...] = ()


def burns(*windows: str) -> tuple[Labels, ...]:
    labels = {"namespace": NAMESPACE, "model": "tiny", "service_class": "interactive"}
    severity = {"1h": "critical", "6h": "critical", "1d": "warning", "3d": "warning"}
    return tuple(labels | {"window": window, "severity": severity[window]} for window in windows)


ALL_WINDOWS = burns("1h", "6h", "1d", "3d")
MODEL = {"namespace": NAMESPACE, "model": "tiny", "severity": "critical"}
CRASHING = {"kind": "MedhaReplica", "resource_namespace": "crashes", "resource": "r", "severity": "warning"}
REFUSED = CRASHING | {"resource_namespace": "alerts"}
PAGES, WARNS = {"severity": "critical"}, {"severity": "warning"}

OF_GPU = WARNS | {"namespace": "team-a", "pod": "tiny-l0-0", "rank": "3"}

CASES: dict[str, Case] = {
    "a GPU is too hot": Case(
        "MedhaGpuThrottled",
        (controller(Spell("gpu-well", 20), Spell("gpu-throttled", 20)),),
        35,
        (OF_GPU | {"reason": "hardware_thermal"},),
    ),
    "a GPU was too hot for five minutes": Case(
        "MedhaGpuThrottled",
        (controller(Spell("gpu-well", 20), Spell("gpu-throttled", 5), Spell("gpu-well", 15)),),
        30,
    ),
    "a GPU draws all the power that it may": Case(
        "MedhaGpuThrottled", (controller(Spell("gpu-at-its-power-limit", 60)),), 50
    ),
    "a GPU reports a defect": Case(
        "MedhaGpuFails", (controller(Spell("gpu-well", 20), Spell("gpu-device-error", 2)),), 21, (OF_GPU,)
    ),
    "a kernel makes a mistake": Case(
        "MedhaGpuFails", (controller(Spell("gpu-well", 20), Spell("gpu-program-error", 10)),), 25
    ),

    "nobody serves, and the router has begun anew": Case(
        "MedhaTtftBudgetBurns", (router(Spell("unserved", 70)),), 65, ALL_WINDOWS
    ),
    "the last replica is lost": Case(
        "MedhaTtftBudgetBurns", (router(Spell("served", 60), Spell("lost", 60)),), 119, ALL_WINDOWS
    ),
    "too many wait": Case("MedhaTtftBudgetBurns", (router(Spell("overloaded", 70)),), 65, ALL_WINDOWS),
    "all are late": Case("MedhaTtftBudgetBurns", (router(Spell("late", 70)),), 65, ALL_WINDOWS),
    "all are in time": Case("MedhaTtftBudgetBurns", (router(Spell("served", 100)),), 95),
    "clients ask for what is not there": Case("MedhaTtftBudgetBurns", (router(Spell("wrong-names", 70)),), 65),
    "three in a hundred are late": Case(
        "MedhaTtftBudgetBurns",
        (router(Spell("served", 100, 9.7)), router(Spell("late", 100, 0.3), pod="medha-router-b")),
        95,
    ),
    "one in ten is late": Case(
        "MedhaTtftBudgetBurns",
        (router(Spell("served", 100, 9)), router(Spell("late", 100, 1), pod="medha-router-b")),
        95,
        burns("3d"),
    ),
    "too few requests to say": Case(
        "MedhaTtftBudgetBurns", (router(Spell("late", 11, 0.1), Spell("late", 60, 0)),), 65
    ),
    # Over 6 h and longer it is still most of them, and the short windows of those hold some.
    "late once, in time now": Case(
        "MedhaTtftBudgetBurns", (router(Spell("late", 60), Spell("served", 60)),), 110, burns("1d", "3d")
    ),
    "all output is late": Case("MedhaTpotBudgetBurns", (router(Spell("late", 70)),), 65, ALL_WINDOWS),
    "all output is in time": Case("MedhaTpotBudgetBurns", (router(Spell("served", 70)),), 65),
    "nobody serves for six minutes": Case(
        "MedhaNoReplicaServes", (router(Spell("served", 10), Spell("lost", 10)),), 16, (MODEL,)
    ),
    "nobody serves for four minutes": Case(
        "MedhaNoReplicaServes", (router(Spell("served", 10), Spell("lost", 10)),), 14
    ),
    "nobody serves, and the router ends in between": Case(
        "MedhaNoReplicaServes",
        (
            router(Spell("lost", 3), Spell(None, 7)),
            router(Spell(None, 4), Spell("unserved", 6), pod="medha-router-b"),
        ),
        9,
        (MODEL,),
    ),
    "no replica joins one router of two": Case(
        "MedhaNoReplicaServes",
        (router(Spell("served", 20)), router(Spell("unserved", 20), pod="medha-router-b")),
        19,
        (MODEL,),
    ),
    "a router is added, and replicas join it after four minutes": Case(
        "MedhaNoReplicaServes",
        (
            router(Spell("served", 30)),
            router(Spell(None, 10), Spell("unserved", 4), Spell("served", 16), pod="medha-router-b"),
        ),
        16,
    ),
    "its replicas are suspended": Case("MedhaNoReplicaServes", (router(Spell("suspended", 20)),), 19),
    "there never was a router": Case("MedhaNoRouter", (), 6, (PAGES | {"namespace": NAMESPACE},)),
    "the router is gone": Case(
        "MedhaNoRouter", (router(Spell("served", 10), Spell(None, 10)),), 16, (PAGES | {"namespace": NAMESPACE},)
    ),
    "the router crashes again and again": Case(
        "MedhaNoRouter",
        (router(*[Spell("unserved", 2), Spell(None, 3)] * 10),),
        49,
        (PAGES | {"namespace": NAMESPACE},),
    ),
    "the router was installed a moment ago": Case("MedhaNoRouter", (router(Spell("unserved", 20)),), 5),
    "the router comes up a minute after the rules": Case(
        "MedhaNoRouter", (router(Spell(None, 1), Spell("unserved", 20)),), 6
    ),
    "the router was away for four minutes": Case(
        "MedhaNoRouter", (router(Spell("served", 20), Spell(None, 4), Spell("served", 20)),), 30
    ),
    "the router is replaced": Case(
        "MedhaNoRouter",
        (
            router(Spell("served", 20), Spell(None, 20)),
            router(Spell(None, 21), Spell("served", 19), pod="medha-router-b"),
        ),
        30,
    ),
    "the router is there and serves nobody": Case("MedhaNoRouter", (router(Spell("unserved", 20)),), 19),
    "all requests are refused": Case("MedhaRequestsFail", (router(Spell("lost", 20)),), 16, (MODEL,)),
    "they are since the router began": Case("MedhaRequestsFail", (router(Spell("unserved", 20)),), 16, (MODEL,)),
    "they find the queue full": Case("MedhaRequestsFail", (router(Spell("overloaded", 20)),), 16, (MODEL,)),
    "they name what is not there": Case("MedhaRequestsFail", (router(Spell("wrong-names", 20)),), 16),
    "they are served": Case("MedhaRequestsFail", (router(Spell("served", 20)),), 16),
    "strangers knock": Case(
        "MedhaConnectionsRefused",
        (router(Spell("strangers", 40)),),
        35,
        (WARNS | {"namespace": NAMESPACE, "link": "control"},),
    ),
    "nobody knocks": Case("MedhaConnectionsRefused", (router(Spell("served", 40)),), 35),
    "steps are slow": Case(
        "MedhaPredictionsOff",
        (controller(Spell("steps-too-slow", 70)),),
        65,
        (WARNS | {"namespace": "team-a", "pod": "tiny-l0-0"},),
    ),
    "steps are as predicted": Case(
        "MedhaPredictionsOff", (controller(Spell("steps-as-predicted", 70)),), 65
    ),
    "no operator is there": Case("MedhaOperatorDoesNotLead", (), 6, (WARNS | {"namespace": NAMESPACE},)),
    "the only one does not lead": Case(
        "MedhaOperatorDoesNotLead",
        (operator(Spell("operator-follows", 10)),),
        6,
        (WARNS | {"namespace": NAMESPACE},),
    ),
    "only that of another installation leads": Case(
        "MedhaOperatorDoesNotLead",
        (operator(Spell("operator-follows", 10)), operator(Spell("operator-serving", 10), namespace="team-b")),
        6,
        (WARNS | {"namespace": NAMESPACE},),
    ),
    "one leads": Case("MedhaOperatorDoesNotLead", (operator(Spell("operator-serving", 10)),), 6),
    "looks fail": Case(
        "MedhaReconcileFails",
        (operator(Spell("operator-refused", 40)),),
        35,
        (WARNS | {"namespace": NAMESPACE, "kind": "MedhaReplica"},),
    ),
    "looks succeed": Case("MedhaReconcileFails", (operator(Spell("operator-serving", 40)),), 35),
    "pods crash again and again": Case("MedhaStalled", (operator(*crashing(30)),), 20, (CRASHING,)),
    "pods have crashed for some minutes": Case(
        "MedhaStalled", (operator(Spell("operator-crash-waits", 3), Spell("operator-crash-runs", 30)),), 20
    ),
    "it stalls nowhere": Case("MedhaStalled", (operator(Spell("operator-refused", 30)),), 20),
    "a write is refused": Case("MedhaNotCarriedOut", (operator(Spell("operator-refused", 20)),), 16, (REFUSED,)),
    "it was refused a moment ago": Case("MedhaNotCarriedOut", (operator(Spell("operator-refused", 20)),), 14),
    "pods crash, and nothing is refused": Case("MedhaNotCarriedOut", (operator(*crashing(60)),), 50),
    "pods crash for half an hour": Case("MedhaNotReady", (operator(*crashing(60)),), 31, (CRASHING,)),
    "pods crash while the operator is replaced": Case(
        "MedhaNotReady",
        (
            operator(Spell("operator-crash-waits", 20), Spell(None, 20)),
            operator(Spell(None, 21), Spell("operator-crash-waits", 19), pod="medha-operator-b"),
        ),
        32,
        (CRASHING,),
    ),
    "pods crash for less": Case("MedhaNotReady", (operator(*crashing(60)),), 29),
    "a replica is suspended": Case("MedhaNotReady", (operator(Spell("operator-suspended", 60)),), 50),
    "a replica is ready": Case("MedhaNotReady", (operator(Spell("operator-serving", 60)),), 50),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_when_it_should_and_not_otherwise(
    helm: Helm, promtool: str, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    fire_as_expected(helm, promtool, tmp_path, case.processes, case.minute, {case.alert: case.fires})


def test_every_alert_is_seen_to_fire_and_to_be_silent(helm: Helm) -> None:
    alerts = alert_names(helm)
    assert {case.alert for case in CASES.values() if case.fires} == alerts
    assert {case.alert for case in CASES.values() if not case.fires} == alerts


def test_all_is_silent_while_all_is_well(helm: Helm, promtool: str, tmp_path: Path) -> None:
    well = (
        router(Spell("served", 100)),
        controller(Spell("steps-as-predicted", 100)),
        controller(Spell("gpu-well", 100)),
        operator(Spell("operator-serving", 100)),
    )
    fire_as_expected(helm, promtool, tmp_path, well, 95, dict.fromkeys(alert_names(helm), ()))


def test_an_outage_wakes_somebody_within_minutes(helm: Helm, promtool: str, tmp_path: Path) -> None:
    """All pods of the only replica crash again and again, and clients go on asking."""
    outage = (
        router(Spell("served", 60), Spell("lost", 30)),
        operator(Spell("operator-serving", 60), *crashing(30)),
    )
    paged: dict[str, tuple[Labels, ...]] = {"MedhaNoReplicaServes": (MODEL,), "MedhaRequestsFail": (MODEL,)}
    fire_as_expected(helm, promtool, tmp_path, outage, 66, paged)


def test_what_alerts_ask_for_is_what_is_recorded(helm: Helm) -> None:
    every = [rule for group in rules(helm)["groups"] for rule in group["rules"]]
    queries = re.sub(r"\b\w+:medha_\w+:\w+", "recorded", " ".join(rule["expr"] for rule in every))
    assert set(re.findall(r"\bmedha_\w+", queries)) == set(ASKED)
    used = {spell.situation for case in CASES.values() for _, spells in case.processes for spell in spells}
    assert used - {None} == situations()


def fire_as_expected(
    helm: Helm,
    promtool: str,
    folder: Path,
    processes: tuple[Process, ...],
    minute: int,
    expected: dict[str, tuple[Labels, ...]],
) -> None:
    """Whether each alert fires at that minute with the expected labels, and with no others."""
    spec = rules(helm)
    for group in spec["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)  # whose numbers are not what is tested here
    test: dict[str, Any] = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [one for labels, spells in processes for one in played(labels, spells)],
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
