"""A router that has started gets requests once its replicas have joined it, and in any case after a while."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from medha.api.declared import DeclaredModel
from medha.routing.joining import UNDECLARED_SECONDS, awaited, may_accept
from medha.wire.messages import Announce

TWO, ONE, NONE = (
    DeclaredModel(name=name, replicas=count) for name, count in (("two", 2), ("one", 1), ("none", 0))
)


def cards(models: Iterable[str]) -> list[Announce]:
    return [
        Announce(
            replica=str(number), model=model, digest="d", epoch=0, ready=False, draining=False, max_model_len=8,
            vocab_size=8, kv_tokens_total=8, kv_tokens_free=8, running=0, waiting=0, pending_prefill_seconds=0.0,
            longest_request_tokens=8, waiting_limit=1,
        )
        for number, model in enumerate(models)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("joined", "missing"),
    [
        ([], {"two": 2, "one": 1}),
        (["two", "one"], {"two": 1}),
        (["one", "one", "one"], {"two": 2}),
        (["two", "one", "two", "unknown"], {}),
    ],
)
def test_every_declared_replica_is_awaited_and_no_longer_than_the_limit(
    joined: list[str], missing: dict[str, int]
) -> None:
    declared, found = (TWO, ONE, NONE), cards(joined)
    assert awaited(declared, found) == missing
    assert may_accept(declared, found, 59.9, 60.0) is (not missing)
    assert may_accept(declared, found, 60.0, 60.0)


@pytest.mark.parametrize("declared", [(), (NONE,)])
def test_if_no_replica_is_declared_any_will_do_and_soon_none(declared: tuple[DeclaredModel, ...]) -> None:
    assert not may_accept(declared, [], 0.1, 60.0)
    assert may_accept(declared, cards(["x"]), 0.1, 60.0)
    assert may_accept(declared, [], UNDECLARED_SECONDS, 60.0)
    assert may_accept(declared, [], 1.0, 1.0)
