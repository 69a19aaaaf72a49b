"""A model's bundle: tokenizer, chat template and generation defaults, from the files that a replica sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from medha.errors import CheckpointInvalid, RequestInvalid
from medha.wire.bundle_digest import bundle_digest
from medha.wire.frames import TokenIds
from medha_router.channels import CALL, CONSTRAIN, MARKS
from medha_router.chat_template import ChatTemplate
from medha_router.client_text import ClientText, pieces_of
from medha_router.detokenize import token_bytes
from medha_router.grammar_check import GrammarCheck
from medha_router.whole_tokens import WholeTokens, encode_text

_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults for the parameters that a request omits: `generation_config.json`, as vLLM applies it, else OpenAI's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None


class Bundle:
    """Converts text to token ids and back, for one model. Immutable, so threads may share it."""

    def __init__(self, files: Mapping[str, bytes], grammar_check: GrammarCheck | None = None) -> None:
        """Load the tokenizer, chat template and defaults; `grammar_check` checks the grammars of its requests.

        Raises:
            CheckpointInvalid: `tokenizer.json` is missing, or a file cannot be read.
        """
        if "tokenizer.json" not in files:
            raise CheckpointInvalid(
                "the bundle has no tokenizer.json; convert the model's tokenizer to that format"
            )
        self.digest = bundle_digest(files)
        try:
            self._tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises bare Exception
            raise CheckpointInvalid(f"tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _json_object(files, "tokenizer_config.json")
        special_tokens = _special_tokens(config, _json_object(files, "special_tokens_map.json"))
        source = _template_source(files, config)
        self.chat_template = ChatTemplate(source, special_tokens) if source is not None else None
        with_tools = _tool_template_source(files, config)
        self.tool_template = (
            self.chat_template if with_tools is None else ChatTemplate(with_tools, special_tokens)
        )
        """The template of conversations with tools."""
        self.defaults = _sampling_defaults(_json_object(files, "generation_config.json"))
        self.token_bytes = token_bytes(self._tokenizer)
        self.longest_token_bytes = max(map(len, self.token_bytes.values()))
        added = self._tokenizer.get_added_tokens_decoder()
        self.grammar_check = grammar_check or GrammarCheck()
        self._special_by_text = {token.content: number for number, token in added.items() if token.special}
        # As the library's decoder does, compare the text in the vocabulary: a normalizer may have changed it.
        self.special_ids = frozenset(
            number
            for number in self._special_by_text.values()
            if self._tokenizer.id_to_token(number) in self._special_by_text
        )
        self._client_text = ClientText(self._special_by_text) if self.channel_marks else None
        self._whole_tokens = WholeTokens.of(self._tokenizer, self.token_bytes)
        self._around = None if self._whole_tokens is None else _around(self._tokenizer)

    def special_ids_of(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the ids of those texts that are special tokens."""
        return {text: self._special_by_text[text] for text in texts if text in self._special_by_text}

    def template(self, *, with_tools: bool) -> ChatTemplate | None:
        """Return the template of conversations, None if the model has none."""
        return self.tool_template if with_tools else self.chat_template

    @property
    def channel_marks(self) -> Mapping[str, int]:
        """The ids of the marks of channels and calls, if the chat template makes the model write channels; else empty."""
        found = self.special_ids_of((*MARKS, CALL, CONSTRAIN))
        if self.chat_template is None or not found.keys() >= set(MARKS):
            return {}
        return found if all(mark in self.chat_template.source for mark in MARKS) else {}

    def marks_to_read(self, endpoint: str, *, skip_special_tokens: bool) -> Mapping[str, int]:
        """Return the marks by which the channels of an output are read; empty if the output is shown as it is."""
        return self.channel_marks if skip_special_tokens and endpoint != "completions" else {}

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Return the token ids of `text`, int32 [n]."""
        if self._whole_tokens is not None and not add_special_tokens:
            return self._whole_tokens.encode(text)
        if self._whole_tokens is not None and self._around is not None:
            before, after = self._around
            return np.concatenate((before, self._whole_tokens.encode(text), after))
        return encode_text(self._tokenizer, text, add_special_tokens=add_special_tokens)

    def encode_rendered(self, text: str, *, add_special_tokens: bool = False) -> TokenIds:
        """Return the token ids of a rendered conversation, int32 [n]; in channels, those of clients' text are never special."""
        pieces = [text] if self._client_text is None else pieces_of(text)
        return np.concatenate(
            [
                self.encode(one, add_special_tokens=add_special_tokens and index == 0)
                for index, one in enumerate(pieces)
            ]
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return `ids` as a whole text, with special tokens and without the leading space that some tokenizers add.

        Raises:
            RequestInvalid: an id is not in this vocabulary.
        """
        for number in ids:
            if number not in self.token_bytes:
                raise RequestInvalid(f"token id {number} is not in the vocabulary", param="tokens")
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the prompt text of a conversation, for `encode_rendered`.

        Raises:
            RequestInvalid: the model has no chat template, or it does not accept these messages.
        """
        template = self.template(with_tools=options.get("tools") is not None)
        if template is None:
            raise RequestInvalid(
                "this model has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        if self._client_text is not None:
            messages, options = self._client_text.broken(messages), self._client_text.broken(options)
        return template.render(messages, **options)


def _around(tokenizer: Tokenizer) -> tuple[TokenIds, TokenIds] | None:
    """Return the special tokens before and after each text, None if they cannot be distinguished from its own tokens."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    length = len(plain)
    places = [at for at in range(len(whole) - length + 1) if whole[at : at + length] == plain]
    if len(places) != 1:
        return None
    before, after = whole[: places[0]], whole[places[0] + length :]
    return np.asarray(before, dtype=np.int32), np.asarray(after, dtype=np.int32)


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise CheckpointInvalid(f"{name}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointInvalid(f"{name}: is a JSON {type(value).__name__}, expected an object")
    return value


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """Return `chat_template.jinja` if it exists, else the (default) template of tokenizer_config.json."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _tool_template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """Return the template that is named `tool_use`, which `transformers` prefers where there are tools."""
    template = config.get("chat_template")
    if "chat_template.jinja" in files or not isinstance(template, list):
        return None
    return next((str(entry["template"]) for entry in template if entry["name"] == "tool_use"), None)


def _special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name; files give each as text or as an object with `content`."""
    named = {name: config[name] for name in _SPECIAL_TOKENS if name in config} | dict(special_map)
    texts = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _sampling_defaults(config: Mapping[str, Any]) -> SamplingDefaults:
    given = {name: config[name] for name in _SAMPLING_DEFAULTS if config.get(name) is not None}
    if config.get("max_new_tokens") is not None:
        given["max_new_tokens"] = config["max_new_tokens"]
    return SamplingDefaults(**given)
