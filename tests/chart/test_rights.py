"""The chart gives the operator the rights that it says it needs, where it needs them, and none more."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from chart.helm import CHART, NAMESPACE, RELEASE, Helm, Manifest
from chart.tables import EVERYTHING, TABLE, WITHIN_NAMESPACES
from medha_operator.operator_settings import OperatorSettings, RouterSite
from medha_operator.rbac_rules import cluster_rules, gang_rules, lease_rules, namespaced_rules, router_rules

ACCOUNT = {"kind": "ServiceAccount", "name": "medha-operator", "namespace": NAMESPACE}
LEASE = OperatorSettings(lease_name="medha-operator", lease_namespace=NAMESPACE)
EVERYWHERE = "*"

Granted = set[tuple[str, str, str, str, str]]
"""(namespace or `*`, API group, resource, verb, name or `*`)."""


def flat(namespace: str, rules: list[dict[str, list[str]]]) -> Granted:
    return {
        (namespace, group, resource, verb, name)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", ["*"])
    }


def granted(manifests: list[Manifest]) -> Granted:
    """Everything that bindings give the operator's account."""
    roles = {
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]): each["rules"]
        for each in manifests
        if each["kind"] in ("Role", "ClusterRole")
    }
    found: Granted = set()
    for binding in manifests:
        if binding["kind"] in ("RoleBinding", "ClusterRoleBinding"):
            assert binding["subjects"] == [ACCOUNT]
            namespace = binding["metadata"].get("namespace")
            kind, name = binding["roleRef"]["kind"], binding["roleRef"]["name"]
            rules = roles[kind, namespace if kind == "Role" else None, name]
            found |= flat(namespace or EVERYWHERE, rules)
    return found


@pytest.mark.parametrize(
    ("values", "served", "routers"),
    [
        ({}, [NAMESPACE], [RouterSite(name="medha-router", namespace=NAMESPACE)]),
        (TABLE["every namespace"], [EVERYWHERE], [RouterSite(name="medha-router", namespace=NAMESPACE)]),
        (
            TABLE["two namespaces"],
            ["team-a", "team-b"],
            [RouterSite(name="medha-router", namespace=NAMESPACE)],
        ),
        (TABLE["operator alone"], [NAMESPACE], []),
        (
            EVERYTHING,
            [EVERYWHERE],
            [
                RouterSite(name="medha-router", namespace=NAMESPACE),
                RouterSite(name="other-router", namespace="elsewhere"),
            ],
        ),
    ],
    ids=["defaults", "everywhere", "two namespaces", "no router", "another router"],
)
def test_the_operator_gets_exactly_its_rights(
    helm: Helm, values: dict[str, Any], served: list[str], routers: list[RouterSite]
) -> None:
    expected = flat(EVERYWHERE, cluster_rules()) | flat(NAMESPACE, lease_rules(LEASE))
    for namespace in served:
        expected |= flat(namespace, namespaced_rules())
    for router in routers:
        expected |= flat(router.namespace, router_rules(router))
    assert granted(helm.render(**values)) == expected


@pytest.mark.parametrize("api", ["core", "volcano"])
def test_objects_of_gang_schedulers_may_be_made_where_they_are_named(helm: Helm, api: str) -> None:
    more = granted(helm.render(operator={"gangApis": [api]})) - granted(helm.render())
    settings = OperatorSettings.model_validate({"gang_apis": [api]})
    assert more == flat(NAMESPACE, gang_rules(settings)) != set()


def test_unless_it_is_asked_for_nothing_can_be_written_outside_of_the_named_namespaces(helm: Helm) -> None:
    for values, served in (({}, NAMESPACE), ({"operator": {"namespaces": ["team-a"]}}, "team-a")):
        found = granted(helm.render(**values))
        assert {place for place, *_ in found} == {NAMESPACE, served, EVERYWHERE}
        everywhere = {(resource, verb) for place, _, resource, verb, _ in found if place == EVERYWHERE}
        assert everywhere == {
            ("nodes", "list"),
            ("nodes", "watch"),
            ("pods", "list"),
            ("persistentvolumes", "get"),
        }


@pytest.mark.parametrize("name", ["defaults", "two namespaces", "everything"])
def test_no_right_is_a_wildcard_and_none_reads_secrets_at_large(helm: Helm, name: str) -> None:
    for namespace, group, resource, verb, only in granted(helm.render(**TABLE[name])):
        assert "*" not in (group, resource, verb)
        if resource == "secrets":
            assert verb == "create" or (verb == "get" and only != "*" and namespace != EVERYWHERE)
        assert resource not in ("pods/exec", "serviceaccounts", "roles", "clusterroles", "rolebindings")


def test_it_can_be_installed_without_any_right_in_the_cluster_as_a_whole(helm: Helm) -> None:
    manifests = helm.render(**WITHIN_NAMESPACES)
    assert all("namespace" in manifest["metadata"] for manifest in manifests)
    places = {namespace for namespace, *_ in granted(manifests)}
    assert places == {"team-a", NAMESPACE}
    lacking = granted(helm.render(operator={"namespaces": ["team-a"]})) - granted(manifests)
    assert lacking == flat(EVERYWHERE, cluster_rules())


def test_without_roles_of_ours_nothing_is_granted(helm: Helm) -> None:
    assert granted(helm.render(**TABLE["roles made elsewhere"])) == set()


def test_roles_for_somebody_else_to_apply_are_in_a_file_of_their_own(helm: Helm) -> None:
    values = ("--namespace", NAMESPACE, "--show-only", "templates/operator/rbac.yaml")
    shown = [each for each in yaml.safe_load_all(helm("template", RELEASE, str(CHART), *values)) if each]
    assert {each["kind"] for each in shown} == {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
    assert granted(shown) == granted(helm.render())


def test_the_router_has_no_rights(helm: Helm) -> None:
    assert granted(helm.render(operator={"enabled": False})) == set()
