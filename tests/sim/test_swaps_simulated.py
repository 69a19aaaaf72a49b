"""A simulated replica swaps with the controller's own code, and chats beside a long request are on time for it."""

from __future__ import annotations

from benchmark import benchmark


def test_more_chats_are_on_time_with_swaps_and_no_fewer_long_requests() -> None:
    swaps = benchmark("swaps")
    without, tier = (swaps.simulate(variant, 0, 100.0) for variant in ("no swaps", "swaps"))
    assert without.swaps == 0
    assert tier.swaps > 0
    assert tier.swapped_in_gib > 0
    assert tier.chats_on_time_percent > without.chats_on_time_percent + 10
    assert tier.longs_on_time_percent == without.longs_on_time_percent == 100
