"""Measures the scales of K and V in FP8 for a checkpoint that has none: `medha model kv-scales DIR`.

Tokens pass one layer after another, of which only one is in memory, on the CPU and in the checkpoint's data type. The
largest number of each head gives its scale (`scales_of_largest`). A file beside the checkpoint's own has all of them, and
every rank reads it: so they are the same to the bit on all grids, although they come from activations.

A key counts with its size at any position: RoPE turns two of its values into each other and keeps their length.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from tokenizers import Tokenizer

from medha.errors import CheckpointInvalid, ConfigInvalid, ModelUnsupported
from medha.model.config_fields import text_fields
from medha_process.shared_files import write_whole
from medha_worker.checkpoints.tokenizer_files import whole_tokenizer
from medha_worker.device import host_device
from medha_worker.kernels.name_table import choose_kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.kv_scales import FP8_MAX, LayerScales, scales_of_largest
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.stage_split import KV_SCALES
from medha_worker.model.stored_kv_scales import StoredKvScales
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import DTYPES, Shard, load_weights

SEQUENCE_TOKENS = 2048
"""Length of the sequences that tokens are cut into."""
_BLOCK_TOKENS = 16
_CHARACTERS_PER_TOKEN = 16  # more than a text has in the mean, so that a long one is not read to its end

Progress = Callable[[int, int], None]
"""Callback that is given the number of layers done, and of all layers."""


@dataclass(frozen=True, slots=True)
class HeadReach:
    """The largest number of a head's keys or values, as a share of the largest one that its scale holds."""

    kind: str
    layer: int
    head: int
    share: float


def random_sequences(directory: Path, tokens: int, seed: int) -> list[list[int]]:
    """Return random token ids, each equally likely, in sequences that begin as texts of the model do."""
    vocabulary = ModelConfig.from_directory(directory).vocab_size
    # numpy's stream is the same on every machine.
    ids = np.random.Generator(np.random.PCG64(seed)).integers(vocabulary, size=tokens)
    return _sequences(directory, ids.tolist())


def sequences_of_text(directory: Path, text: Path, tokens: int) -> list[list[int]]:
    """Return the first tokens of a text in UTF-8, in sequences that begin as texts of the model do.

    Raises:
        CheckpointInvalid: the checkpoint has no tokenizer, or one with tokens that its model does not have.
        ConfigInvalid: the text cannot be read, or has no token.
    """
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointInvalid(
            f"{directory / 'tokenizer.json'} is missing, and a text needs it; fetch the checkpoint with its tokenizer, or "
            "leave --text out for random tokens"
        )
    try:
        with text.open(encoding="utf-8") as file:
            begin = file.read(_CHARACTERS_PER_TOKEN * tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"--text {text}: cannot be read ({error}); name a text file in UTF-8") from error
    tokenizer = Tokenizer.from_buffer(whole_tokenizer(directory)["tokenizer.json"])
    ids = tokenizer.encode(begin, add_special_tokens=False).ids[:tokens]
    if not ids:
        raise ConfigInvalid(f"--text {text}: has no token; name a text such as those that you will serve")
    vocabulary = ModelConfig.from_directory(directory).vocab_size
    if max(ids) >= vocabulary:
        raise CheckpointInvalid(
            f"{directory / 'tokenizer.json'}: makes token {max(ids)}, and vocab_size in config.json is {vocabulary}; fetch "
            "a checkpoint whose files belong together"
        )
    return _sequences(directory, ids)


