"""The size of a rank's KV pool, and the error when a model does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from medha.errors import OutOfMemory

MIB = 2**20


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """Inputs to the size of a KV pool, in bytes of one rank unless stated otherwise."""

    block_bytes: int
    block_size_tokens: int
    max_model_len: int  # tokens
    max_running: int  # sequences
    size_bytes: int | None  # kvCache.size
    memory_fraction: float  # kvCache.memoryFraction
    weights_bytes: int
    activation_bytes: int


def pool_blocks(request: PoolRequest, free_bytes: int) -> int:
    """Return the number of blocks of the pool.

    That is what `kvCache.size` holds, or the fraction of `free_bytes`, but no more than can ever be used.
    `free_bytes` is the memory that this rank may still take after its weights are loaded. The warm-up is over
    and has released its activations, so they are subtracted here: every step needs them again.

    Raises:
        OutOfMemory: a sequence of `max_model_len` tokens would not fit, or `kvCache.size` exceeds the free
            memory; the text gives the numbers and the remedy.
    """
    longest_blocks = -(-request.max_model_len // request.block_size_tokens)
    free_bytes = max(free_bytes - request.activation_bytes, 0)
    if request.size_bytes is None:
        pool_bytes = int(free_bytes * request.memory_fraction)
        source = f"{request.memory_fraction:.0%} (kvCache.memoryFraction) of {_mib(free_bytes)} free"
        mend = "raise kvCache.memoryFraction, free memory"
    else:
        pool_bytes = request.size_bytes
        source = f"kvCache.size of {_mib(pool_bytes)}"
        mend = f"raise kvCache.size to at least {_mib(longest_blocks * request.block_bytes)}"
    blocks = min(pool_bytes // request.block_bytes, longest_blocks * request.max_running)
    if request.size_bytes is not None and pool_bytes > free_bytes:
        raise OutOfMemory(
            f"kvCache.size asks for {_mib(pool_bytes)}, but {_mib(free_bytes)} are free beside weights "
            f"({_mib(request.weights_bytes)}) and activations ({_mib(request.activation_bytes)}); lower it"
        )
    if blocks < longest_blocks:
        lower = f", or lower model.maxModelLen to {blocks * request.block_size_tokens}" if blocks else ""
        raise OutOfMemory(
            f"maxModelLen {request.max_model_len} needs {_mib(longest_blocks * request.block_bytes)} of KV; "
            f"{source} holds {blocks * request.block_size_tokens} tokens, beside weights "
            f"({_mib(request.weights_bytes)}) and activations ({_mib(request.activation_bytes)}); "
            f"{mend}{lower}"
        )
    return blocks


def exchange_bytes(
    *,
    lanes: int,
    passes_keys: bool,
    chunk_tokens: int,
    shard_tokens: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    kv_tensors: int = 2,
    element_bytes: int,
    kv_element_bytes: int,
) -> int:
    """Return the most memory that a layer shared by lanes takes on top of its activations.

    The warm-up runs on one lane and sees none of it. `chunk_tokens` is the size of the largest chunk,
    `shard_tokens` the most tokens that a lane holds of one request; the heads are this rank's. Queries arrive
    from each other lane and are joined with the rank's own; equally many float32 partial results, with their
    log-sum-exp, are computed and joined into a message. In a ring that passes K and V, one lane's blocks of a
    layer are sent while as many arrive; `kv_tensors` is 1 where latents are both.
    """
    if lanes == 1:
        return 0
    of_query = query_heads * (2 * head_dim * element_bytes + 2 * (head_dim + 1) * 4)
    passing = 2 * kv_tensors * kv_heads * shard_tokens * head_dim * kv_element_bytes if passes_keys else 0
    return (lanes - 1) * chunk_tokens * of_query + passing


def _mib(count: int) -> str:
    return f"{count / MIB:.0f} MiB"
