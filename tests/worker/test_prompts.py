"""Prompts wait for their requests and requests for their prompts; nothing stays behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from medha.messages import Submit, Tokens
from medha.prefix import PrefixHasher
from medha_worker.prompts import PromptStore

IDS = np.arange(10, dtype=np.int32)


def submit(name: str, tokens: int = 10, prompt: str = "p") -> Submit:
    return Submit(id=name, prompt=prompt, tokens=tokens, prompt_length=tokens, seed=0)


def test_a_request_that_comes_after_its_ids_need_not_wait() -> None:
    store = PromptStore(longest_tokens=100)
    assert store.receive(Tokens("p", 0, 10), IDS[:6]) == []
    assert store.receive(Tokens("p", 6, 10), IDS[6:]) == []
    assert not store.hold(submit("a"))
    ids = store.take_unsent("p")
    assert ids is not None
    assert ids.tolist() == IDS.tolist()
    assert store.take_unsent("p") is None


def test_a_request_that_comes_before_its_ids_waits_for_the_last_of_them() -> None:
    store = PromptStore(longest_tokens=100)
    assert store.hold(submit("a"))
    assert store.receive(Tokens("p", 0, 10, sequences=2), IDS[:6]) == []
    assert store.hold(submit("b"))
    assert [held.id for held in store.receive(Tokens("p", 6, 10, sequences=2), IDS[6:])] == ["a", "b"]
    store.forgotten("p")
    assert len(store) == 0


def test_a_prompt_is_kept_for_the_requests_still_to_come() -> None:
    store = PromptStore(longest_tokens=100)
    store.receive(Tokens("p", 0, 10, sequences=2), IDS)
    assert not store.hold(submit("a"))
    assert store.take_unsent("p") is not None
    store.forgotten("p")  # a has ended before b came
    assert len(store) == 1
    assert not store.hold(submit("b"))
    assert store.take_unsent("p") is not None, "the ranks have forgotten it: it must be sent again"
    store.forgotten("p")
    assert len(store) == 0


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    store = PromptStore(longest_tokens=100)
    store.hold(submit("a"))
    store.receive(Tokens("p", 0, 10), IDS[:6])
    store.withdraw("a")
    assert store.receive(Tokens("p", 6, 10), IDS[6:]) == []
    assert len(store) == 0


def test_pieces_out_of_order_and_prompts_too_long_are_dropped() -> None:
    store = PromptStore(longest_tokens=100)
    assert store.receive(Tokens("q", 0, 101), IDS) == []
    assert not store.hold(submit("a", tokens=101, prompt="q")), "the controller refuses it"
    assert len(store) == 0
    store.receive(Tokens("p", 3, 10), IDS[3:])
    store.receive(Tokens("p", 0, 10), IDS)
    store.receive(Tokens("p", 10, 10), IDS[:1])
    ids = store.take_unsent("p")
    assert ids is not None
    assert ids.tolist() == IDS.tolist()


# --- hashes -------------------------------------------------------------------------------------------


def test_a_request_is_handed_on_with_the_hashes_of_its_prompt_however_it_came() -> None:
    hasher = PrefixHasher(4, b"secret")
    store = PromptStore(longest_tokens=100, hasher=hasher)
    assert store.hold(replace(submit("early"), block_hashes="made up by a router"))
    assert store.receive(Tokens("p", 0, 10, sequences=2), IDS[:3]) == []
    [early] = store.receive(Tokens("p", 3, 10, sequences=2), IDS[3:])
    assert early == replace(submit("early"), block_hashes=hasher.hashes(IDS))
    assert not store.hold(submit("late"))
    assert store.hashed(submit("late")).block_hashes == hasher.hashes(IDS) != ""


def test_without_a_hasher_no_hashes_are_handed_on() -> None:
    store = PromptStore(longest_tokens=100)
    store.receive(Tokens("p", 0, 10), IDS)
    assert store.hashed(replace(submit("a"), block_hashes="made up by a router")) == submit("a")
