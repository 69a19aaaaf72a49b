"""What a link may get from a peer that is broken, of another release, or hostile, for tests of every link."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

from hypothesis import strategies as st

from medha.errors import WireInvalid
from medha.wire.frames import decode, encode
from medha.wire.messages import BundlePart, Message, Tokens

RECORDED = Path(__file__).parent / "core" / "recorded" / "wire_v1.jsonl"
HEADERS = [json.loads(line)["frame"] for line in RECORDED.read_text(encoding="utf-8").splitlines()]
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({})
)


@st.composite
def _mutated(draw: st.DrawFn) -> list[bytes]:
    """A recorded message with one value replaced or missing, a frame too many or too few, or cut short."""
    header = json.loads(draw(st.sampled_from(HEADERS)))
    body = header["body"]
    where: Any = draw(st.sampled_from([header, body])) if body else header
    key = draw(st.sampled_from(sorted(where)))
    if draw(st.booleans()):
        where[key] = draw(VALUES)
    else:
        del where[key]
    text = json.dumps(header).encode()
    text = text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text
    return [text, *draw(st.lists(st.binary(max_size=9), max_size=2))]


@st.composite
def _valid(draw: st.DrawFn, kinds: tuple[type[Any], ...]) -> list[bytes]:
    """A message of the right form and any content."""
    message = draw(st.from_type(draw(st.sampled_from(kinds))))
    payload = draw(st.binary(max_size=9)) if isinstance(message, Tokens | BundlePart) else None
    return [bytes(frame) for frame in encode(message, payload)]


def frames(without: Collection[type[Message]] = ()) -> st.SearchStrategy[list[bytes]]:
    """Frames of any kind; of the types in `without`, none of the right form."""
    kinds = tuple(kind for kind in get_args(Message) if kind not in without)
    anything = st.lists(st.binary(max_size=40), max_size=3)
    return st.one_of(anything, _mutated(), _valid(kinds)).filter(lambda one: _kind(one) not in without)


def is_dropped(frames: list[bytes], accepts: Collection[type[Message]]) -> bool:
    """Whether a link that accepts these types must drop the frames, whatever else it knows."""
    return _kind(frames) not in accepts


def _kind(frames: list[bytes]) -> type[Message] | None:
    try:
        return type(decode(frames)[0])
    except WireInvalid:
        return None
