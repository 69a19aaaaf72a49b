"""Checks of a replica before any process is started: rules out what `config.json` or this machine forbids."""

from __future__ import annotations

from pathlib import Path

from medha.api.fields import quantity_bytes
from medha.api.replica import MedhaReplicaSpec
from medha.errors import ConfigInvalid
from medha.topology import stage_layers
from medha_worker.checkpoints.head_checkpoint import eagle3_weights_bytes, head_config
from medha_worker.model.model_config import ELEMENT_BYTES, ModelConfig

RANK_BYTES = 128 * 2**20
"""Least memory that a rank's process takes for itself: torch and its libraries, without weights and KV."""


def require_possible(
    spec: MedhaReplicaSpec, directory: Path, free_bytes: int, draft_directory: Path | None = None
) -> None:
    """Refuse what a machine with `free_bytes` of memory certainly cannot serve, before ranks measure what they need.

    `draft_directory` is that of the checkpoint of a draft model or head, if there is one.

    Raises:
        MedhaError: the model is not supported, the checkpoint's configuration is wrong, the grid does not fit
            the model, or memory does not suffice; the text names the field.
    """
    config = ModelConfig.from_directory(directory, spec.model.max_model_len, spec.model.rope_scaling)
    shape = spec.parallelism
    config.require_tensor_size(shape.tensor)
    stage_layers(config.num_layers, shape.stream)
    dtype = config.dtype if spec.model.dtype == "auto" else spec.model.dtype
    ranks = shape.tensor * shape.stream * shape.kv
    needed = ranks * RANK_BYTES + shape.kv * config.weights_bytes(ELEMENT_BYTES[dtype])
    speculation = spec.scheduling.speculation
    guessing = 0  # bytes of the draft model or head that each lane has
    if draft_directory is not None and speculation.eagle3:
        holds_embedding = shape.tensor * shape.stream == 1
        guessing = eagle3_weights_bytes(
            draft_directory, config, ELEMENT_BYTES[dtype], holds_embedding=holds_embedding
        )
    elif draft_directory is not None:
        # Imported here: it needs the package tokenizers, and what is not installed is reported otherwise.
        from medha_worker.checkpoints.draft_checkpoint import draft_config

        guessing = draft_config(draft_directory, directory, config).weights_bytes(ELEMENT_BYTES[dtype])
    elif speculation.prediction_head is not None:
        head_config(directory, config)
        guessing = config.head_weights_bytes(ELEMENT_BYTES[dtype])
    needed += shape.kv * guessing
    if needed > free_bytes:
        form = dtype if config.quantisation is None else config.quantisation.method
        raise ConfigInvalid(
            f"spec.parallelism: {ranks} ranks (tensor {shape.tensor} x stream {shape.stream} x kv {shape.kv}) need at least "
            f"{_gib(needed)} for their processes and {shape.kv} x the weights in {form}, but {_gib(free_bytes)} are free on "
            "this machine; lower parallelism, or free memory"
        )
    host_bytes = ranks * spec.kv_cache.host_bytes
    if host_bytes > free_bytes - needed:
        raise ConfigInvalid(
            f"spec.kvCache.tiers.host.size is {_gib(spec.kv_cache.host_bytes)} for each rank (of {ranks}), but "
            f"{_gib(free_bytes)} are free on this machine, of which processes and weights need {_gib(needed)}; lower it, or "
            "leave tiers out"
        )
    needed += host_bytes
    streaming_bytes = ranks * spec.kv_cache.streaming_bytes
    if streaming_bytes > free_bytes - needed:
        raise ConfigInvalid(
            f"spec.kvCache.streaming.size is {_gib(spec.kv_cache.streaming_bytes)} for each rank (of {ranks}), but "
            f"{_gib(free_bytes)} are free on this machine, of which all else needs {_gib(needed)}; lower it, or leave "
            "streaming out"
        )
    needed += streaming_bytes
    beside = [
        *(["the host tier"] if host_bytes else []),
        *(["streamed KV"] if streaming_bytes else []),
    ]
    takers = " and ".join([", ".join(["processes", "weights", *beside[:-1]]), *beside[-1:]])
    if not beside:
        takers = "processes and weights"
    size = spec.kv_cache.size
    if size is not None and quantity_bytes(size) > (free_bytes - needed) / ranks:
        raise ConfigInvalid(
            f"spec.kvCache.size is {size} for each rank (of {ranks}), but {_gib(free_bytes)} are free on this machine, of which "
            f"{takers} need {_gib(needed)}; lower it, or leave it out to take a share of what is free"
        )


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"
