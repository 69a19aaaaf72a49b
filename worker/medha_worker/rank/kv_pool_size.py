"""The size of a rank's KV pool, and the error when a model does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from medha.errors import OutOfMemory
from medha.kv.window_tables import CACHED_WINDOW_PART, WindowNeed

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
    windows: WindowNeed | None = None  # of layers with a window; None: they do not free the KV before it
    window_block_bytes: int = 0  # part of `block_bytes` in such layers
    caches_windows: bool = False  # these layers get room for windows of cached prefixes, too
    streamed_blocks: int = 0  # of the longest sequence, which need no place in the pool
    streamed_share: float = 1.0  # largest share of the pool that such a sequence takes

    @property
    def longest_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size_tokens)

    @property
    def least_blocks(self) -> int:
        """Blocks of a pool that can hold the longest sequence, with the part of it that is streamed."""
        if not self.streamed_blocks:
            return self.longest_blocks
        beside = max(self.longest_blocks - self.streamed_blocks, 1)
        return min(self.longest_blocks, ceil(beside / self.streamed_share) + 1)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Blocks of a pool, or of two."""

    whole: int  # if every layer keeps the whole context; 0: the longest sequence does not fit
    beside_windows: int  # of the layers without a window, if the others free KV before it; 0: it does not fit
    windows: int = 0  # of the layers with one, in this case


def pool_sizes(request: PoolRequest, free_bytes: int) -> PoolSizes:
    """Return the sizes of the pool; the arguments are those of `pool_blocks`.

    Raises:
        OutOfMemory: no form of it holds a sequence of `max_model_len` tokens, or `kvCache.size` exceeds the free memory.
    """
    _require_free(request, free_bytes)
    beside_windows, windows = _best_beside_windows(request, _pool_bytes(request, free_bytes))
    try:
        return PoolSizes(pool_blocks(request, free_bytes), beside_windows, windows)
    except OutOfMemory:
        if beside_windows == 0:
            raise
        return PoolSizes(0, beside_windows, windows)


def keeps_windows_alone(whole_blocks: int, blocks_beside_windows: int) -> bool:
    """Return whether layers free KV before their windows, given the blocks of the pool if they do not and if they do.

    They do if more tokens fit then, which is not so if the windows of running sequences take more than whole requests.
    """
    return blocks_beside_windows > whole_blocks


def _best_beside_windows(request: PoolRequest, pool_bytes: int) -> tuple[int, int]:
    """Return the blocks of the layers without a window, and those of the others; 0 if the longest sequence does not fit.

    The windows are those of `max_running` sequences if more tokens fit beside them than in a pool of all layers, else of fewer.
    """
    if request.windows is None:
        return 0, 0
    whole_blocks = pool_bytes // request.block_bytes
    in_all_layers = request.block_bytes == request.window_block_bytes
    found = [
        _beside_windows(request, pool_bytes, blocks)
        for blocks in request.windows.pools(request.max_running, whole_blocks, in_all_layers=in_all_layers)
    ]
    usable_blocks = min(whole_blocks, request.longest_blocks * request.max_running)
    return next((sizes for sizes in found if keeps_windows_alone(usable_blocks, sizes[0])), max(found))


