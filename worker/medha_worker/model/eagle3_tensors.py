"""The tensors of an EAGLE-3 head's checkpoint: which file holds each, checked against its configuration.

Files are safetensors, which need no torch, or `pytorch_model.bin`, as the authors of EAGLE-3 publish theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from medha.errors import CheckpointInvalid, ModelUnsupported
from medha_worker.model.eagle3_config import Eagle3Config
from medha_worker.readable import require_readable

EMBEDDING, TARGETS, GUESSABLE = "embed_tokens.weight", "d2t", "t2d"
FC_BIAS = "fc.bias"
_FLOATS = ("F32", "BF16", "F16")
_LAYER, _LAYER_OF_SPECULATORS = "midlayer.", "layers.0."

Places = Mapping[str, tuple[Path, str]]
"""File of each tensor, and its name there, by the name that `Eagle3Config.shapes` has for it."""


@dataclass(frozen=True)
class Eagle3Tensors:
    """The places of the tensors of a head.

    Attributes:
        places: The file of each tensor, and its name there.
        targets: Ids of the served model's vocabulary, int64 [draft_vocab_size], that the head's ids stand for; None: the same.
    """

    places: Places
    targets: np.ndarray[tuple[int], np.dtype[np.int64]] | None


def find_eagle3_tensors(directory: Path, config: Eagle3Config) -> Eagle3Tensors:
    """Return where the tensors of a head lie.

    Raises:
        CheckpointInvalid: a file or tensor is missing, misshaped or unexpected, or the map of tokens contradicts itself; the
            text names it.
        ModelUnsupported: a tensor's number format is not supported.
    """
    places = _locate(directory)
    wanted = config.shapes()
    optional: dict[str, tuple[int, ...]] = {
        EMBEDDING: config.embedding_shape,
        FC_BIAS: (config.layer.hidden_size,),
        TARGETS: (config.draft_vocab_size,),
        GUESSABLE: (config.layer.vocab_size,),
    }
    missing = [name for name in wanted if name not in places]
    if missing:
        raise CheckpointInvalid(
            f"{directory}: tensor {missing[0]} of shape {list(wanted[missing[0]])} is missing"
            f"{f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''}{_why_needed(missing[0], config)}; fetch the "
            "checkpoint again, or choose another head"
        )
    unexpected = [
        name
        for name in places
        if name not in wanted and name not in optional and not name.endswith(".rotary_emb.inv_freq")
    ]
    if unexpected:
        raise CheckpointInvalid(
            f"{directory}: tensor {unexpected[0]} is unexpected: an EAGLE-3 head of this config.json has none; choose another "
            "head"
        )
    for name, shape in (optional | wanted).items():
        if name in places:
            _check(*places[name], shape, name)
    return Eagle3Tensors(places, _targets(directory, places, config))


def _why_needed(name: str, config: Eagle3Config) -> str:
    if name == TARGETS:
        return (
            f": it says which tokens the head guesses, as draft_vocab_size is {config.draft_vocab_size} and vocab_size "
            f"{config.layer.vocab_size}"
        )
    if name == EMBEDDING:
        return (
            f": the served model's has {config.target_hidden_size} values for a token, and the head takes "
            f"{config.layer.hidden_size}"
        )
    return ""


def _locate(directory: Path) -> Places:
    """Return the places of all tensors of a checkpoint."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    saved_by_torch = directory / "pytorch_model.bin"
    if index.exists():
        require_readable(index)
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): directory / Path(str(file)).name for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointInvalid(
                f"{index}: has no readable weight_map ({error!r}); fetch it again"
            ) from error
    elif not single.exists() and saved_by_torch.exists():
        require_readable(saved_by_torch)
        from medha_worker.model.torch_file import read_torch_file  # imports torch, which takes seconds

        files = dict.fromkeys(read_torch_file(saved_by_torch), saved_by_torch)
    else:
        with _opened(single) as file:
            files = dict.fromkeys(file.keys(), single)

    def known_as(name: str) -> str:
        if name.startswith(_LAYER_OF_SPECULATORS):
            return _LAYER + name.removeprefix(_LAYER_OF_SPECULATORS)
        return name

    return {known_as(name): (path, name) for name, path in files.items()}


