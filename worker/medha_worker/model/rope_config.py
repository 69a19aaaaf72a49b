"""The rotary position embedding of a model: its kind and parameters, read without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """A kind of RoPE and its parameters; those that a kind does not use keep their defaults.

    Attributes:
        kind: `default`, `linear`, `llama3`, `yarn` or `dynamic`.
        theta: Base of the geometric series of wavelengths.
        factor: Factor by which the context was extended.
        original_max_position_tokens: Context length before the extension (llama3, yarn).
        attention_factor: Factor on cos and sin; None derives it (yarn).
        truncate: Whether to round yarn's correction range to whole dimensions.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
