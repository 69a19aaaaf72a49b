"""Torch's own fused attention with its log-sum-exp, on CPUs and on GPUs, behind a wrapper that guards its pitfalls.

`aten::_scaled_dot_product_flash_attention_for_cpu` is private, but it is torch's only operator that returns
the log-sum-exp on a CPU. Empty input kills the process (SIGFPE), `is_causal` is aligned to the top left, and
a row whose keys are all masked gets the log-sum-exp 0 instead of -inf. Therefore no input here is empty,
causal attention has as many keys as rows, and there are no masks. If the operator is missing or has changed,
plain torch is used.

On a GPU, `_scaled_dot_product_flash_attention` computes 16-bit types and `_scaled_dot_product_efficient_attention`
float32. Both are aligned to the top left, too; the second pads its log-sum-exp to a multiple of 32 rows. Shapes, types
and devices of this path are tested without a GPU, and its numbers by `make gpu-check` on one (docs/gpu.md).
"""

import math

import torch

_SCHEMA = (
    "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
)
_operator = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
HAS_OPERATOR = _operator is not None and str(_operator.default._schema) == _SCHEMA

_MOST_HEAD_DIM = 256  # of torch's kernels for GPUs
# Most scores that the fallback keeps at a time, so that a long context does not need rows x keys of memory.
_STAND_IN_SCORES = 1 << 22


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: int = 0,
    window: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute exact attention of rows to keys, and the log-sum-exp (natural) of each row's scaled scores.

    Args:
        q: [batch, heads, rows, head_dim]; `k` and `v` are [batch, kv_heads, keys, head_dim], and each KV head
            serves `heads / kv_heads` consecutive heads. Any strides, as long as the last dimension is
            contiguous. No dimension may be 0.
        scale: Factor on the scores.
        causal: If not 0, each row sees as many keys more than the row before it, and the last row sees the last
            key. Without a window, the first row sees key 0 alone.
        window: If given, the first key that the first row sees, and the number of keys by which the first key that a
            row sees comes after that of the row before it. Every row sees a key.

    Returns:
        Output like `q`, and the log-sum-exp, float32 [batch, heads, rows].
    """
    assert q.shape[2] > 0, "empty queries would crash the process"
    assert k.shape[2] > 0, "empty keys would crash the process"
    before = k.shape[2] - (q.shape[2] - 1) * causal - 1  # keys before the last one that the first row sees
    assert not causal or before == 0 or (before > 0 and window is not None), (
        "causal attention is aligned to the top left"
    )
    if HAS_OPERATOR and q.device.type == "cpu" and causal <= 1 and window is None:
        assert _operator is not None
        output, log_sum_exp = _operator.default(q, k, v, 0.0, bool(causal), scale=scale)
        return output, log_sum_exp
    fits_gpu = q.device.type == "cuda" and q.shape[-1] % 8 == 0 and q.shape[-1] <= _MOST_HEAD_DIM
    if fits_gpu and causal <= 1 and window is None:
        return _on_gpu(q, k, v, scale=scale, is_causal=bool(causal))
    return _plain(q, k, v, scale=scale, causal=causal, before=before, window=window)


def _on_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    if group > 1:  # a chunk's own tokens; heads of a context are folded into rows
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if q.dtype == torch.float32:
        attend = torch.ops.aten._scaled_dot_product_efficient_attention.default
        output, log_sum_exp, *_ = attend(q, k, v, None, True, 0.0, is_causal, scale=scale)
    else:
        attend = torch.ops.aten._scaled_dot_product_flash_attention.default
        output, log_sum_exp, *_ = attend(q, k, v, 0.0, is_causal, scale=scale)
    return output, log_sum_exp[..., : q.shape[2]]


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: int,
    before: int,
    window: tuple[int, int] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same in plain torch, a few rows at a time, in float32.

    If `causal` is not 0, `before` is the index of the last key that the first row sees.
    """
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    group = heads // k.shape[1]  # query heads that share a KV head
    k_float, v_float = (x.float().repeat_interleave(group, 1) for x in (k, v))
    output = torch.empty_like(q)
    log_sum_exp = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    step = max(1, _STAND_IN_SCORES // (batch * heads * keys))
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        scores = q[:, :, part].float() @ k_float.transpose(2, 3) * scale
        row = torch.arange(part.start, part.stop, device=q.device)[:, None]
        key = torch.arange(keys, device=q.device)[None, :]
        if causal:
            scores.masked_fill_(key > before + row * causal, -math.inf)
        if window is not None:
            scores.masked_fill_(key < window[0] + row * window[1], -math.inf)
        log_sum_exp[:, :, part] = scores.logsumexp(-1)
        output[:, :, part] = (scores.softmax(-1) @ v_float).to(q.dtype)
    return output, log_sum_exp
