"""Clients get the parts of an output with channels that are for the user, and none of the model's thoughts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from medha.routing.router_events import Deliver
from medha.wire.messages import Sampling, TokenLogprob
from medha_router.channels import CALL, CONSTRAIN, MARKS, Channels, Mark
from medha_router.generation import ChoiceOutput
from medha_router.prepare import Plan
from medha_router.tokenizer_bundle import Bundle

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{% endfor %}<|start|>assistant"
)
THOUGHT = "<|channel|>analysis<|message|>They greet. Stop here: be brief.<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def files(bundle_files: dict[str, bytes]) -> dict[str, bytes]:
    tokenizer = Tokenizer.from_buffer(bundle_files["tokenizer.json"])
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (*MARKS, CONSTRAIN, CALL)])
    config = json.loads(bundle_files["tokenizer_config.json"]) | {"chat_template": TEMPLATE}
    return bundle_files | {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


@pytest.fixture(scope="module")
def with_channels(files: dict[str, bytes]) -> Bundle:
    return Bundle(files)


def shown(bundle: Bundle, output: str, each: int = 1, **changes: Any) -> tuple[str, str | None, list[int]]:
    """The text, the finish reason and the tokens with log-probabilities of an output, of `each` tokens at a time."""
    settings: dict[str, Any] = {
        "endpoint": "chat", "model": "m", "digest": "d", "sampling": Sampling(), "samples": 1, "seed": None,
        "stream": False, "include_usage": False, "continuous_usage": False, "stop": (), "include_stop": False,
        "skip_special_tokens": True, "service_tier": None, "cache_salt": "",
    }  # fmt: skip
    choice = ChoiceOutput(0, Plan(**settings | changes), bundle)
    ids = bundle.encode(output, add_special_tokens=False).tolist()
    text, reason, tokens = "", None, list[int]()
    for start in range(0, len(ids), each):
        part = tuple(ids[start : start + each])
        is_last = start + each >= len(ids)
        logprobs = tuple(TokenLogprob(-1.0) for _ in part)
        piece = choice.feed(Deliver("r", part, "length" if is_last else None, logprobs))
        if piece is not None:
            text += piece.text
            tokens += [one.token for one in piece.tokens]
            reason = piece.finish_reason
        if choice.finished:
            break
    return text, reason, tokens


@pytest.mark.parametrize("each", [1, 3, 1000])
@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>Café 🙂 final", "Café 🙂 final"),
        (f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>Yes", "Yes"),
        (f"{THOUGHT}<|channel|>final <|constrain|>json<|message|>{{}}", "{}"),
        ("<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|> Then.", "First. Then."),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", ""),
        (f"{THOUGHT} to=functions.f<|channel|>commentary<|message|>{{}}", ""),
        (THOUGHT, ""),
        ('{"an": "answer that a grammar asks for"}', '{"an": "answer that a grammar asks for"}'),
    ],
)  # fmt: skip
def test_the_answer_is_what_is_for_the_user(
    with_channels: Bundle, output: str, answer: str, each: int
) -> None:
    text, reason, tokens = shown(with_channels, output, each)
    assert (text, reason) == (answer, "length")
    assert with_channels.decode(tokens) == answer


def test_a_stop_string_counts_in_the_answer_alone(with_channels: Bundle) -> None:
    output = f"{THOUGHT}<|channel|>final<|message|>One. Stop here. Two"
    assert shown(with_channels, output, stop=("Stop",))[:2] == ("One. ", "stop")


@pytest.mark.parametrize(
    "changes", [{"endpoint": "completions", "skip_special_tokens": False}, {"skip_special_tokens": False}]
)
def test_who_asks_for_special_tokens_gets_all_channels(
    with_channels: Bundle, changes: dict[str, Any]
) -> None:
    output = f"{THOUGHT}<|channel|>final<|message|>Yes"
    assert shown(with_channels, output, **changes)[0] == output


def test_a_model_whose_template_knows_no_channels_has_none(bundle: Bundle, files: dict[str, bytes]) -> None:
    assert bundle.channel_marks == {}
    config = json.loads(files["tokenizer_config.json"]) | {"chat_template": "{{ messages[0].content }}"}
    other = Bundle(files | {"tokenizer_config.json": json.dumps(config).encode()})
    assert other.channel_marks == {}
    assert shown(other, "<|channel|>a<|message|>b")[0] == "ab", "special tokens alone are left out"


def test_marks_of_the_last_message_begin_a_new_header() -> None:
    channels = Channels({mark: index for index, mark in enumerate(MARKS)})
    told = [
        channels.feed(token, text)
        for token, text in ((1, b""), (9, b"final"), (2, b""), (9, b"x"), (3, b""), (9, b"y"))
    ]
    assert told == [None, None, None, b"x", None, None]


@pytest.mark.parametrize(
    "header",
    [
        ["<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>"],
        ["<|channel|>", "commentary to=functions.f", "<|constrain|>", "json", "<|message|>"],
        ["<|channel|>", "commentary to=functions.f", "<|message|>"],
        [" to=functions.f", "<|channel|>", "commentary json", "<|message|>"],
        ["<|end|>", "<|start|>", "assistant to=functions.f", "<|channel|>", "analysis", "<|message|>"],
    ],
)
@pytest.mark.parametrize("end", ["<|call|>", "<|end|>"])
def test_a_message_to_a_function_is_a_call_between_two_marks(header: list[str], end: str) -> None:
    marks = {mark: index for index, mark in enumerate((*MARKS, CALL, CONSTRAIN))}
    output = [*header, "{", "}", end, "y"]
    for with_calls in (True, False):
        channels = Channels(marks, with_calls=with_calls)
        told = [channels.feed(marks.get(one, 99), one.encode()) for one in output]
        if not with_calls:
            assert not any(told), "calls are for nobody, unless they are read"
            continue
        assert told[0] is None
        *before, opened, first, second, closed, after = told[1:]
        assert (before, first, second, after) == ([None] * (len(header) - 2), b"{", b"}", None)
        assert isinstance(opened, Mark)
        assert closed == Mark(end)


@pytest.mark.parametrize("each", [1, 2, 5])
def test_text_that_could_name_a_receiver_is_shown_if_it_names_none(each: int) -> None:
    for text in (b" to the end", b" t", b""):
        pieces = [text[start : start + each] for start in range(0, len(text), each)]
        channels = Channels({mark: index for index, mark in enumerate(MARKS)}, with_calls=True)
        assert b"".join(channels.feed(99, piece) or b"" for piece in pieces) + channels.end() == text
