"""The race for the next token as one kernel: hash, noise and the largest sum, without the noise ever in memory.

It computes what `torch_race.DenseRace` computes: hashes and uniforms are equal to the bit, and the noise differs by the rounding of
two logarithms. 1 - u is exact for a u of 52 bits and a half, so that ln(1 - u) loses nothing against log1p.

Tests run it by Triton's interpreter and compile it for sm_80, sm_90 and sm_100; `make gpu-check` runs it on a GPU (docs/gpu.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from medha_worker.kernels.random_stream import GOLDEN_GAMMA, MIX_1, MIX_2

TOKENS = 1024
"""Tokens of one program; a power of two."""

_GAMMA, _FIRST, _SECOND = tl.constexpr(GOLDEN_GAMMA), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit  # type: ignore[untyped-decorator]
def race_kernel(scores, keys, best, tokens, row_stride, vocab, parts, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the best sum of a row's part, and its token.

    scores: float64 [rows, vocab] with `row_stride`; keys: int64 [rows]; best, tokens: [rows, parts], float64 and int64.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * size + tl.arange(0, size)
    is_token = token < vocab
    score = tl.load(scores + row.to(tl.int64) * row_stride + token, mask=is_token, other=-float("inf"))
    value = (token.to(tl.uint64) + 1) * _GAMMA + tl.load(keys + row).to(tl.uint64)
    value = (value ^ (value >> 30)) * _FIRST
    value = (value ^ (value >> 27)) * _SECOND
    value = value ^ (value >> 31)
    uniform = ((value >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    noisy = score - tl.log(-tl.log(1.0 - uniform))
    largest, index = tl.max(noisy, axis=0, return_indices=True)
    tl.store(best + row * parts + part, largest)
    # Where a row holds NaN, any index wins, also one behind the vocabulary.
    tl.store(tokens + row * parts + part, tl.minimum(part * size + index, vocab - 1).to(tl.int64))


class TritonRace:
    """`TokenRace` on a GPU."""

    def winners(self, scores: Tensor, keys: Tensor) -> Tensor:
        rows, vocab = scores.shape
        parts = -(-vocab // TOKENS)
        best = scores.new_empty(rows, parts)
        tokens = torch.empty(rows, parts, dtype=torch.int64, device=scores.device)
        race_kernel[rows, parts](scores, keys, best, tokens, scores.stride(0), vocab, parts, TOKENS)
        return tokens.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)
