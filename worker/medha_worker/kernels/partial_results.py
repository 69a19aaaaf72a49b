"""Merges attention over disjoint sets of keys by its log-sum-exp, in torch on any device."""

import math
from collections.abc import Sequence

import torch


def merge_partials(
    outputs: Sequence[torch.Tensor], log_sum_exps: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union (FlashDecoding's merge).

    Args:
        outputs: At least one, each [..., head_dim]; zeros for an empty set.
        log_sum_exps: Natural logarithms, float32 [...]; -inf for an empty set.

    Returns:
        Output in the first one's dtype, and log-sum-exp of the union; zeros and -inf if all sets are empty.
        For a single set, its log-sum-exp is the given tensor, and so is its output if that is float32.
    """
    # Pairwise, in few operations: a decode over lanes waits for each of them in every layer.
    merged, union = outputs[0].float(), log_sum_exps[0]
    for output, part in zip(outputs[1:], log_sum_exps[1:], strict=True):
        weight = torch.sigmoid(part - union).masked_fill_(part == -math.inf, 0.0)  # -inf - -inf is NaN
        merged = torch.lerp(merged, output.float(), weight[..., None])
        union = torch.logaddexp(union, part)
    return merged.to(outputs[0].dtype), union


def add_sinks(
    output: torch.Tensor, log_sum_exp: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let each row see one key more, whose score is its head's sink and whose value is zero.

    Args:
        output: [rows, heads, head_dim].
        log_sum_exp: Natural logarithms, float32 [rows, heads].
        sinks: [heads].

    Returns:
        Output in the same dtype, and log-sum-exp.
    """
    sinks = sinks.float()
    kept_share = torch.sigmoid(log_sum_exp - sinks)
    return (output.float() * kept_share[..., None]).to(output.dtype), torch.logaddexp(log_sum_exp, sinks)
