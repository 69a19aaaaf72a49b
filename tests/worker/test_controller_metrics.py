"""Metrics of a controller that are counted in its core, whose life is one epoch."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import StepProfile
from medha_worker.controller.controller_metrics import Observer

CONFIG = ReplicaConfig(
    topology=Topology(kv=2),
    scheduling=SchedulingSpec(),
    service_classes={"default": ServiceClass(name="default")},
    default_class="default",
    max_model_len=1000,
    block_size_tokens=16,
    kv_blocks=10,
    long_threshold_tokens=1000,
)


def new_core(epoch: int, queried_tokens: int) -> ReplicaController:
    core = ReplicaController(CONFIG, StepProfile(1e-3, 1e-6, 1e-9, 1e-5), epoch)
    core.pools.queried_tokens = queried_tokens
    return core


def test_a_count_goes_on_where_the_epoch_before_left_it() -> None:
    registry = CollectorRegistry()
    observer = Observer(registry)
    for core in (new_core(0, 100), new_core(0, 150), new_core(1, 0), new_core(1, 30)):
        observer.state(core)
    assert registry.get_sample_value("medha_prefix_cache_queried_tokens_total") == 180


def test_every_lane_has_its_blocks_by_state() -> None:
    registry = CollectorRegistry()
    Observer(registry).state(new_core(0, 0))
    for lane in ("0", "1"):
        free = registry.get_sample_value("medha_kv_blocks", {"lane": lane, "state": "free"})
        cached = registry.get_sample_value("medha_kv_blocks", {"lane": lane, "state": "cached"})
        assert (free, cached) == (10, 0)
