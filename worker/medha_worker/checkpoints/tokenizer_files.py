"""Completes a checkpoint's tokenizer: one `tokenizer.json` for what `transformers` reads from several files.

`tokenizer.json` alone does not define how a checkpoint's text is tokenised. `transformers` adds tokens from
other files, and for some classes it takes only the vocabulary from `tokenizer.json` and rebuilds the rest. A
router needs none of these rules: it gets the resulting file. The rules are those of transformers 5; forms
that they do not cover are refused. Tests compare ids and text with those of `AutoTokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from medha.errors import CheckpointInvalid
from medha.wire.bundle_digest import spelling_of
from medha_worker.model.model_config import read_json
from medha_worker.readable import require_readable

_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_SPECIAL_MAP, _ADDED, _MODEL = "special_tokens_map.json", "added_tokens.json", "config.json"
TOKENIZER_FILES = (_TOKENIZER, _CONFIG, _SPECIAL_MAP, _ADDED)
"""Names of the files of a checkpoint that define its tokenizer."""
_CLEANS_UP_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that every tokenizer may name, in the order in which missing ones get their ids."""

_FROM_FILE = frozenset(("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "BloomTokenizer"))
"""Classes, without `Fast`, that take all of `tokenizer.json`."""

_QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_Token: TypeAlias = str | AddedToken


@dataclass(frozen=True)
class _Checkpoint:
    """The files that define the tokenizer. An absent file is None; `config` and `model` are then empty."""

    directory: Path
    raw: bytes  # content of tokenizer.json
    tokenizer: Mapping[str, Any]
    config: Mapping[str, Any]  # tokenizer_config.json
    model: Mapping[str, Any]  # config.json
    special_map: Mapping[str, Any] | None
    added: Mapping[str, Any] | None

    def error(self, file: str, text: str) -> CheckpointInvalid:
        return CheckpointInvalid(f"{self.directory / file}: {text}")

    def unknown_form(self, file: str, text: str, remove: str | None = None) -> CheckpointInvalid:
        """Return an error for a form that can be served after a manual conversion.

        The text says to save the tokenizer as `transformers` reads it, and to delete `remove` if given.
        """
        save = (
            f"AutoTokenizer.from_pretrained({str(self.directory)!r}).backend_tokenizer.save('tokenizer.json')"
        )
        also = f" and remove {remove}" if remove else ""
        return self.error(
            file,
            f'{text}. To serve it, run `python -c "from transformers import AutoTokenizer; {save}"`, replace the '
            f"checkpoint's {_TOKENIZER} by that file, and in {_CONFIG} set tokenizer_class to 'PreTrainedTokenizerFast'{also}",
        )


def whole_tokenizer(directory: Path) -> dict[str, bytes]:
    """Read a checkpoint's tokenizer: a complete `tokenizer.json`, and a `special_tokens_map.json` of texts.

    Raises:
        CheckpointInvalid: a file cannot be read, or defines what cannot be served as `transformers` would.
    """
    files = _Checkpoint(
        directory,
        (directory / _TOKENIZER).read_bytes(),
        _json_object(directory, _TOKENIZER) or {},
        _json_object(directory, _CONFIG) or {},
        _json_object(directory, _MODEL) or {},
        _json_object(directory, _SPECIAL_MAP),
        _json_object(directory, _ADDED),
    )
    with _faults_named(files):
        tokenizer = Tokenizer.from_buffer(files.raw)
    _require_known_form(files)
    name = _class_name(files)
    rebuild = _REBUILT.get(name)
    if rebuild is not None:
        post_processor = tokenizer.post_processor
        bpe = _bpe(files, name)
        with _faults_named(files):
            tokenizer = rebuild(bpe, {**files.config, **_special_map(files)})
        _require_unknown_token(files, tokenizer, bpe["vocab"])
        tokenizer.post_processor = post_processor
    names = _add_tokens(
        tokenizer, files, _NAMED_BY_CLASS.get(name, {}), special_again=name == "Qwen2Tokenizer"
    )
    whole = tokenizer.to_str()
    try:
        spelling_of(json.loads(whole)["decoder"])
    except CheckpointInvalid as error:
        raise files.error(_TOKENIZER, str(error)) from error
    return {_TOKENIZER: whole.encode(), _SPECIAL_MAP: json.dumps(names).encode()}


@contextmanager
def _faults_named(files: _Checkpoint) -> Iterator[None]:
    """Turn an error of the library about tokenizer.json into one that names the file."""
    try:
        yield
    except BaseException as error:
        # The library raises bare Exception, and for some merges a panic, whose class it does not export.
        is_panic = type(error).__module__ == "pyo3_runtime" and type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise
        raise files.error(
            _TOKENIZER,
            f"cannot be loaded ({error}); fetch the checkpoint again, or correct model.merges and model.vocab",
        ) from error


def _json_object(directory: Path, name: str) -> dict[str, Any] | None:
    path = directory / name
    require_readable(path)
    return read_json(path) if path.is_file() else None


# --- which class, and what it builds ------------------------------------------------------------------


def _class_name(files: _Checkpoint) -> str:
    """Return the class that `AutoTokenizer` uses, without `Fast`; "" if it takes all of tokenizer.json.

    Raises:
        CheckpointInvalid: the class is not known here.
    """
    declared = files.config.get("tokenizer_class") or files.model.get("tokenizer_class")
    kind = files.model.get("model_type")
    if kind == "qwen2" or (kind == "qwen3" and declared is None):
        return "Qwen2Tokenizer"
    if kind == "mistral" or declared is None:
        return ""
    name = str(declared).removesuffix("Fast")
    if name in _FROM_FILE or (name == "LlamaTokenizer" and b'"ByteLevel"' in files.raw):
        return ""
    if name not in _REBUILT:
        file = _CONFIG if files.config.get("tokenizer_class") else _MODEL
        known = "PreTrainedTokenizerFast, " + ", ".join(sorted(_REBUILT))
        raise files.unknown_form(file, f"tokenizer_class is {declared!r}; known are {known}")
    return name


def _special_map(files: _Checkpoint) -> Mapping[str, Any]:
    """Return the fields of special_tokens_map.json; `transformers` ignores it if there is an added_tokens_decoder."""
    return {} if "added_tokens_decoder" in files.config else files.special_map or {}


def _require_known_form(files: _Checkpoint) -> None:
    config = files.config
    code = config.get("auto_map")
    if code and (not isinstance(code, dict) or code.get("AutoTokenizer")):
        raise files.unknown_form(
            _CONFIG, "auto_map asks for code of the checkpoint's own, which is not run", "auto_map"
        )
    for other in _listed(files, _CONFIG, "fast_tokenizer_files", config.get("fast_tokenizer_files")):
        if other != _TOKENIZER:
            raise files.unknown_form(
                _CONFIG, f"fast_tokenizer_files names {other!r}; only {_TOKENIZER} is read"
            )
    if config.get("fix_mistral_regex") and files.model.get("model_type") == "mistral":
        raise files.unknown_form(
            _CONFIG, "fix_mistral_regex is set, which changes the pre-tokenizer when loaded"
        )
    if config.get("split_special_tokens"):
        raise files.error(
            _CONFIG,
            "split_special_tokens is set: special tokens would be read as ordinary text; remove the field",
        )
    for file, fields in ((_CONFIG, config), (_SPECIAL_MAP, _special_map(files))):
        if unknown := fields.get("unk_token"):
            _token(files, file, "unk_token", unknown)
    is_bpe = files.tokenizer["model"].get("type") == "BPE"
    if config.get("clean_up_tokenization_spaces") and (not is_bpe or config.get(_CLEANS_UP_BPE)):
        raise files.error(
            _CONFIG,
            "clean_up_tokenization_spaces is set, which changes text that has been streamed already; set it to false",
        )


def _bpe(files: _Checkpoint, name: str) -> dict[str, Any]:
    """Return vocabulary and merges, as arguments of `tokenizers.models.BPE`."""
    model = files.tokenizer["model"]
    if model.get("type") not in ("BPE", None) or "merges" not in model:
        wrong = f"model.type is {model.get('type')!r}"
        if files.model.get("model_type") == "qwen2":  # whatever tokenizer_class says
            raise files.error(
                _TOKENIZER, f"{wrong}, but the tokenizer of a qwen2 is BPE; fetch the checkpoint again"
            )
        raise files.unknown_form(_TOKENIZER, f"{wrong}, but tokenizer_class {name!r} reads BPE")
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    return {"vocab": model["vocab"], "merges": merges}


def _require_unknown_token(files: _Checkpoint, tokenizer: Tokenizer, vocabulary: Mapping[str, int]) -> None:
    """Require that the vocabulary has the token for unknown text, or all bytes, so that no text is unknown."""
    unknown = tokenizer.model.unk_token
    if (
        unknown is None
        or unknown in vocabulary
        or all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    ):
        return
    raise files.error(
        _TOKENIZER,
        f"model.vocab has no unk_token {unknown!r:.80}, so unknown text cannot be encoded; add the token, or correct "
        f"unk_token in {_CONFIG} or {_SPECIAL_MAP}",
    )


def _llama(bpe: dict[str, Any], config: Mapping[str, Any]) -> Tokenizer:
    prefix_space = config.get("add_prefix_space")
    prefix_space = True if prefix_space is None else bool(prefix_space)
    tokenizer = Tokenizer(models.BPE(**bpe, fuse_unk=True, byte_fallback=True))
    scheme = "never" if not prefix_space else "always" if config.get("legacy") else "first"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _qwen2(bpe: dict[str, Any], config: Mapping[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**bpe, continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(bool(config.get("add_prefix_space")), use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2(bpe: dict[str, Any], config: Mapping[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**bpe, continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(bool(config.get("add_prefix_space")))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gemma(bpe: dict[str, Any], config: Mapping[str, Any]) -> Tokenizer:
    unknown = config.get("unk_token", "<unk>")
    text = unknown["content"] if isinstance(unknown, dict) else str(unknown)
    tokenizer = Tokenizer(models.BPE(**bpe, unk_token=text, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


_REBUILT: Mapping[str, Callable[[dict[str, Any], Mapping[str, Any]], Tokenizer]] = {
    "LlamaTokenizer": _llama,
    "Qwen2Tokenizer": _qwen2,
    "GPT2Tokenizer": _gpt2,
    "GemmaTokenizer": _gemma,
}
"""Classes, without `Fast`, that take vocabulary, merges and post-processor, and rebuild the rest."""

_END_OF_TEXT = "<|endoftext|>"
_NAMED_BY_CLASS: Mapping[str, Mapping[str, str | None]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": {"unk_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT},
    "GPT2Tokenizer": {
        "unk_token": _END_OF_TEXT,
        "bos_token": _END_OF_TEXT,
        "eos_token": _END_OF_TEXT,
        "pad_token": None,
    },
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
"""Default special tokens of a class, for those that the files do not name.

None: the class has no such token, even if the padding of tokenizer.json names one.
"""


# --- tokens of the other files ------------------------------------------------------------------------


def _add_tokens(
    tokenizer: Tokenizer, files: _Checkpoint, of_class: Mapping[str, str | None], *, special_again: bool
) -> dict[str, str]:
    """Add to `tokenizer` what `transformers` adds, in its order; return the special tokens' texts by name.

    With `special_again`, all special tokens are added once more at the end, as ordinary special ones.
    """
    declared, named, others = _tokens_of_files(files, of_class)
    before = tokenizer.get_added_tokens_decoder()
    known = {repr(token) for token in before.values()}
    adding: list[_Token] = [token for _, token in sorted(declared.items()) if repr(token) not in known]
    texts = {token.content for token in before.values()} | {str(token) for token in adding}
    for token in (*named.values(), *others):
        # A text may be named twice with different flags: the later ones apply.
        if str(token) not in texts and token not in adding:
            adding.append(token)
    names = {str(token) for token in named.values()}
    tokens = [AddedToken(token, special=True) if isinstance(token, str) else token for token in adding]
    for token in tokens:
        token.special = token.special or token.content in names
    tokenizer.add_tokens(tokens)
    if special_again:
        again = dict.fromkeys(str(token) for token in (*named.values(), *others))
        tokenizer.add_tokens([AddedToken(text, special=True) for text in again])
    # Once a token was special, the library hides it in texts, but a saved tokenizer would not: so it stays special.
    once_special = {token.content for token in before.values() if token.special}
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.content in once_special and not token.special:
            token.special = True
            tokenizer.add_tokens([token])
    for number, token in declared.items():
        given = tokenizer.token_to_id(token.content)
        if given != number:
            file = _CONFIG if "added_tokens_decoder" in files.config else _ADDED
            raise files.error(
                file,
                f"gives the token {token.content!r} the id {number}, but after the vocabulary of {_TOKENIZER} its id "
                f"is {given}; ids of added tokens must follow the vocabulary without a gap",
            )
    return {name: str(token) for name, token in named.items()}


def _tokens_of_files(
    files: _Checkpoint, of_class: Mapping[str, str | None]
) -> tuple[dict[int, AddedToken], dict[str, _Token], list[_Token]]:
    """Return the tokens that the files add, each kind in the order that gives ids.

    They are tokens with an id, special tokens with a name, and other special tokens.
    """
    fields: dict[str, Any] = dict(files.config)
    extra = "extra_special_tokens"  # the name of their list in tokenizer_config.json
    if "additional_special_tokens" in fields and not fields.get("extra_special_tokens"):
        extra = "additional_special_tokens"
        fields["extra_special_tokens"] = fields.pop(extra)
    of_model = {
        name: fields.pop(name)
        for name in list(fields)
        if name not in _NAMED and name.endswith("_token") and isinstance(fields[name], str)
    }
    if isinstance(fields.get("extra_special_tokens"), dict):
        of_model |= fields.pop("extra_special_tokens")
    of_model = of_model or fields.get("model_specific_special_tokens") or {}
    if not isinstance(of_model, dict):
        raise files.error(
            _CONFIG,
            f"model_specific_special_tokens is {of_model!r:.80}, but must be an object with a token for each name; correct it",
        )
    _listed(files, _CONFIG, extra, fields.get("extra_special_tokens"))
    file_of: dict[str, str] = {}  # of fields that tokenizer_config.json does not give

    declared: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in fields:
        given = fields["added_tokens_decoder"]
        if not isinstance(given, dict) or not all(number.isdecimal() for number in given):
            raise files.error(_CONFIG, "added_tokens_decoder is no object with ids as names; fetch it again")
        for number, entry in given.items():
            declared[int(number)] = _added_token(files, _CONFIG, f"added_tokens_decoder.{number}", entry)
    else:  # the older files count only in this case
        for name, value in _special_map(files).items():
            if isinstance(value, dict) and name != "extra_special_tokens":
                fields[name] = _added_token(files, _SPECIAL_MAP, name, {**value, "special": True})
            elif isinstance(value, list) and name == "extra_special_tokens":
                for token in value:
                    _token(files, _SPECIAL_MAP, name, token)
                fields[name] = [*(fields.get(name) or ()), *value]
            else:
                fields[name], file_of[name] = value, _SPECIAL_MAP
        if isinstance(fields.get("extra_special_tokens"), dict):
            of_model |= fields["extra_special_tokens"]
            file_of |= dict.fromkeys(fields.pop("extra_special_tokens"), _SPECIAL_MAP)
        special = {str(fields[name]) for name in _NAMED if fields.get(name)}
        listed = _listed(files, _SPECIAL_MAP, "extra_special_tokens", fields.get("extra_special_tokens"))
        special |= {str(token) for token in listed}
        for content, number in (files.added or {}).items():
            if not isinstance(number, int):
                raise files.error(
                    _ADDED, f"{content!r:.80} is {number!r:.80}, not an id; fetch the file again"
                )
            declared[number] = AddedToken(
                content, normalized=content not in special, special=content in special
            )
        for entry in files.tokenizer.get("added_tokens") or ():
            declared[entry["id"]] = _added_token(files, _TOKENIZER, f"added_tokens.{entry['id']}", entry)

    by_text = {token.content: token for token in declared.values()}

    def token_of(name: str, value: object) -> _Token:
        token = _token(files, file_of.get(name, _CONFIG), name, value)
        return by_text.get(str(token), token) if name in _NAMED else token

    fields = {**of_class, **fields}
    if padding := files.tokenizer.get("padding"):
        fields.setdefault("pad_token", padding["pad_token"])
    named = {name: token_of(name, fields[name]) for name in _NAMED if fields.get(name) is not None}
    for name, value in fields.items():
        if name.endswith("_token") and name not in _NAMED and isinstance(value, (str, dict, AddedToken)):
            named[name] = token_of(name, value)
    named |= {name: token_of(name, value) for name, value in of_model.items()}
    if "extra_special_tokens" in fields:
        others, file = fields["extra_special_tokens"], _CONFIG
    else:
        extra = "additional_special_tokens"
        others, file = fields.get(extra), file_of.get(extra, _CONFIG)
    return declared, named, [_token(files, file, extra, one) for one in _listed(files, file, extra, others)]


def _listed(files: _Checkpoint, file: str, field: str, value: object) -> list[Any]:
    """Return the list in a field of a file; what is empty, or missing, is an empty list."""
    if not value:
        return []
    if not isinstance(value, list):
        raise files.error(
            file, f"{field} is {value!r:.80}; it must be a list. Correct it, or fetch the checkpoint again"
        )
    return value


def _token(files: _Checkpoint, file: str, field: str, entry: object) -> _Token:
    """Return a token in a field of a file: its text, or the text with flags."""
    return entry if isinstance(entry, str) else _added_token(files, file, field, entry)


def _added_token(files: _Checkpoint, file: str, field: str, entry: object) -> AddedToken:
    if isinstance(entry, AddedToken):
        return entry
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise files.error(
            file, f"{field} is {entry!r:.80}, not a token; write its text, or an object with `content`"
        )
    flags = {
        name: bool(entry[name])
        for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        if name in entry
    }
    return AddedToken(entry["content"], **flags)
