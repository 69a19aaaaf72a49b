"""Hashes of outputs equal those of the next turn's prompt."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from medha.kv.prefix_cache import PrefixHasher
from medha_worker.controller.output_hashes import OutputHasher

HASHER = PrefixHasher(4, b"secret")


@given(prompt=st.lists(st.integers(0, 9), max_size=20), output=st.lists(st.integers(0, 9), max_size=30))
def test_prompt_and_output_have_the_hashes_of_a_prompt_of_both(prompt: list[int], output: list[int]) -> None:
    start = HASHER.start()
    start.update(np.array(prompt, dtype=np.int32))
    outputs = OutputHasher()
    outputs.begin("a", start)
    hashes = start.hashes
    for count, token in enumerate(output, start=1):
        filled = outputs.add("a", token)
        assert bool(filled) == ((len(prompt) + count) % 4 == 0), (
            "a hash comes with the token that fills its block"
        )
        hashes += filled
    assert hashes == HASHER.hashes(np.array(prompt + output, dtype=np.int32))


def test_samples_of_one_prompt_are_followed_apart() -> None:
    start = HASHER.start()
    start.update(np.arange(3, dtype=np.int32))
    outputs = OutputHasher()
    for name in ("a", "b"):
        outputs.begin(name, start)
    assert outputs.add("a", 7) != outputs.add("b", 8)
    outputs.end("a")
    outputs.end("a")
    assert "a" not in outputs
    assert len(outputs) == 1
    assert start.hashes == ""
