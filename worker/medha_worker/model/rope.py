"""Rotary position embedding: the angles by which a model rotates its queries and keys.

Every kind is a choice of inverse frequencies and one factor on cos and sin. They are computed in float32, in
the same order of operations as in `transformers`: at position 10^6, an angle whose frequency is off by one
float32 rounding is off by 0.06 radian, so "the same up to rounding" would not be the same.
"""

import math

import torch

from medha_worker.model.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return radians per token of each dimension pair, float32 [head_dim / 2], and the factor on cos, sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    wavelength_scale = rope.theta**exponents
    frequencies = 1.0 / wavelength_scale
    match rope.kind:
        # `dynamic` is served only within the original length, where it does not scale (model_config.py refuses the
        # rest).
        case "default" | "dynamic":
            return frequencies, 1.0
        case "linear":
            return frequencies / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, frequencies), 1.0
        case "yarn":
            return _yarn(rope, wavelength_scale), _yarn_attention_factor(rope)
    raise AssertionError(f"model_config.py let RoPE kind {rope.kind!r} through")


def rotation_table(
    frequencies: torch.Tensor, attention_factor: float, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, float32 [tokens, head_dim / 2], at `positions` (int64 [tokens]).

    Positions are exact in float32 up to 2^24 (16.7 M tokens).
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those between (Llama 3.1)."""
    original = rope.original_max_position_tokens
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    is_long, is_short = wavelength > original / low, wavelength < original / high
    stretched = torch.where(is_long, frequencies / rope.factor, frequencies)
    kept_share = (original / wavelength - low) / (high - low)
    blended = (1 - kept_share) * stretched / rope.factor + kept_share * stretched
    return torch.where(is_long | is_short, stretched, blended)


def _yarn(rope: RopeConfig, wavelength_scale: torch.Tensor) -> torch.Tensor:
    """Keep frequencies that turn often within the original context, stretch slow ones (YaRN, eq. 20-23)."""
    head_dim = 2 * wavelength_scale.numel()

    def dimension_that_turns(times: float) -> float:
        turns = rope.original_max_position_tokens / (times * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_share = 1 - ramp
    return 1.0 / (rope.factor * wavelength_scale) * (1 - kept_share) + 1.0 / wavelength_scale * kept_share


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Return the attention temperature (YaRN, eq. 22), or the ratio of two if both mscales are given."""

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_temperature(rope.factor, rope.mscale) / yarn_temperature(rope.factor, rope.mscale_all_dim)
    return yarn_temperature(rope.factor, 1.0)


def yarn_temperature(factor: float, mscale: float) -> float:
    """Return the factor on queries and keys for a context that is `factor` times as long (YaRN, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
