"""The announcement by which routers know a replica: what it serves, what it predicts, and its load."""

from __future__ import annotations

import numpy as np

from medha.api.replica import ServiceClass
from medha.scheduler.controller import Load, ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.wire.messages import Announce, ServiceClassTerms
from medha_process.part_settings import ControllerSettings
from medha_worker.checkpoints.read_bundle import Bundle
from medha_worker.controller.handover import Handover

PREFILL_POINTS = tuple(256 * 4**power for power in range(9))
"""Prompt lengths, in tokens, whose predicted prefill times are announced."""


def replica_card(
    settings: ControllerSettings,
    bundle: Bundle,
    core: ReplicaController,
    config: ReplicaConfig,
    load: Load,
    *,
    vocab_size: int,
    handover: Handover | None,
    drain_until: float | None,
    routers: int,
    now: float,
) -> Announce:
    """Return the announcement of a replica that serves.

    `drain_until` is the end of its drain, if that has begun, on the clock of `now`. `routers` is the number of routers
    that are connected.
    """
    longest = config.max_model_len  # as the last point, so that routers never extrapolate
    lengths = np.array([*(tokens for tokens in PREFILL_POINTS if tokens < longest), longest], np.int64)
    seconds = core.predictor.prefill_seconds_many(np.zeros_like(lengths), lengths)
    read_seconds, read_seconds_per_token = core.read_line
    drain_seconds = None
    if drain_until is not None and handover is not None:
        drain_seconds = max(drain_until - now, 0.0)
    return Announce(
        replica=settings.replica,
        model=settings.spec.model.name,
        digest=bundle.digest,
        epoch=core.epoch,
        ready=True,
        draining=core.draining,
        max_model_len=config.max_model_len,
        vocab_size=vocab_size,
        kv_tokens_total=config.pool_tokens,
        kv_tokens_free=load.kv_tokens_free,
        running=load.running,
        waiting=load.waiting,
        pending_prefill_seconds=load.pending_prefill_seconds,
        longest_request_tokens=min(config.max_model_len, config.longest_tokens),
        waiting_limit=config.scheduling.max_waiting,
        service_classes=tuple(
            _terms(entry, core.expected_output_tokens(entry.name))
            for entry in config.service_classes.values()
        ),
        prefill_points=tuple(zip(lengths.tolist(), seconds.tolist(), strict=True)),
        lanes=load.lanes,
        tokens_per_lane=config.tokens_per_lane if config.topology.kv > 1 else 0,
        order=core.policy_terms,
        work_ahead=core.work_ahead(now),
        reports_progress=True,
        follows_grammars=True,
        ends_texts=any(one < vocab_size for one in bundle.eos_token_ids),
        kv_dtype=settings.spec.kv_cache.dtype,
        hands_kv_over=handover is not None,
        kv_identity="" if handover is None else handover.identity,
        read_seconds=read_seconds,
        read_seconds_per_token=read_seconds_per_token,
        drain_seconds=drain_seconds,
        role=settings.spec.role,
        kv_tokens_wanted=load.kv_tokens_wanted,
        routers=routers,
    )


def _terms(service_class: ServiceClass, expected_output_tokens: int) -> ServiceClassTerms:
    return ServiceClassTerms(
        name=service_class.name,
        ttft_floor_seconds=service_class.ttft_floor_seconds,
        ttft_factor=service_class.ttft_factor,
        tpot_target_seconds=service_class.tpot_target_seconds,
        tpot_floor_seconds=service_class.tpot_floor_seconds,
        default_output_tokens=service_class.default_output_tokens,
        max_wait_seconds=service_class.max_wait_seconds,
        expected_output_tokens=expected_output_tokens,
    )
