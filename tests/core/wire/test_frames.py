"""Every message crosses the wire unchanged, old frames stay readable, and garbage is refused in one way only."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.errors import DROP_REASONS, WireInvalid
from medha.wire.frames import (
    MAX_HEADER_BYTES,
    MAX_INTEGER,
    MAX_TOKENS_FRAME_BYTES,
    VERSION,
    decode,
    digest,
    encode,
    tokens_from_frame,
    tokens_to_frame,
)
from medha.wire.messages import (
    Emit,
    Message,
    Sampling,
    Step,
    StepEntry,
    SteppedAside,
    Submit,
    TokenLogprob,
    Tokens,
)

RECORDED = Path(__file__).parents[1] / "recorded" / "wire_v1.jsonl"
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}
WITH_PAYLOAD = ("Tokens", "BundlePart")

st.register_type_strategy(int, st.integers(-MAX_INTEGER, MAX_INTEGER))  # no peer sends others
st.register_type_strategy(float, st.floats().map(lambda number: number + 0.0))  # -0.0 is 0.0, the default
MESSAGES = st.one_of([st.from_type(kind) for kind in KINDS.values()])


def frame(**header: object) -> bytes:
    return json.dumps(header).encode()


@settings(max_examples=400)
@given(message=MESSAGES, payload=st.binary(max_size=5).map(lambda raw: raw * 4))
def test_every_message_comes_back_as_it_went(message: Message, payload: bytes) -> None:
    has_payload = type(message).__name__ in WITH_PAYLOAD
    frames = encode(message, payload if has_payload else None)
    received, received_payload = decode([bytes(part) for part in frames])
    assert repr(received) == repr(message)  # by repr, so that NaN equals NaN
    assert (received_payload is not None) == has_payload
    if received_payload is not None:
        assert bytes(received_payload) == payload


# --- frames of version 1, as they were recorded --------------------------------------------------------


def _read_recorded() -> list[tuple[bytes, dict[str, Any]]]:
    """(header frame, expected fields) per line; lines are only ever added to the file, never changed."""
    lines = RECORDED.read_text(encoding="utf-8").splitlines()
    return [(line["frame"].encode(), line["expected"]) for line in map(json.loads, lines)]


FRAMES = _read_recorded()
each_recorded_frame = pytest.mark.parametrize(
    ("header", "expected"),
    FRAMES,
    ids=[f"{line}-{json.loads(header)['type']}" for line, (header, _) in enumerate(FRAMES, start=1)],
)


def test_a_frame_of_every_message_type_is_recorded() -> None:
    assert {json.loads(header)["type"] for header, _ in FRAMES} == set(KINDS)


@each_recorded_frame
def test_a_recorded_frame_is_read_as_it_was_meant(header: bytes, expected: dict[str, Any]) -> None:
    kind = json.loads(header)["type"]
    message, _ = decode([header, b""] if kind in WITH_PAYLOAD else [header])
    assert type(message).__name__ == kind
    # What a frame leaves out has the default that it had then. Tuples become lists, keys strings.
    fields = json.loads(json.dumps(dataclasses.asdict(message)))
    _assert_contains(fields, expected)


@each_recorded_frame
def test_a_recorded_frame_with_fields_of_a_later_release_is_read(
    header: bytes, expected: dict[str, Any]
) -> None:
    kind = json.loads(header)["type"]
    newer = json.loads(header)
    _add_unknown_fields(newer)
    payload = [b""] if kind in WITH_PAYLOAD else []
    assert decode([json.dumps(newer).encode(), *payload])[0] == decode([header, *payload])[0]


def _assert_contains(found: Any, expected: Any) -> None:
    """Fields that were added since may be there; those that were recorded must be, with their values."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            _assert_contains(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_contains(one, other)
    else:
        assert found == expected


