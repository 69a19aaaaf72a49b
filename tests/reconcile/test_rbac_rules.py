"""The operator asks for no right that no plan uses."""

from __future__ import annotations

from medha_operator.rbac_rules import cluster_rules, namespaced_rules


def test_only_what_a_plan_may_delete_can_be_deleted() -> None:
    deleted = {name for rule in namespaced_rules() if "delete" in rule["verbs"] for name in rule["resources"]}
    assert deleted == {"medhareplicas", "pods", "statefulsets", "controllerrevisions", "configmaps"}


def test_nodes_are_listed_and_watched_and_never_got_one_by_one() -> None:
    rules = [(rule["resources"], rule["verbs"]) for rule in cluster_rules()]
    assert rules == [(["nodes"], ["list", "watch"]), (["pods"], ["list"]), (["persistentvolumes"], ["get"])]
