"""Prompts wait for their requests and requests for their prompts; nothing stays behind."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from medha.errors import WireInvalid
from medha.kv.prefix_cache import PrefixHasher
from medha.wire.frames import TokenIds
from medha.wire.messages import Submit, Tokens
from medha_worker.controller.output_ids import OutputIds
from medha_worker.controller.prompts import PromptStore

IDS = np.arange(10, dtype=np.int32)


def submit(name: str, tokens: int = 10, prompt: str = "p") -> Submit:
    return Submit(id=name, prompt=prompt, tokens=tokens, prompt_length=tokens, seed=0)


def test_a_request_that_comes_after_its_ids_need_not_wait() -> None:
    store = PromptStore(longest_tokens=100, vocab_size=50)
    assert store.receive(Tokens("p", 0, 10), IDS[:6]) == []
    assert store.receive(Tokens("p", 6, 10), IDS[6:]) == []
    assert not store.hold(submit("a"))
    ids = store.take_unsent("p")
    assert ids is not None
    assert ids.tolist() == IDS.tolist()
    assert store.take_unsent("p") is None


def test_a_request_that_comes_before_its_ids_waits_for_the_last_of_them() -> None:
    store = PromptStore(longest_tokens=100, vocab_size=50)
    assert store.hold(submit("a"))
    assert store.receive(Tokens("p", 0, 10, sequences=2), IDS[:6]) == []
    assert store.hold(submit("b"))
    assert [held.id for held in store.receive(Tokens("p", 6, 10, sequences=2), IDS[6:])] == ["a", "b"]
    for name in ("a", "b"):
        store.pass_on(submit(name))
    store.forgotten("p")
    assert len(store) == 0


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_prompt_stays_if_the_first_request_that_waited_for_it_is_refused(sequences: int) -> None:
    store = PromptStore(longest_tokens=100, vocab_size=50)
    for name in ("a", "b"):
        store.hold(submit(name))
    first, second = store.receive(Tokens("p", 0, 10, sequences), IDS)
    store.pass_on(first)
    store.forgotten("p")  # the controller knows no request of it
    store.pass_on(second)
    assert store.take_unsent("p") is not None
    store.forgotten("p")
    assert len(store) == 0


def test_a_prompt_is_kept_for_the_requests_still_to_come() -> None:
    store = PromptStore(longest_tokens=100, vocab_size=50)
    store.receive(Tokens("p", 0, 10, sequences=2), IDS)
    assert not store.hold(submit("a"))
    assert store.take_unsent("p") is not None
    store.forgotten("p")  # `a` ended before `b` arrived
    assert len(store) == 1
    assert not store.hold(submit("b"))
    assert store.take_unsent("p") is not None, "the ranks have forgotten it: it must be sent again"
    store.forgotten("p")
    assert len(store) == 0


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    store = PromptStore(longest_tokens=100, vocab_size=50)
    store.hold(submit("a"))
    store.receive(Tokens("p", 0, 10), IDS[:6])
    store.withdraw("a")
    assert store.receive(Tokens("p", 6, 10), IDS[6:]) == []
    assert len(store) == 0


@pytest.mark.parametrize(
    ("piece", "ids", "message"),
    [
        (Tokens("q", 0, 101), IDS, "101 tokens"),
        (Tokens("q", 0, -1), IDS, "-1 tokens"),
        (Tokens("q", 0, 10, sequences=0), IDS, "0 requests"),
        (Tokens("q", 3, 10), IDS[3:], "expected some at 0"),  # its beginning went to an earlier process
        (Tokens("q", 0, 5), IDS, "10 ids at 0, expected some at 0 of 5"),
        (Tokens("q", 0, 10), IDS[:0], "0 ids"),
        (Tokens("q", 0, 10), IDS + 41, "not within 0 .. 49"),
        (Tokens("q", 0, 10), IDS - 1, "not within 0 .. 49"),
        (Tokens("p", 3, 10), IDS[3:], "expected some at 6"),
        (Tokens("p", 0, 10), IDS, "expected some at 6"),
        (Tokens("p", 6, 11), IDS[6:], "has 10 tokens, not 11"),
        (Tokens("p", 6, 10), IDS[5:], "expected some at 6"),
    ],
)
def test_a_piece_that_is_out_of_place_is_refused_and_leaves_nothing(
    piece: Tokens, ids: TokenIds, message: str
) -> None:
    store = PromptStore(longest_tokens=100, vocab_size=50)
    store.receive(Tokens("p", 0, 10), IDS[:6])
    with pytest.raises(WireInvalid, match=re.escape(message)):
        store.receive(piece, ids)
    assert len(store) == 1
    store.receive(Tokens("p", 6, 10), IDS[6:])
    sent = store.take_unsent("p")
    assert sent is not None
    assert sent.tolist() == IDS.tolist()


def test_a_request_that_contradicts_its_prompt_is_known_before_it_is_held() -> None:
    store = PromptStore(longest_tokens=100, vocab_size=50)
    assert store.contradicts(submit("a", tokens=7)) is None
    store.receive(Tokens("p", 0, 10, sequences=2), IDS[:6])
    assert "has 10 tokens, not 7" in str(store.contradicts(submit("a", tokens=7)))
    assert store.hold(submit("a"))
    assert "already here" in str(store.contradicts(submit("a")))


def test_nothing_is_left_of_a_router_that_has_gone() -> None:
    store = PromptStore(longest_tokens=100, vocab_size=50)
    store.receive(Tokens("half", 0, 10), IDS[:6])
    store.hold(submit("a", prompt="unheard"))
    store.receive(Tokens("waits", 0, 10, sequences=2), IDS)
    store.receive(Tokens("runs", 0, 10, sequences=2), IDS)
    assert store.take_unsent("runs") is not None
    store.abandon()
    assert len(store) == 1, "ranks have it, until the step that forgets it"
    store.forgotten("runs")
    assert len(store) == 0


def test_a_prompt_is_its_senders_alone_and_stays_when_another_router_goes() -> None:
    store = PromptStore(longest_tokens=100, vocab_size=50)
    store.receive(Tokens("p", 0, 10), IDS[:6], b"first")
    with pytest.raises(WireInvalid, match="belongs to another router"):
        store.receive(Tokens("p", 6, 10), IDS[6:], b"second")
    assert "belongs to another router" in str(store.contradicts(submit("a"), b"second"))
    assert store.contradicts(submit("a"), b"first") is None
    store.abandon(b"second")
    store.receive(Tokens("p", 6, 10), IDS[6:], b"first")
    assert not store.hold(submit("a"), b"first")


def test_a_request_that_is_too_long_is_left_to_the_controller_to_refuse() -> None:
    store = PromptStore(longest_tokens=100, vocab_size=50)
    assert not store.hold(submit("a", tokens=101, prompt="q"))
    assert len(store) == 0


# --- hashes -------------------------------------------------------------------------------------------


def test_a_request_is_handed_on_with_the_hashes_of_its_prompt_however_it_came() -> None:
    hasher = PrefixHasher(4, b"secret")
    store = PromptStore(longest_tokens=100, vocab_size=50, hasher=hasher)
    assert store.hold(replace(submit("early"), block_hashes="made up by a router"))
    assert store.receive(Tokens("p", 0, 10, sequences=2), IDS[:3]) == []
    [early] = store.receive(Tokens("p", 3, 10, sequences=2), IDS[3:])
    assert early == replace(submit("early"), block_hashes=hasher.hashes(IDS))
    assert not store.hold(submit("late"))
    assert store.hashed(submit("late")).block_hashes == hasher.hashes(IDS) != ""


@pytest.mark.parametrize("request_first", [True, False])
def test_a_prompt_is_hashed_under_the_salt_that_comes_with_its_first_ids(request_first: bool) -> None:
    hasher = PrefixHasher(4, b"secret")
    store = PromptStore(longest_tokens=100, vocab_size=50, hasher=hasher)
    if request_first:
        assert store.hold(submit("a"))
    store.receive(Tokens("p", 0, 10, cache_salt="mine"), IDS[:3])
    store.receive(Tokens("p", 3, 10), IDS[3:])
    assert store.hashed(submit("a")).block_hashes == hasher.hashes(IDS, "mine") != hasher.hashes(IDS)
    assert store.salt_of("p") == "mine"
    store.extend("p", "longer", IDS)
    assert store.salt_of("longer") == "mine"
    hash_ = store.hash_of("p")
    assert hash_ is not None
    answer = hash_.fork()  # the hash that an answer's blocks continue
    answer.update(IDS)
    assert (hasher.hashes(np.concatenate([IDS, IDS]), "mine")).endswith(answer.hashes)


def test_without_a_hasher_no_hashes_are_handed_on() -> None:
    store = PromptStore(longest_tokens=100, vocab_size=50)
    store.receive(Tokens("p", 0, 10), IDS)
    assert store.hashed(replace(submit("a"), block_hashes="made up by a router")) == submit("a")
    assert store.salt_of("p") is None, "it shares nothing under any salt"


def test_a_request_that_stepped_aside_comes_back_with_its_output_behind_its_prompt() -> None:
    """The prompt that it came with may be forgotten, and the new one has the hash of all its ids."""
    hasher = PrefixHasher(4, b"secret")
    store = PromptStore(longest_tokens=100, vocab_size=50, hasher=hasher)
    store.receive(Tokens("p", 0, 10), IDS)
    assert not store.hold(submit("a"))
    store.take_unsent("p")
    outputs = OutputIds()
    for ids in ([7], [8, 9]):
        outputs.add("a", ids)
    store.extend("p", "again", outputs.take("a"))
    assert len(outputs.take("a")) == len(outputs) == 0
    store.forgotten("p")
    prompt = store.hash_of("again")
    assert prompt is not None
    ids = store.take_unsent("again")
    assert ids is not None
    assert ids.tolist() == [*range(10), 7, 8, 9]
    continued = prompt.fork()
    continued.update(np.array([1, 2, 3], dtype=np.int32))
    whole = hasher.hashes(np.array([*range(10), 7, 8, 9, 1, 2, 3], dtype=np.int32))
    assert continued.hashes == whole[-len(continued.hashes) :]
    store.forgotten("again")
    assert len(store) == 0
