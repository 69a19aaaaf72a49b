"""A recording is confirmed by a process that exports what was recorded, and by no other."""

from __future__ import annotations

import pytest

from situations.recording import Scrape, is_counter, record, recorded, situations


def page(scrape: Scrape) -> str:
    rows = (
        (name, ",".join(f'{label}="{text}"' for label, text in labels), value)
        for (name, labels), value in scrape.items()
    )
    return "".join(sorted(f"{name}{{{labels}}} {value:g}\n" for name, labels, value in rows))


@pytest.mark.parametrize("situation", sorted(situations()))
def test_what_was_recorded_confirms_itself(situation: str) -> None:
    record(situation, *map(page, recorded(situation)))


def test_a_process_that_counts_nothing_confirms_no_outage() -> None:
    before, after = recorded("lost")
    still = {one: before.get(one, 0.0) if is_counter(one) else value for one, value in after.items()}
    with pytest.raises(AssertionError, match="counters that rise or stand still"):
        record("lost", page(before), page(still))


def test_a_gauge_of_another_value_confirms_no_outage() -> None:
    before, after = recorded("lost")
    ready = {one: value + (one[0] == "medha_router_replicas") for one, value in after.items()}
    with pytest.raises(AssertionError, match="medha_router_replicas"):
        record("lost", page(before), page(ready))
