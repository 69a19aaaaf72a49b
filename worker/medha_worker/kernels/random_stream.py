"""The random stream of sampling: a hash of (seed, sample index, position, token id), the same on every device.

It is SplitMix64 (Steele, Lea, Flood 2014): a stream has a 64-bit key, and the token id is its counter. Integers
wrap around at 64 bits, so hashes and uniforms are equal to the bit wherever they are computed.
"""

from __future__ import annotations

from torch import Tensor

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
NOISE_SPAN = 42.0
"""A u of 52 bits keeps the race's noise inside (-3.7, 36.8): a logit further below the best one cannot win."""
_MASK_64 = 2**64 - 1


def stream_key(seed: int, sample_index: int) -> int:
    """Return the 64 bits that distinguish the stream of one sequence from all others."""
    return _mix(_mix(seed + GOLDEN_GAMMA) + (sample_index + 1) * GOLDEN_GAMMA)


def position_key(stream: int, position: int) -> int:
    """Return the key of the token at `position`, as a signed integer of 64 bits."""
    return _signed(_mix(stream + position))


def uniforms(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return float64 in (0, 1) for keys and token ids, int64 of shapes that broadcast."""
    # 52 bits, so that adding a half stays exact and u can be neither 0 nor 1.
    return (_shift_right(hashes(keys, tokens), 12).double() + 0.5) * 2.0**-52


def hashes(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return the 64 bits of each key's stream at the counter `tokens`, as int64, which torch wraps around."""
    value = (tokens + 1).mul_(_signed(GOLDEN_GAMMA)) + keys
    value.bitwise_xor_(_shift_right(value, 30)).mul_(_signed(MIX_1))
    value.bitwise_xor_(_shift_right(value, 27)).mul_(_signed(MIX_2))
    return value.bitwise_xor_(_shift_right(value, 31))


def gumbel_noise(uniform: Tensor) -> Tensor:
    """Return -ln(-ln(1 - u)) of uniforms, float64, which are overwritten; 1 - u is as uniform as u."""
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(value: int) -> int:
    """Finaliser of SplitMix64: a bijection of 64 bits that looks random."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK_64
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK_64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift_right(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)
