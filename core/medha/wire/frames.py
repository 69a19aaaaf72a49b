"""Frames of the ZeroMQ links: a small JSON header, followed by a raw frame in some messages.

A message is one multipart ZeroMQ message::

    frame 0   {"v": 1, "type": "Submit", "body": {...}}      UTF-8 JSON
    frame 1   token ids (little-endian int32) or file bytes   only after Tokens and BundlePart

One million token ids take 4 MB as a raw frame and 8 MB as JSON, and the raw frame takes a twelfth of the time. A peer of
version N reads versions N and N - 1, and ignores fields that it does not know, so that routers and replicas
can be upgraded one after the other. Fields with their default value are left out, so changing a default
requires a new version. Decoding never executes anything: the types are a closed set and there is no pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaSerializer, SchemaValidator, from_json

from medha.errors import WireInvalid
from medha.wire.messages import Message, SteppedAside

VERSION = 1
TOKENS_PER_FRAME = 262_144
"""Ids per `Tokens` frame (1 MiB): a 40 MB prompt is sent in pieces, so that others can be sent between them."""
MAX_HEADER_BYTES = 16 * 2**20
MAX_TOKENS_FRAME_BYTES = 4 * 4 * TOKENS_PER_FRAME  # a peer of another version may use other piece sizes
MAX_INTEGER = 2**63 - 1
"""Largest absolute value of an integer in a message. An integer in JSON may be too large even for a float."""

TokenIds = npt.NDArray[np.int32]


_BOUNDED = {"int": {"ge": -MAX_INTEGER, "le": MAX_INTEGER}}
# NaN and infinite numbers are written as the constants `NaN` and `Infinity`.
_WITH_CONSTANTS = {"dataclass": {"config": {"ser_json_inf_nan": "constants"}}}


def _with(schema: Any, settings: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the core schema of a message, or of a part of it, with settings for the parts of some types."""
    if isinstance(schema, list):
        return [_with(part, settings) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: _with(part, settings) for key, part in schema.items()}
    return {**parts, **settings.get(str(schema.get("type")), {})}


_SCHEMAS = {kind.__name__: TypeAdapter(kind).core_schema for kind in get_args(Message)}
_VALIDATORS = {name: SchemaValidator(_with(schema, _BOUNDED)) for name, schema in _SCHEMAS.items()}
_SERIALIZERS = {name: SchemaSerializer(_with(schema, _WITH_CONSTANTS)) for name, schema in _SCHEMAS.items()}
_WITH_PAYLOAD = frozenset({"Tokens", "BundlePart"})


def encode(message: Message, payload: bytes | memoryview | None = None) -> list[bytes | memoryview]:
    """Return the frames of `message`; `payload` is the raw frame of a `Tokens` or a `BundlePart`."""
    kind = type(message).__name__
    assert (payload is not None) == (kind in _WITH_PAYLOAD), f"{kind}: payload given or missing"
    # Most fields have their defaults: without these a message is half as long, and made in a third of the time.
    body = _SERIALIZERS[kind].to_json(message, exclude_defaults=True)
    header = b'{"v":%d,"type":"%s","body":%s}' % (VERSION, kind.encode(), body)
    return [header] if payload is None else [header, payload]


def decode(frames: Sequence[bytes | memoryview]) -> tuple[Message, memoryview | None]:
    """Return the message of `frames` and its raw frame.

    Raises:
        WireInvalid: the frames are not a message of a version that this peer reads.
    """
    if not frames:
        raise WireInvalid("an empty message: expected a header frame", reason="header")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise WireInvalid(
            f"a header of {len(frames[0])} bytes, expected at most {MAX_HEADER_BYTES}", reason="size"
        )
    try:
        header = from_json(bytes(frames[0]))
    except ValueError as error:
        raise WireInvalid(f"header is not JSON: {error}", reason="header") from error
    if not isinstance(header, dict):
        raise WireInvalid(f"header is a JSON {type(header).__name__}, expected an object", reason="header")
    version, kind = header.get("v"), header.get("type")
    if type(version) is not int or version not in (VERSION, VERSION - 1):
        raise WireInvalid(
            f"version {version!r} is not supported: expected {VERSION - 1} or {VERSION}", reason="version"
        )
    if not isinstance(kind, str) or kind not in _VALIDATORS:
        raise WireInvalid(f"unknown message type {kind!r}", reason="type")
    expected = 2 if kind in _WITH_PAYLOAD else 1
    if len(frames) != expected:
        raise WireInvalid(f"{kind} has {len(frames)} frames, expected {expected}", reason="frames")
    try:
        message = _VALIDATORS[kind].validate_python(header.get("body"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise WireInvalid(f"{kind}.{where}: {first['msg']}", reason="fields") from error
    if kind == "Tokens":
        _require_whole_ids(frames[1])
    return message, memoryview(frames[1]) if expected == 2 else None


def digest(messages: Sequence[Message | SteppedAside]) -> str:
    """Return a 64-bit hexadecimal digest of the frames of `messages`; "" for no messages.

    Equal lists have equal digests. A `SteppedAside` stays inside a controller and has no frame, so its fields are
    digested instead.
    """
    if not messages:
        return ""
    joined = blake2b(digest_size=8)
    for message in messages:
        if isinstance(message, SteppedAside):
            joined.update(repr(message).encode())
        else:
            joined.update(bytes(encode(message)[0]))
    return joined.hexdigest()


def tokens_to_frame(tokens: TokenIds) -> bytes:
    """Return token ids (int32 [n]) as a raw frame."""
    return tokens.astype("<i4", copy=False).tobytes()


def tokens_from_frame(frame: bytes | memoryview) -> TokenIds:
    """Return the token ids of a raw frame, as int32 [n]; a view, not a copy.

    Raises:
        WireInvalid: the frame is too large, or its length is not a multiple of four bytes.
    """
    _require_whole_ids(frame)
    return np.frombuffer(frame, dtype="<i4").astype(np.int32, copy=False)


def _require_whole_ids(frame: bytes | memoryview) -> None:
    if len(frame) > MAX_TOKENS_FRAME_BYTES:
        raise WireInvalid(
            f"a token frame of {len(frame)} bytes, expected at most {MAX_TOKENS_FRAME_BYTES}", reason="size"
        )
    if len(frame) % 4:
        raise WireInvalid(f"a token frame has {len(frame)} bytes, expected a multiple of 4", reason="payload")
