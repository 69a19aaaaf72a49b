"""Joins the reports of all ranks into the figures of their replica: the slowest rank, and one key of hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from medha.wire.messages import (
    DiskTierFigures,
    DraftCosts,
    HostTierFigures,
    RankReady,
    StepProfile,
    StoreFigures,
    StreamingFigures,
)

_Figures = TypeVar("_Figures", HostTierFigures, DiskTierFigures, StreamingFigures, DraftCosts)


def slowest_rank(ranks: Sequence[RankReady]) -> RankReady:
    """Return the report of the slowest rank, with the times that the last stage takes for the head, samples and drafts.

    The times of tiers and of guesses are the longest of all ranks. If stages differ in their share of layers with a window,
    the slowest rank is one of a stage with the smallest share, because its attention grows most with the context. `ranks` are
    without hash keys.
    """
    profiles = [ready.profile for ready in ranks]
    fewest = min(one.window_share for one in profiles)
    slowest = max(
        (ready for ready in ranks if ready.profile.window_share == fewest),
        key=lambda ready: chunk_seconds(ready.profile),
    )
    measured = replace(
        slowest.profile,
        head_seconds_per_row=max(one.head_seconds_per_row for one in profiles),
        mask_seconds_per_row=max(one.mask_seconds_per_row for one in profiles),
    )
    return replace(
        slowest,
        profile=measured,
        draft_costs=_slowest([ready.draft_costs for ready in ranks if ready.draft_costs is not None]),
        host_tier=_slowest([ready.host_tier for ready in ranks if ready.host_tier is not None]),
        disk_tier=_slowest([ready.disk_tier for ready in ranks if ready.disk_tier is not None]),
        streaming=_slowest([ready.streaming for ready in ranks if ready.streaming is not None]),
    )


def _slowest(figures: Sequence[_Figures]) -> _Figures | None:
    """Return the fewest blocks, and the largest of all other figures; None if there are none."""
    if not figures:
        return None
    worst: dict[str, Any] = {}
    for field in fields(figures[0]):
        of_all = [getattr(one, field.name) for one in figures]
        worst[field.name] = min(of_all) if field.name == "blocks" else max(of_all)
    return replace(figures[0], **worst)


def without_hash_keys(ranks: Sequence[RankReady]) -> tuple[list[RankReady], str]:
    """Return the reports without the secret keys of hashes, and the key to use: the store's, else that of the ranks' files.

    If a rank has no store, the reports have none either. If ranks found different keys there, all reports name that fault.
    """
    in_files = [ready.disk_tier.hash_key for ready in ranks if ready.disk_tier is not None]
    stores = [ready.store for ready in ranks if ready.store is not None]
    in_store = {store.hash_key for store in stores if not store.fault}
    fault = next((store.fault for store in stores if store.fault), "")
    if not fault and len(in_store) > 1:
        fault = "ranks have found different keys of hashes in the store"
    without = [
        replace(
            ready,
            disk_tier=None if ready.disk_tier is None else replace(ready.disk_tier, hash_key=""),
            store=StoreFigures(fault=fault) if len(stores) == len(ranks) else None,
        )
        for ready in ranks
    ]
    keys = [*in_files, ""] if fault or len(stores) < len(ranks) else [*in_store, *in_files, ""]
    return without, next((key for key in keys if key), "")


def chunk_seconds(profile: StepProfile) -> float:
    """Return the time of a chunk of 512 tokens after 512 tokens of context.

    The slowest rank is the one with the longest time. Ranks of other stages wait for it.
    """
    pairs = 512 * (512 + 513 / 2)
    linear, attention = profile.linear_seconds_per_token, profile.attention_seconds_per_pair
    return profile.step_seconds + profile.sequence_seconds + 512 * linear + pairs * attention
