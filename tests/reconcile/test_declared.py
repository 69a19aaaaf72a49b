"""The models that manifests name, as they are published to routers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from medha.api.declared import DeclaredModel, from_text
from medha_operator.declared import (
    Declarations,
    declaration,
    entry_name,
    models_key,
    models_of,
    publish_models,
)
from medha_operator.kube.client import Cluster
from medha_operator.kube.kinds import ROUTER, Key
from medha_operator.kube.store import Document
from medha_operator.operator_settings import OperatorSettings, RouterSite
from medha_operator.replica.actions import RecordEvent
from reconcile.fake_cluster import GRID, FakeCluster, Stage, resource

SITE = RouterSite(name="front", namespace="edge")
SETTINGS = OperatorSettings(routers=(SITE,), resync_seconds=300.0)
MADE = 1893456000.0
"""Unix time in seconds at which the fake cluster creates everything."""
GROWN = MADE + 10_000.0
JOINS = GRID | {"routerRef": {"name": "front", "namespace": "edge"}}
MAP = models_key(SITE)


def declared(*documents: Document, now: float = GROWN) -> tuple[DeclaredModel, ...]:
    """Return what the router is told about resources with these documents."""
    cluster = FakeCluster()
    found = [declaration(cluster.put(document)) for document in documents]
    return models_of(SITE, [one for one in found if one is not None], now)[0]


def replica(name: str = "r", **spec: Any) -> Document:
    return resource("MedhaReplica", JOINS | spec, name)


def deployment(replicas: int, **spec: Any) -> Document:
    return resource("MedhaDeployment", {"replicas": replicas, "template": {"spec": JOINS | spec}}, "d")


def model(name: str, replicas: int, *classes: str) -> DeclaredModel:
    return DeclaredModel(name=name, service_classes=classes or ("default",), replicas=replicas)


def test_a_router_learns_of_the_replicas_and_deployments_that_name_it_in_any_namespace() -> None:
    here = replica("here")
    there = resource("MedhaReplica", GRID | {"routerRef": {"name": "front"}}, "there")
    there["metadata"]["namespace"] = "edge"
    elsewhere = replica("elsewhere", routerRef={"name": "front", "namespace": "other"})
    alone = resource("MedhaReplica", GRID, "alone")
    assert declared(here, there, elsewhere, alone) == (model("m", 2),)
    assert declared(deployment(3), here) == (model("m", 4),)


def test_service_classes_are_named_in_their_order_and_models_by_name() -> None:
    classes = [{"name": "chat"}, {"name": "batch", "ttftFactor": 9}]
    other = {"name": "a", "source": {"path": "x"}}
    found = declared(replica("r", serviceClasses=classes), replica("s", model=other))
    assert found == (model("a", 1), model("m", 1, "chat", "batch"))


def test_aliases_are_published_with_their_model() -> None:
    named = {"name": "m", "source": {"path": "x"}, "aliases": ["m-latest"]}
    (found,) = declared(replica("r", model=named), replica("s"))
    assert (found.name, found.replicas, found.aliases) == ("m", 2, ("m-latest",))


def test_the_forms_of_calls_and_thoughts_are_published_and_auto_gives_way_to_what_a_manifest_names() -> None:
    named = {"name": "m", "source": {"path": "x"}, "toolCallFormat": "hermes", "reasoningFormat": "none"}
    (found,) = declared(replica("r"), replica("s", model=named))
    assert (found.replicas, found.tool_call_format, found.reasoning_format) == (2, "hermes", "none")
    (unnamed,) = declared(replica("r"))
    assert (unnamed.tool_call_format, unnamed.reasoning_format) == ("auto", "auto")


def test_replicas_of_a_deployment_count_with_it_and_suspended_ones_not_at_all() -> None:
    child = replica("d-0")
    child["metadata"]["ownerReferences"] = [
        {"kind": "MedhaDeployment", "name": "d", "uid": "u", "controller": True}
    ]
    assert declared(deployment(1), child) == (model("m", 1),)
    assert declared(child) == (model("m", 0),)
    assert declared(replica("r", suspend=True)) == (model("m", 0),)
    assert declared(deployment(2, suspend=True)) == (model("m", 0),)
    assert declared(deployment(0)) == (model("m", 0),)


def test_what_is_being_deleted_is_not_declared_and_a_spec_that_is_refused_is() -> None:
    going = replica()
    going["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    assert declared(going) == ()
    assert declared(replica(scheduling={"policy": "nonsense"})) == (model("m", 1),)
    assert declared(replica(model={"source": {}})) == ()


def test_a_replica_is_waited_for_from_when_its_first_start_should_be_over() -> None:
    document = FakeCluster().put(replica(lifecycle={"readySeconds": 100}))
    one = declaration(document)
    assert one is not None
    assert models_of(SITE, [one], MADE + 40) == ((model("m", 0),), 60.0)
    assert models_of(SITE, [one], MADE + 100) == ((model("m", 1),), None)


class Router:
    """A router's ConfigMap in a fake cluster, kept up to date by an operator."""

    def __init__(self, *resources: Document) -> None:
        self.cluster = FakeCluster()
        self.stage = Stage(self.cluster, SETTINGS)
        self.notice: list[RecordEvent] = []
        for document in resources:
            self.stage.see(document)

    def install(self) -> None:
        self.cluster.put(
            {"kind": ROUTER.name, "metadata": {"name": "front", "namespace": "edge"}, "spec": {}}
        )

    def reconcile(self, settings: OperatorSettings = SETTINGS) -> tuple[bool, float]:
        async def record_event(_: Document, notice: RecordEvent) -> None:
            self.notice.append(notice)

        found = publish_models(
            cast(Cluster, self.cluster), self.stage.index, SITE, settings, GROWN, record_event
        )
        return asyncio.run(found)

    def entries(self) -> dict[str, tuple[DeclaredModel, ...]]:
        data = self.cluster.objects[MAP]["data"]
        return {name: from_text(text, name) for name, text in data.items()}