def _opened(path: Path) -> Any:
    require_readable(path)
    try:
        return safe_open(path, framework="np")
    except FileNotFoundError as error:
        raise CheckpointInvalid(f"{path} is missing; fetch the checkpoint again") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointInvalid(
            f"{path}: is no complete safetensors file ({error}); fetch it again"
        ) from error


def is_saved_by_torch(path: Path) -> bool:
    """Return whether a file of a head is one of `torch.save`, and not of safetensors."""
    return path.suffix == ".bin"


def _form(path: Path, stored_as: str) -> tuple[tuple[int, ...], str]:
    """Return the shape of a stored tensor, and its number format by the name that safetensors has for it."""
    if is_saved_by_torch(path):
        from medha_worker.model.torch_file import read_torch_file, stored_form

        return stored_form(read_torch_file(path)[stored_as])
    with _opened(path) as file:
        try:
            stored = file.get_slice(stored_as)
        except SafetensorError as error:
            raise CheckpointInvalid(
                f"{path}: tensor {stored_as} cannot be read ({error}); fetch it again"
            ) from error
        return tuple(stored.get_shape()), stored.get_dtype()


def _check(path: Path, stored_as: str, wanted: tuple[int, ...], name: str) -> None:
    shape, form = _form(path, stored_as)
    if shape != wanted:
        raise CheckpointInvalid(
            f"{path}: tensor {stored_as} has shape {list(shape)}, but config.json and the served model make it "
            f"{list(wanted)}; choose a head that was trained for the served model"
        )
    allowed = {TARGETS: ("I64", "I32"), GUESSABLE: ("BOOL", "U8")}.get(name, _FLOATS)
    if form not in allowed:
        raise ModelUnsupported(
            f"{path}: tensor {stored_as} is stored as {form}, which is not supported; choose a head that has it in "
            f"{' or '.join(allowed)}"
        )


def _targets(
    directory: Path, places: Places, config: Eagle3Config
) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    """Return the tokens that the head's ids stand for: each id, plus what `d2t` has for it."""
    if TARGETS not in places:
        return None
    offsets = _read(*places[TARGETS]).astype(np.int64)
    targets = np.arange(config.draft_vocab_size) + offsets
    wrong = np.flatnonzero((targets < 0) | (targets >= config.layer.vocab_size))
    if len(wrong):
        raise CheckpointInvalid(
            f"{directory}: {TARGETS} maps id {wrong[0]} to token {targets[wrong[0]]}, which is outside the vocabulary of "
            f"{config.layer.vocab_size}; choose a head that was trained for the served model"
        )
    tokens, counts = np.unique(targets, return_counts=True)
    if len(tokens) < len(targets):
        raise CheckpointInvalid(
            f"{directory}: {TARGETS} maps several ids to token {tokens[counts > 1][0]}; fetch the checkpoint again"
        )
    # In a head for the whole vocabulary, the authors' code reads neither, and may have left it empty.
    if GUESSABLE in places and config.draft_vocab_size < config.layer.vocab_size:
        stated = np.flatnonzero(_read(*places[GUESSABLE]))
        if not np.array_equal(stated, tokens):
            raise CheckpointInvalid(
                f"{directory}: {GUESSABLE} names {len(stated)} tokens, and {TARGETS} maps to {len(tokens)}, which are others; "
                "fetch the checkpoint again"
            )
    return targets


def _read(path: Path, stored_as: str) -> np.ndarray[Any, np.dtype[Any]]:
    if is_saved_by_torch(path):
        from medha_worker.model.torch_file import read_torch_file

        return np.asarray(read_torch_file(path)[stored_as])
    with _opened(path) as file:
        found: np.ndarray[Any, np.dtype[Any]] = file.get_tensor(stored_as)
        return found