def _beside_windows(request: PoolRequest, pool_bytes: int, window_blocks: int) -> tuple[int, int]:
    """Return the blocks of the layers without a window, and those of the others, at least `window_blocks`.

    Both are 0 if the longest sequence does not fit. For cached prefixes, the latter get one more block for each
    `CACHED_WINDOW_PART` blocks of the former, and the memory that the former could not use.
    """
    left_bytes = pool_bytes - window_blocks * request.window_block_bytes
    if left_bytes < 0:
        return 0, 0
    longest_blocks = -(-request.max_model_len // request.block_size_tokens)
    most_blocks = longest_blocks * request.max_running
    block_bytes, window_bytes = request.block_bytes - request.window_block_bytes, request.window_block_bytes
    part = CACHED_WINDOW_PART
    shared_bytes = part * block_bytes + (window_bytes if request.caches_windows else 0)
    blocks = min(left_bytes * part // shared_bytes, most_blocks) if block_bytes else most_blocks
    if blocks < longest_blocks:
        return 0, 0
    if not request.caches_windows:
        return blocks, window_blocks
    left_bytes -= blocks * block_bytes
    more_blocks = max(most_blocks - window_blocks, 0)
    cached = min(left_bytes // window_bytes, more_blocks) if window_bytes else more_blocks
    return blocks, window_blocks + cached


def _pool_bytes(request: PoolRequest, free_bytes: int) -> int:
    if request.size_bytes is not None:
        return request.size_bytes
    return int(max(free_bytes - request.activation_bytes, 0) * request.memory_fraction)


def _require_free(request: PoolRequest, free_bytes: int) -> None:
    """Refuse a `kvCache.size` that exceeds the free memory, in whatever form layers keep their KV."""
    free_bytes = max(free_bytes - request.activation_bytes, 0)
    if request.size_bytes is not None and request.size_bytes > free_bytes:
        raise OutOfMemory(
            f"kvCache.size asks for {_mib(request.size_bytes)}, but {_mib(free_bytes)} are free beside weights "
            f"({_mib(request.weights_bytes)}) and activations ({_mib(request.activation_bytes)}); lower it"
        )


def pool_blocks(request: PoolRequest, free_bytes: int) -> int:
    """Return the number of blocks of the pool.

    They are what `kvCache.size` holds, or the fraction of `free_bytes`, but at most what can ever be used.
    `free_bytes` is the memory that this rank may still take after its weights are loaded. The warm-up has
    released its activations, which every step needs again, so they are subtracted here.

    Raises:
        OutOfMemory: a sequence of `max_model_len` tokens would not fit, or `kvCache.size` exceeds the free
            memory; the text gives the numbers and the remedy.
    """
    _require_free(request, free_bytes)
    longest_blocks, least_blocks = request.longest_blocks, request.least_blocks
    pool_bytes = _pool_bytes(request, free_bytes)
    free_bytes = max(free_bytes - request.activation_bytes, 0)
    if request.size_bytes is None:
        source = f"{request.memory_fraction:.0%} (kvCache.memoryFraction) of {_mib(free_bytes)} free"
        remedy = "raise kvCache.memoryFraction, free memory"
    else:
        source = f"kvCache.size of {_mib(pool_bytes)}"
        remedy = f"raise kvCache.size to at least {_mib(least_blocks * request.block_bytes)}"
    blocks = min(pool_bytes // request.block_bytes, longest_blocks * request.max_running)
    if blocks < least_blocks:
        fits = blocks if not request.streamed_blocks else _longest_with(request, blocks)
        lower = f", or lower model.maxModelLen to {fits * request.block_size_tokens}" if fits else ""
        if request.streamed_blocks:
            streamed_tokens = request.streamed_blocks * request.block_size_tokens
            source = f"{streamed_tokens} of its tokens can be streamed (kvCache.streaming.size); {source}"
            remedy += ", raise kvCache.streaming.size"
        raise OutOfMemory(
            f"maxModelLen {request.max_model_len} needs {_mib(longest_blocks * request.block_bytes)} of KV; "
            f"{source} holds {blocks * request.block_size_tokens} tokens, beside weights "
            f"({_mib(request.weights_bytes)}) and activations ({_mib(request.activation_bytes)}); "
            f"{remedy}{lower}"
        )
    return blocks


def _longest_with(request: PoolRequest, blocks: int) -> int:
    """Return the blocks of the longest sequence beside a pool of so many blocks, with what is streamed."""
    return max(blocks, int(request.streamed_share * blocks) + request.streamed_blocks) if blocks else 0


def exchange_bytes(
    *,
    lanes: int,
    passes_keys: bool,
    chunk_tokens: int,
    shard_tokens: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    query_dim: int | None = None,
    result_dim: int | None = None,
    kv_tensors: int = 2,
    element_bytes: int,
    kv_element_bytes: int,
) -> int:
    """Return the most memory that a layer shared by lanes takes on top of its activations.

    The warm-up runs on one lane and sees none of it. `chunk_tokens` is the size of the largest chunk,
    `shard_tokens` the most tokens that a lane holds of one request; the heads are this rank's. Queries arrive
    from each other lane and are joined with the rank's own; equally many float32 partial results, with their
    log-sum-exp, are computed and joined into a message. Queries and results are as wide as keys unless `query_dim` and
    `result_dim` say otherwise. In a ring that passes K and V, one lane's blocks of a
    layer are sent while as many arrive; `kv_tensors` is 1 if a latent stands for both.
    """
    if lanes == 1:
        return 0
    query_dim, result_dim = query_dim or head_dim, result_dim or head_dim
    of_query = query_heads * (2 * query_dim * element_bytes + 2 * (result_dim + 1) * 4)
    passing = 2 * kv_tensors * kv_heads * shard_tokens * head_dim * kv_element_bytes if passes_keys else 0
    return (lanes - 1) * chunk_tokens * of_query + passing


def _mib(count: int) -> str:
    return f"{count / MIB:.0f} MiB"
