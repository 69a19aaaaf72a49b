"""The random stream is SplitMix64 to the bit, its uniforms lie inside (0, 1), and its noise is exact to 2 ulp."""

from __future__ import annotations

import json
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

from medha_worker.device import host_device
from medha_worker.kernels.random_stream import gumbel_noise, hashes, position_key, stream_key, uniforms
from medha_worker.kernels.torch_race import SparseRace
from medha_worker.model.sampler import SampledToken
from medha_worker.model.token_sampler import TokenSampler

from ..sampling_cases import case, results

MASK = 2**64 - 1
RECORD = Path(__file__).with_name("sampling_record.json")
"""Tokens of the first cases, by case, step and row (null: none could be sampled). A change of them changes the text of
requests that are resumed by another version."""


def split_mix(state: int) -> int:
    """SplitMix64's output for a state, by integers without bounds (Steele, Lea, Flood 2014)."""
    value = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


KEYS = [
    position_key(stream_key(seed, sample), position)
    for seed, sample, position in ((0, 0, 0), (-5, 3, 10**6), (2**63, 0, 7))
]
TOKENS = [0, 1, 2, 1000, 151_935]


def test_hashes_are_split_mix_of_the_key_at_the_token() -> None:
    found = hashes(torch.tensor(KEYS)[:, None], torch.tensor(TOKENS))
    for key, row in zip(KEYS, found.tolist(), strict=True):
        for token, value in zip(TOKENS, row, strict=True):
            assert value & MASK == split_mix(((token + 1) * 0x9E3779B97F4A7C15 + key) & MASK)


def test_uniforms_are_the_upper_bits_and_never_an_end() -> None:
    found = uniforms(torch.tensor(KEYS)[:, None], torch.tensor(TOKENS))
    bits = hashes(torch.tensor(KEYS)[:, None], torch.tensor(TOKENS)).numpy().view(np.uint64) >> np.uint64(12)
    assert (found.numpy() * 2.0**52 - 0.5 == bits).all()
    for upper in (0, 2**52 - 1):
        assert 0.0 < (upper + 0.5) * 2.0**-52 < 1.0


@pytest.mark.parametrize("upper", [0, 1, 2**20, 2**51, 2**52 - 2, 2**52 - 1])
def test_noise_is_exact_to_two_units_in_the_last_place(upper: int) -> None:
    uniform = (upper + 0.5) * 2.0**-52
    found = float(gumbel_noise(torch.tensor([uniform], dtype=torch.float64)))
    with mpmath.workprec(200):
        exact = -mpmath.log(-mpmath.log(1 - mpmath.mpf(uniform)))
        assert abs(found - exact) <= 2 * np.spacing(max(1.0, abs(found)))


def test_samples_are_those_of_the_versions_before() -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert len(recorded) == 120
    for number, wanted in enumerate(recorded):
        sampler = TokenSampler(SparseRace(), host_device(torch.float32))
        found = [
            [one.token if isinstance(one, SampledToken) else None for one in step]
            for step in results(case(number), sampler.sample)
        ]
        assert found == wanted, number
