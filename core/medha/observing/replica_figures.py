"""Selects from a replica's announcement what the page `/ui` shows of it."""

from __future__ import annotations

from typing import Any

from medha.wire.messages import Announce


def replica_figures(card: Announce) -> dict[str, Any]:
    """Return as JSON the state and the load of a replica and of its lanes."""
    lanes = card.lanes
    return {
        "name": card.replica,
        "model": card.model,
        "epoch": card.epoch,
        "state": "draining" if card.draining else "ready" if card.ready else "starting",
        "running": card.running,
        "waiting": card.waiting,
        "pending": round(card.pending_prefill_seconds, 3),
        "kv_total": card.kv_tokens_total,
        "kv_free": card.kv_tokens_free,
        "lanes": [
            {
                "kv_total": card.kv_tokens_total // len(lanes),
                "kv_free": lane.kv_tokens_free,
                "pending": round(lane.pending_prefill_seconds, 3),
            }
            for lane in lanes
        ],
        "classes": [
            {"name": terms.name, "tpot": terms.tpot_target_seconds, "ttft": terms.ttft_floor_seconds}
            for terms in card.service_classes
        ],
    }