def test_the_config_map_comes_with_its_router_and_belongs_to_it() -> None:
    router = Router(replica())
    assert router.reconcile() == (False, 2.0)
    assert MAP not in router.cluster.objects
    router.install()
    assert router.reconcile() == (True, 300.0)
    assert router.entries() == {entry_name(SETTINGS): (model("m", 1),)}
    (owner,) = router.cluster.objects[MAP]["metadata"]["ownerReferences"]
    there = router.cluster.objects[ROUTER.name, "edge", "front"]["metadata"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Deployment", "front", there["uid"])


def test_nothing_is_written_while_nothing_changes_and_a_change_by_hand_is_put_right() -> None:
    router = Router(replica())
    router.install()
    router.reconcile()
    before = list(router.cluster.calls)
    assert router.reconcile() == (False, 300.0)
    assert {verb for verb, _ in router.cluster.calls[len(before) :]} == {"get"}
    router.cluster.objects[MAP]["data"][entry_name(SETTINGS)] = "{}"
    assert router.reconcile()[0] is True
    assert router.entries() == {entry_name(SETTINGS): (model("m", 1),)}


def test_a_router_that_no_resource_names_gets_none_and_an_entry_goes_with_the_last_one() -> None:
    router = Router()
    router.install()
    assert router.reconcile() == (False, 300.0)
    assert MAP not in router.cluster.objects
    router.stage.see(replica())
    router.reconcile()
    router.stage.lose("MedhaReplica")
    assert router.reconcile()[0] is True
    assert router.entries() == {}


def test_two_installations_keep_to_their_own_entries() -> None:
    router, other = Router(replica()), SETTINGS.model_copy(update={"lease_namespace": "second"})
    router.install()
    assert router.reconcile()[0] is True
    assert router.reconcile(other)[0] is True
    assert router.reconcile()[0] is False
    assert router.reconcile(other)[0] is False
    assert router.entries().keys() == {entry_name(SETTINGS), entry_name(other)}


def test_somebody_elses_config_map_is_left_alone_and_reported() -> None:
    router = Router(replica())
    router.install()
    metadata = {"name": MAP.name, "namespace": "edge"}
    theirs = router.cluster.put({"kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}})
    assert router.reconcile() == (False, 300.0)
    assert router.cluster.objects[MAP] == theirs
    (notice,) = router.notice
    assert (notice.reason, notice.is_warning) == ("NameConflict", True)


def test_an_alias_that_is_another_models_name_is_reported_at_the_router() -> None:
    other = {"name": "other", "source": {"path": "x"}, "aliases": ["m"]}
    router = Router(replica(), replica("s", model=other))
    router.install()
    router.reconcile()
    (notice,) = router.notice
    assert (notice.reason, notice.is_warning) == ("AliasConflict", True)
    assert "model 'other' has the alias 'm', which is the name of a model" in notice.message


def test_that_of_an_earlier_router_of_the_name_is_waited_for() -> None:
    router = Router(replica())
    router.install()
    router.reconcile()
    del router.cluster.objects[ROUTER.name, "edge", "front"]
    router.install()
    kept = router.cluster.objects[MAP]
    assert router.reconcile() == (False, 2.0)
    assert router.cluster.objects[MAP] == kept
    del router.cluster.objects[MAP]  # by the garbage collector
    assert router.reconcile() == (True, 300.0)


def test_a_change_of_what_a_resource_declares_asks_for_a_reconcile_and_no_other_change_does() -> None:
    async def run() -> None:
        stage = Stage(FakeCluster(), SETTINGS)
        declarations = Declarations(stage.index, SETTINGS)
        key = stage.see(replica())
        assert declarations.changed(key) == [MAP]
        assert declarations.changed(key) == []
        stage.see(replica(scheduling={"policy": "edf"}))
        assert declarations.changed(key) == []
        stage.see(replica(suspend=True))
        assert declarations.changed(key) == [MAP]
        stage.see(replica(routerRef={"name": "unlisted"}))
        assert declarations.changed(key) == [MAP]
        stage.lose("MedhaReplica")
        assert declarations.changed(key) == []
        assert declarations.changed(Key("ConfigMap", "edge", "front-models")) == []
        stage.queue.close()

    asyncio.run(run())