def _sequences(directory: Path, ids: list[int]) -> list[list[int]]:
    config = ModelConfig.from_directory(directory)
    fields = text_fields(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    first = fields.get("bos_token_id")
    # Attention sinks, which may have the largest keys, form at the first token.
    begin = [first] if type(first) is int and 0 <= first < config.vocab_size else []
    width = max(min(SEQUENCE_TOKENS, config.max_model_len) - len(begin), 1)
    return [begin + ids[start : start + width] for start in range(0, len(ids), width)]


def require_measurable(directory: Path, *, force: bool) -> None:
    """Check that scales can be measured for a checkpoint and kept beside it, before that takes long.

    Raises:
        MedhaError: the model is not supported or keeps latents; the checkpoint has scales; or its folder cannot be written.
    """
    config = _config_with_heads(directory)
    if config.quantisation is not None and config.quantisation.kv_scales is not None:
        raise ConfigInvalid(
            f"{directory}: the checkpoint has scales of its own, by the kv_cache_scheme of config.json, and they are used; "
            "--check shows what a text needs of them"
        )
    target = directory / KV_SCALES
    if target.exists() and not force:
        raise ConfigInvalid(
            f"{target} is there; use --force to replace it, or --check to see what a text needs"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigInvalid(
            f"{directory} cannot be written by this user, and {KV_SCALES} goes there; copy the checkpoint, or change the "
            "folder's mode"
        )


def measure_scales(
    directory: Path, sequences: Sequence[Sequence[int]], progress: Progress = lambda _done, _total: None
) -> list[LayerScales]:
    """Return scales for the K and V of each layer, by the largest numbers in these sequences.

    Raises:
        MedhaError: the checkpoint cannot be read, keeps latents, or makes numbers that are not finite.
    """
    config = _config_with_heads(directory)
    return [
        scales_of_largest(keys, values) for keys, values, _ in _layers(directory, config, sequences, progress)
    ]


def reach_of(
    directory: Path, sequences: Sequence[Sequence[int]], progress: Progress = lambda _done, _total: None
) -> list[HeadReach]:
    """Return how far these sequences reach into the range of the scales that a rank uses for FP8, whatever their source.

    Raises:
        MedhaError: as in `measure_scales`.
    """
    config = replace(_config_with_heads(directory), kv_dtype="fp8")
    found = []
    for index, (keys, values, scales) in enumerate(_layers(directory, config, sequences, progress)):
        assert scales is not None
        for kind, largest, scale in (("keys", keys, scales.keys), ("values", values, scales.values)):
            shares = (largest / (FP8_MAX * scale[:, 0])).tolist()
            found += [HeadReach(kind, index, head, share) for head, share in enumerate(shares)]
    return found


def write_scales(directory: Path, scales: Sequence[LayerScales]) -> Path:
    """Write the scales of all layers beside a checkpoint, in the names and shapes of compressed-tensors; return the file.

    Raises:
        ConfigInvalid: the file cannot be written.
    """
    tensors = {}
    form = StoredKvScales((), len(scales[0].keys), per_head=True)
    for index, one in enumerate(scales):
        named = form.tensors(f"model.layers.{index}.self_attn.")
        for (name, stored), scale in zip(named.items(), (one.keys, one.values), strict=True):
            tensors[name] = scale.reshape(stored.shapes[0]).contiguous()
    target = directory / KV_SCALES
    try:
        write_whole(target, save(tensors, metadata={"format": "pt"}))
    except OSError as error:
        raise ConfigInvalid(
            f"{target} cannot be written ({error.strerror}); free space, or change the folder's mode"
        ) from error
    return target


def _config_with_heads(directory: Path) -> ModelConfig:
    """Return the configuration of a checkpoint whose KV has heads.

    Raises:
        ModelUnsupported: it keeps latents.
    """
    config = ModelConfig.from_directory(directory)
    if config.latent is not None:
        raise ModelUnsupported(
            f"{directory}: a {config.architecture} keeps latents, whose scales follow from its weights; serve it with "
            "spec.kvCache.dtype fp8 as it is"
        )
    return config


def _layers(
    directory: Path, config: ModelConfig, sequences: Sequence[Sequence[int]], progress: Progress
) -> Iterator[tuple[torch.Tensor, torch.Tensor, LayerScales | None]]:
    """Yield the largest sizes of each layer's keys and values, float32 [kv_heads], and the scales for `config.kv_dtype`.

    Keys and values themselves stay in the checkpoint's data type.
    """
    exact = replace(config, kv_dtype="auto")
    device = host_device(DTYPES[config.dtype])
    kernels = choose_kernels(Shard.whole(exact).kernel_sizes(exact), device)
    entering = [torch.tensor(ids) for ids in sequences]
    for index in range(config.num_layers):
        progress(index, config.num_layers)
        shard = Shard(0, 1, index, index + 1, config.num_layers)
        weights = load_weights(
            directory, config, shard, device=device, pack=kernels.pack, pack_rows=kernels.pack_rows
        )
        model = Transformer(exact, shard, replace(weights, kv_scales=None), kernels=kernels)
        entering, keys, values = _through(model, entering)
        scales = None if weights.kv_scales is None else weights.kv_scales[0]
        del model, weights  # before the next layer is read
        if not bool(keys.isfinite().all() and values.isfinite().all()):
            raise CheckpointInvalid(
                f"{directory}: keys or values of layer {index} are not finite in {config.dtype}, so that they have no "
                "scale; fetch the checkpoint again"
            )
        yield keys, values, scales
    progress(config.num_layers, config.num_layers)


@torch.inference_mode()
def _through(
    model: Transformer, entering: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return what leaves a model of one layer for these sequences, and the largest sizes of its keys and values."""
    blocks = range(-(-max(map(len, entering)) // _BLOCK_TOKENS))
    pool = model.new_kv_cache(len(blocks), _BLOCK_TOKENS)
    leaving, sizes = [], []
    for rows in entering:
        span = SequenceSpan(0, len(rows), 0, blocks)
        step = model.prepare(torch.arange(len(rows)), [span], pool)
        leaving.append(model.forward(rows, step).clone())
        sizes.append(_sizes(pool.keys[0][:, : len(rows)], pool.values[0][:, : len(rows)]))
    keys, values = torch.stack(sizes).amax(0)
    return leaving, keys, values


def _sizes(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the largest sizes of keys and of values, [kv_heads, tokens, head_dim]: float32 [2, kv_heads]."""
    first, second = keys.float().chunk(2, dim=2)
    return torch.stack([torch.hypot(first, second).amax((1, 2)), values.float().abs().amax((1, 2))])
