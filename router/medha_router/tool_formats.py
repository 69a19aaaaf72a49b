"""The forms in which families of models write calls, by name, and which of them a checkpoint's template uses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType

from medha_router.channels import CALL, CHANNEL, CONSTRAIN, MARKS, MESSAGE
from medha_router.tool_call_channels import HarmonyReader
from medha_router.tool_call_text import CallReader, HermesReader, LlamaReader, MistralReader
from medha_router.tool_call_xml import CoderReader

Piece = str | tuple[tuple[str, ...], ...]
"""A text, or ways to write one, of which a model may choose any."""


@dataclass(frozen=True)
class ToolFormat:
    """The form of a call: pieces of text, in which `%s` is the name of a function."""

    reader: type[CallReader]
    before: tuple[Piece, ...]
    """Before the arguments of a call."""
    after: tuple[str, ...]
    opens: tuple[str, ...] = ()
    """Before the first call. The first piece is the marker that no other text has."""
    between: tuple[str, ...] | None = None
    """Between two calls; None: there is only one."""
    closes: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    """Pieces that are tokens of their own in some vocabularies, perhaps special ones."""
    as_tags: bool = False
    """Arguments are tags, and not a JSON object."""
    short_ids: bool = False
    """Templates take ids of nine letters and digits only."""
    in_channels: bool = False
    """A call is a message to a function. The text of an answer is a message, too, and thoughts may go before both."""
    one_call_each: bool = False
    """Templates show one call of each message, and the results after it."""
    needs_description: bool = False
    """Templates fail without the description of a function; it may be empty."""

    @property
    def marker(self) -> str | None:
        return self.opens[0] if self.opens else None


def _object(key: str) -> str:
    return f'{{"name": "%s", "{key}": '


_CALL, _CALL_END, _CALLS, _ARGS = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"
FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat(
            reader=HermesReader,
            opens=(_CALL,),
            before=("\n" + _object("arguments"),),
            after=("}\n", _CALL_END),
            between=("\n", _CALL),
            marks=(_CALL, _CALL_END),
        ),
        "llama3_json": ToolFormat(
            reader=LlamaReader, before=(_object("parameters"),), after=("}",), marks=("<|python_tag|>",)
        ),
        "mistral": ToolFormat(
            reader=MistralReader,
            opens=(_CALLS, "["),
            before=(_object("arguments"),),
            after=("}",),
            between=(", ",),
            closes=("]",),
            marks=(_CALLS,),
            short_ids=True,
        ),
        "mistral_args": ToolFormat(
            reader=MistralReader,
            opens=(_CALLS,),
            before=("%s", _ARGS),
            after=(),
            between=(_CALLS,),
            marks=(_CALLS, _ARGS, "[CALL_ID]"),
            short_ids=True,
        ),
        "qwen3_coder": ToolFormat(
            reader=CoderReader,
            opens=(_CALL,),
            before=("\n<function=%s>\n",),
            after=("</function>\n", _CALL_END),
            between=("\n", _CALL),
            marks=(_CALL, _CALL_END),
            as_tags=True,
        ),
        "harmony": ToolFormat(
            reader=HarmonyReader,
            before=(
                ((CHANNEL, "commentary to=functions.%s"), (" to=functions.%s", CHANNEL, "commentary")),
                ((" ", CONSTRAIN, "json"), (CONSTRAIN, "json"), (" json",), ()),
                MESSAGE,
            ),
            after=(),
            marks=(*MARKS, CONSTRAIN, CALL),
            in_channels=True,
            one_call_each=True,
            needs_description=True,
        ),
    }
)
"""The values of `spec.model.toolCallFormat`, beside `auto`."""


def detected(template: str) -> str | None:
    """Return the name of the form that a chat template shows the model; None if it shows none that is known."""
    if CHANNEL in template and CALL in template:
        return "harmony"
    if _CALL in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if _CALLS in template:
        return "mistral_args" if _ARGS in template else "mistral"
    if "<|python_tag|>" in template or ('{"name": ' in template and '"parameters": ' in template):
        return "llama3_json"
    return None


def call_id(request_id: str, choice: int, call: int, *, short: bool) -> str:
    """Return the id of a call: the same one for the same place in the same request."""
    place = json.dumps([request_id, choice, call]).encode()
    digest = blake2b(place, digest_size=12, person=b"medha call").hexdigest()
    return digest[:9] if short else f"call_{digest}"