def _add_unknown_fields(value: Any) -> None:
    """In every object, except in the maps whose keys are data."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in list(children):
        _add_unknown_fields(child)
    if isinstance(value, dict) and not all(key.isdigit() for key in value):
        value["field_of_a_later_release"] = {"x": [1]}


def test_a_field_that_an_older_peer_does_not_send_gets_its_default() -> None:
    body = {"id": "a", "prompt": "p", "tokens": 3, "prompt_length": 3, "seed": 7}
    message, _ = decode([frame(v=1, type="Submit", body=body)])
    assert message == Submit("a", "p", 3, 3, 7)
    assert message.sampling == Sampling()  # type: ignore[union-attr]


@pytest.mark.parametrize("version", [VERSION, VERSION - 1])
def test_this_version_and_the_one_before_are_read(version: int) -> None:
    assert decode([frame(v=version, type="Cancel", body={"id": "a"})])[0].id == "a"  # type: ignore[union-attr]


@pytest.mark.parametrize("version", [VERSION + 1, VERSION - 2, None, "1", True, 1.0, [], {}, 10**30])
def test_any_other_version_is_refused_by_its_number(version: object) -> None:
    with pytest.raises(WireInvalid, match=r"version .* is not supported: expected 0 or 1"):
        decode([frame(v=version, type="Cancel", body={"id": "a"})])


# --- garbage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b" " * (MAX_HEADER_BYTES + 1)], "a header of 16777217 bytes"),
        ([frame(v=1, type="Tokens", body={"prompt": "p", "offset": 0, "total": 2}), b"12345"], "has 5 bytes"),
        (
            [
                frame(v=1, type="Tokens", body={"prompt": "p", "offset": 0, "total": 2}),
                bytes(MAX_TOKENS_FRAME_BYTES + 4),
            ],
            "a token frame of 4194308 bytes",
        ),
        ([], "an empty message"),
        ([b""], "not JSON"),
        ([b"\xff\xfe"], "not JSON"),
        ([b"[" * 100_000], "not JSON"),
        ([b'{"v":1,"type":"StageFree","body":{"step_id":' + b"9" * 5000 + b',"stage":1}}'], "not JSON"),
        ([b"[1]"], "header is a JSON list"),
        ([b"null"], "header is a JSON NoneType"),
        ([frame(v=1)], "unknown message type None"),
        ([frame(v=1, type=["Cancel"])], "unknown message type"),
        ([frame(v=1, type="Sampling", body={})], "unknown message type 'Sampling'"),
        ([frame(v=1, type="Cancel", body={"id": "a"}), b""], "Cancel has 2 frames, expected 1"),
        ([frame(v=1, type="Tokens", body={"prompt": "p", "offset": 0, "total": 1})], "1 frames, expected 2"),
        ([frame(v=1, type="Cancel")], "Cancel"),
        ([frame(v=1, type="Cancel", body={"id": 3})], "Cancel.id: Input should be a valid string"),
        ([frame(v=1, type="Refused", body={"id": "a", "reason": "mood"})], "Refused.reason"),
        ([frame(v=1, type="Done", body={"step_id": 1, "samples": [{"id": "a"}]})], r"Done.samples.0.token"),
        ([frame(v=1, type="StageFree", body={"step_id": 1.5, "stage": 0})], "StageFree.step_id"),
    ],
)
def test_garbage_is_refused_with_the_place_and_the_reason(frames: list[bytes], message: str) -> None:
    with pytest.raises(WireInvalid, match=message) as caught:
        decode(frames)
    assert caught.value.reason in DROP_REASONS


@pytest.mark.parametrize("number", [2**63, -(2**63), 10**400, "9" * 30])
def test_an_integer_that_nothing_can_hold_is_refused_wherever_it_stands(number: int | str) -> None:
    sampling = {"max_tokens": number}
    submit = {"id": "a", "prompt": "p", "tokens": 1, "prompt_length": 1, "seed": 7, "sampling": sampling}
    bodies = [
        ("StageFree", "step_id", {"step_id": number, "stage": 0}),
        ("Submit", "sampling.max_tokens", submit),
        ("Submit", "sampling.logit_bias", submit | {"sampling": {"logit_bias": {str(number): 1.0}}}),
        ("Emit", "tokens.1", {"id": "a", "tokens": [1, number]}),
        ("Done", "samples.0.token", {"step_id": 1, "samples": [{"id": "a", "token": number}]}),
    ]
    for kind, where, body in bodies:
        with pytest.raises(WireInvalid, match=rf"{kind}\.{where}.*9223372036854775807") as caught:
            decode([frame(v=1, type=kind, body=body)])
        assert caught.value.reason == "fields"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(frames=st.lists(st.binary(max_size=40), max_size=3))
def test_random_bytes_raise_nothing_but_wire_invalid(frames: list[bytes]) -> None:
    _decode_or_wire_invalid(frames)


@settings(max_examples=300)
@given(data=st.data(), value=JSON_VALUES, remove=st.booleans())
def test_a_message_with_one_value_replaced_raises_nothing_but_wire_invalid(
    data: st.DataObject, value: Any, remove: bool
) -> None:
    header = json.loads(data.draw(st.sampled_from(FRAMES))[0])
    holder: Any = header
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if not isinstance(holder[key], (dict, list)) or data.draw(st.booleans()):
            if remove:
                del holder[key]
            else:
                holder[key] = value
            break
        holder = holder[key]
    text = json.dumps(header).encode()
    _decode_or_wire_invalid([text])
    _decode_or_wire_invalid([text, b"1234"])


@given(data=st.data())
def test_a_frame_cut_short_is_refused(data: st.DataObject) -> None:
    header, _ = data.draw(st.sampled_from(FRAMES))
    with pytest.raises(WireInvalid):
        decode([header[: data.draw(st.integers(0, len(header) - 1))]])


def _decode_or_wire_invalid(frames: list[bytes]) -> None:
    with contextlib.suppress(WireInvalid):
        message, _ = decode(frames)
        assert type(message).__name__ in KINDS


# --- values that JSON is bad at -------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[], [0], [-1, 2**31 - 1, -(2**31)], list(range(1000))])
def test_token_ids_are_exact(ids: list[int]) -> None:
    sent = np.array(ids, dtype=np.int32)
    raw = tokens_to_frame(sent)
    assert len(raw) == 4 * len(ids)
    _, payload = decode([bytes(part) for part in encode(Tokens("p", 0, len(ids)), raw)])
    assert payload is not None
    received = tokens_from_frame(payload)
    assert received.dtype == np.int32
    assert received.tolist() == ids


def test_token_ids_are_little_endian_whatever_the_machine() -> None:
    assert tokens_to_frame(np.array([1, 258], dtype=">i4").astype(np.int32)) == b"\1\0\0\0\2\1\0\0"
    assert tokens_from_frame(b"\1\0\0\0\2\1\0\0").tolist() == [1, 258]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4097])
def test_a_token_frame_that_ends_within_an_id_is_refused(length: int) -> None:
    with pytest.raises(WireInvalid, match=f"a token frame has {length} bytes, expected a multiple of 4"):
        tokens_from_frame(bytes(length))


def test_infinite_logprobs_and_floats_that_are_no_numbers_survive() -> None:
    sent = Emit("a", (1,), logprobs=(TokenLogprob(-inf, ((3, inf), (4, nan))),))
    received, _ = decode(encode(sent))
    assert isinstance(received, Emit)
    assert received.logprobs[0].logprob == -inf
    assert received.logprobs[0].top[0] == (3, inf)
    assert isnan(received.logprobs[0].top[1][1])


def test_a_state_hash_is_exact_and_token_ids_of_a_bias_are_numbers() -> None:
    step = Step(1, 0, (StepEntry("a", 0, (), True),), state_hash=2**53 - 1)
    assert decode(encode(step))[0].state_hash == 2**53 - 1  # type: ignore[union-attr]
    submit = Submit("a", "p", 1, 1, 2**63 - 1, sampling=Sampling(logit_bias={5: -inf}))
    assert decode(encode(submit))[0] == submit


def test_a_payload_without_need_or_a_missing_one_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        encode(Emit("a", ()), b"")
    with pytest.raises(AssertionError):
        encode(Tokens("p", 0, 0))


def test_lists_of_messages_have_one_digest_exactly_if_they_are_equal() -> None:
    first = Emit(id="a", tokens=(1, 2))
    second = Emit(id="a", tokens=(1,), finish_reason="stop")
    assert digest([first, second]) == digest([Emit(id="a", tokens=(1, 2)), second])
    assert (
        len({digest(messages) for messages in ([], [first], [second], [first, second], [second, first])}) == 5
    )


def test_a_request_that_steps_aside_counts_in_a_digest() -> None:
    """It has no frame, because it stays inside a controller."""
    aside = SteppedAside("a", "a/aside-1", "p", 9)
    others = [
        dataclasses.replace(aside, **change) for change in ({"tokens": 8}, {"prompt": "p"}, {"id": "b"})
    ]
    assert digest([aside]) == digest([dataclasses.replace(aside)])
    assert len({digest([one]) for one in (aside, *others)}) == 4
