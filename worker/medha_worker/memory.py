"""How large a rank's KV pool is, and what it says when a model does not fit (DESIGN §6, *Memory*)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from medha.errors import OutOfMemory

MIB = 2**20


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What decides on the size of a KV pool; everything in bytes of one rank unless named otherwise."""

    block_bytes: int
    block_size_tokens: int
    max_model_len: int  # tokens
    max_running: int  # sequences
    size_bytes: int | None  # kvCache.size
    memory_fraction: float  # kvCache.memoryFraction
    weights_bytes: int
    activation_bytes: int


def pool_blocks(request: PoolRequest, free_bytes: int) -> int:
    """Blocks of the pool: `kvCache.size`, or the fraction of `free_bytes`, but no more than can ever be used.

    `free_bytes` is what this rank may still take, weights loaded and the warm-up over.

    Raises:
        OutOfMemory: a sequence of `max_model_len` tokens would not fit; the text names the numbers and the mend.
    """
    longest_blocks = -(-request.max_model_len // request.block_size_tokens)
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
        raise OutOfMemory(
            f"maxModelLen {request.max_model_len} needs {_mib(longest_blocks * request.block_bytes)} of KV; "
            f"{source} holds {blocks * request.block_size_tokens} tokens, beside weights "
            f"({_mib(request.weights_bytes)}) and activations ({_mib(request.activation_bytes)}); "
            f"{mend}, or lower model.maxModelLen to {blocks * request.block_size_tokens}"
        )
    return blocks


def host_free_bytes(ranks_on_host: int, root: Path = Path("/")) -> int:
    """Memory that one of the ranks on this host may still take: the machine's, within its cgroup's limit."""
    free = psutil.virtual_memory().available
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = _read_bytes(root / limit_file), _read_bytes(root / usage_file)
        if limit is not None and usage is not None:
            free = min(free, max(limit - usage, 0))
    return free // ranks_on_host


_CGROUP_FILES = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),  # version 2
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),  # version 1
)


def _read_bytes(path: Path) -> int | None:
    """The number in a cgroup file; None where there is none, or no limit (`max`)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _mib(count: int) -> str:
    return f"{count / MIB:.0f} MiB"
