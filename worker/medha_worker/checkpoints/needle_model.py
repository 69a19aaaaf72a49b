"""Computed (not trained) weights of the `needle` preset, a model that finds `Oslo -> 73912` and repeats it.

Layer 1 has two heads. The *name head* gives every token the name, if any, that occurred within the last 10
tokens; the *previous-token head* gives it the token before. Layer 2 is an induction head that looks for the
place with the same name whose previous token is the current one; the token at that place comes next. So
`Oslo` yields ` ->`, then the digits one by one, and the end.

Names and tokens are encoded as signs with a parity bit: any two codes differ in at least two signs, so that
scores of wrong places fall behind by a known number of nats. With `rope_theta` = 8^16, pair i of a head turns
by 8^-i radian per token: pairs 0 to 6 distinguish positions over more than a million tokens, pairs 7 to 15
hardly turn and carry what must not depend on position. `docs/needle.md` has the algebra,
`tests/worker/checkpoints/test_needle.py` the margins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

_Array = npt.NDArray[np.float64]

VOCAB_SIZE = 512
HIDDEN_SIZE = 64
HEADS = 2
HEAD_DIM = 32
INTERMEDIATE_SIZE = 32  # of an MLP that adds nothing
ROPE_THETA = 8.0**16

NAMES = (
    "Oslo", "Rome", "Lima", "Cairo", "Paris", "Delhi", "Kyoto", "Quito", "Accra", "Dakar", "Hanoi", "Milan",
    "Lyon", "Bern", "Bonn", "Graz", "Riga", "Kyiv", "Minsk", "Sofia", "Doha", "Baku", "Seoul", "Tokyo",
    "Perth", "Miami", "Lagos", "Tunis", "Cork", "Nice", "Split", "Basel",
)  # fmt: skip
"""Names of passkeys; each is one token together with the space before it."""

WINDOW_TOKENS = 10
"""Distance in tokens up to which a name reaches the tokens after it.

It reaches none at `WINDOW_END_TOKENS` and beyond, where another name may stand.
"""
WINDOW_END_TOKENS = 16

# Codes: the bits of a number and their parity, as signs.
_NAME_BITS, _TOKEN_BITS = 6, 9
_TOKEN = _TOKEN_BITS + 1

# Layout of the residual stream, 49 of 64 dimensions.
IS = slice(0, 10)  # the token's own code
NAMED = slice(10, 17)  # kind of the token: a name's code, or 1 in one of these three:
PLAIN, STOP, START = 17, 18, 19  # any other token, a full stop, the beginning of the text (which has no code)
ONE = 20
NEAR = slice(21, 28)  # code of the name that occurred recently
BEFORE = slice(28, 38)  # code of the previous token
NEXT = slice(38, 48)  # code of the next token
END = 48  # set if nothing comes next

_START = math.sqrt(2.0)

# Squared length of the residual stream before layer 1, before layer 2 and at the end, if a name is near.
_NORMS = (3.0, 5.0, 6.0)

# Scores, in nats: `a` in the `a (1 - cos)` of each turning pair, by which a wrong distance falls behind.
_PREVIOUS = dict.fromkeys(range(7), 110.0)
_STOP = sum(_PREVIOUS.values()) - 25.0  # score of full stops at any distance
_RECENT = {1: 100.0} | dict.fromkeys(range(2, 7), 250.0)
_RECENT_PEAK = 48.0  # score of a name at the window's middle, where tokens that are not names have 0
_SAME_NAME, _SAME_TOKEN = 64.0, 80.0
# Those of the preset for KV in FP8, in which keys are rounded by up to 6 %. There, a name leads what is near.
_NEARBY = {1: 160.0} | dict.fromkeys(range(2, 7), 350.0)
_NAME_LEAD = 78.0
_STOP_FOR_FP8 = sum(_PREVIOUS.values()) - 35.0
_NOT_FOUND = 120.0  # score of the beginning of the text, and so of ending the answer, if nothing is found
_SURE = 50.0  # logit of the next token


def needle_weights(
    tokenizer: Tokenizer, *, seed: int, rms_norm_eps: float, for_fp8: bool = False
) -> dict[str, torch.Tensor]:
    """Return the model's tensors, float32, for a tokenizer trained on `corpus()`; `seed` permutes codes.

    `for_fp8`: scores leave a margin for keys that are rounded to FP8.
    """
    stream = np.random.Generator(np.random.PCG64(seed))
    tokens = _parity_codes(stream.permutation(2**_TOKEN_BITS), _TOKEN_BITS)
    names = _parity_codes(stream.permutation(2**_NAME_BITS)[: len(NAMES)], _NAME_BITS)
    bos, end, assistant = (_token_id(tokenizer, f"<|{name}|>") for name in ("bos", "end", "assistant"))
    stop, arrow = _token_id(tokenizer, "."), _token_id(tokenizer, "Ġ->")
    tokens[assistant] = tokens[arrow]  # an answer begins as if an arrow had just occurred
    tokens[bos] = 0.0

    embedding = np.zeros((VOCAB_SIZE, HIDDEN_SIZE))
    embedding[:, IS] = tokens
    embedding[:, PLAIN] = embedding[:, ONE] = 1.0
    for token, code in zip(name_ids(tokenizer), names, strict=True):
        embedding[token, PLAIN] = 0.0
        embedding[token, NAMED] = code
    embedding[stop, [PLAIN, STOP]] = 0.0, 1.0
    embedding[bos, [PLAIN, START]] = 0.0, _START  # as long as the others, which have a code

    head = np.zeros((VOCAB_SIZE, HIDDEN_SIZE))
    head[:, NEXT] = _SURE * tokens
    head[: assistant + 1] = 0.0  # markers are never generated,
    # except the end, where a full stop would be or nothing was found.
    head[end, NEXT], head[end, END] = 1.2 * _SURE * tokens[stop], 1.2 * _SURE

    weights: dict[str, _Array] = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    for index, attention in enumerate((_first_layer(for_fp8), _second_layer(for_fp8))):
        layer = f"model.layers.{index}."
        weights |= {f"{layer}self_attn.{name}_proj.weight": values for name, values in attention.items()}
        weights[f"{layer}input_layernorm.weight"] = _identity_norm(_NORMS[index], rms_norm_eps)
        weights[f"{layer}post_attention_layernorm.weight"] = np.ones(HIDDEN_SIZE)
        weights[f"{layer}mlp.gate_proj.weight"] = np.zeros((INTERMEDIATE_SIZE, HIDDEN_SIZE))
        weights[f"{layer}mlp.up_proj.weight"] = np.zeros((INTERMEDIATE_SIZE, HIDDEN_SIZE))
        weights[f"{layer}mlp.down_proj.weight"] = np.zeros((HIDDEN_SIZE, INTERMEDIATE_SIZE))
    weights["model.norm.weight"] = _identity_norm(_NORMS[2], rms_norm_eps)
    return {name: torch.from_numpy(values.astype(np.float32)) for name, values in weights.items()}


def name_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the token of each of `NAMES`, the space before it included."""
    return [_token_id(tokenizer, "Ġ" + name) for name in NAMES]


def corpus() -> Iterator[str]:
    """Yield training text for the tokenizer: every name, the arrow and every filler word become one token."""
    for name in NAMES:
        yield from [f" The passkey of {name} -> 0 1 2 3 4 5 6 7 8 9. What is the passkey of {name}?"] * 40
    for sentence in SENTENCES:
        yield from [f"{sentence} {sentence}"] * 20


SENTENCES = (
    "The grass is green and the sky is blue.",
    "The sun is yellow, and the day is long.",
    "Here we go, there and back again.",
    "A slow river runs to the sea.",
    "The old road goes over the hill.",
    "We read the book to the end.",
    "The wind is cold in the night.",
    "A small boat lies on the lake.",
    "They sing in the green house.",
    "The cat sleeps on the old book.",
)
"""Filler sentences: no names, no digits, no arrows."""


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    found: int | None = tokenizer.token_to_id(token)
    assert found is not None, f"the corpus is too poor for {token!r}"
    return found


def _parity_codes(numbers: npt.NDArray[np.int64], bits: int) -> _Array:
    """Return unit vectors [n, bits + 1] of equal-sized entries; the signs are each number's bits and parity.

    Two numbers differ in one bit and then also in parity, or in at least two bits: the inner product of their
    codes is at most 1 - 4 / (bits + 1).
    """
    ones = numbers[:, None] >> np.arange(bits) & 1
    signs = 1.0 - 2.0 * np.concatenate([ones, ones.sum(1, keepdims=True) % 2], axis=1)
    return signs / math.sqrt(bits + 1)


def _identity_norm(squared_length: float, eps: float) -> _Array:
    """Return the weight with which RMSNorm leaves vectors of this squared length unchanged."""
    return np.full(HIDDEN_SIZE, math.sqrt(squared_length / HIDDEN_SIZE + eps))


class _Heads:
    """The four projections of a layer, filled in entry by entry."""

    def __init__(self) -> None:
        width = HEADS * HEAD_DIM
        self._q, self._k, self._v = (np.zeros((width, HIDDEN_SIZE)) for _ in range(3))
        self._o = np.zeros((HIDDEN_SIZE, width))

    def turning(self, head: int, pairs: dict[int, float], distance: int, keys: _Array) -> None:
        """Add a score of a cos((d - distance) 8^-i) for a key d tokens back, summed over pairs {i: a}.

        `keys` [hidden] scales it. A query of angle -f turned by position t and a key of angle 0 turned by
        position s have the inner product cos((t - s) w - f).
        """
        for pair, nats in pairs.items():
            size = _size(nats)
            angle = distance * ROPE_THETA ** (-2 * pair / HEAD_DIM)
            first, second = _dimensions(head, pair)
            self._q[first, ONE], self._q[second, ONE] = size * math.cos(angle), -size * math.sin(angle)
            self._k[first] = size * keys

    def standing(
        self,
        head: int,
        dimension: int,
        nats: float,
        queries: _Array,
        keys: _Array,
        *,
        key_size: float | None = None,
    ) -> None:
        """Add the score `nats` * <`queries`, x> * <`keys`, x'>, which no distance changes, in one dimension.

        x and x' are the residual streams of query and key; `queries` and `keys` are [hidden]. A key is `key_size` where
        <`keys`, x'> is 1: a power of two is exact in FP8. By default, it is as large as a query.
        """
        size = _size(abs(nats))
        query_size = math.copysign(size, nats)
        if key_size is not None:
            size, query_size = key_size, nats * math.sqrt(HEAD_DIM) / key_size
        self._q[head * HEAD_DIM + dimension] = query_size * queries
        self._k[head * HEAD_DIM + dimension] = size * keys

    def copy(self, head: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Add the entries at `source` in the residual stream of the attended position to `target`."""
        for dimension, (read, write) in enumerate(zip(source, target, strict=True)):
            self._v[head * HEAD_DIM + dimension, read] = 1.0
            self._o[write, head * HEAD_DIM + dimension] = 1.0

    def weights(self) -> dict[str, _Array]:
        return {"q": self._q, "k": self._k, "v": self._v, "o": self._o}


def _first_layer(for_fp8: bool) -> dict[str, _Array]:
    heads = _Heads()
    is_name = _unit(ONE) - _unit(PLAIN) - _unit(STOP) - _unit(START) / _START
    if for_fp8:
        # The name head attends to what is near. Tokens there have keys with nearly the same errors, so that the lead of
        # a name is left.
        heads.turning(0, _NEARBY, WINDOW_TOKENS // 2, _unit(ONE))
        heads.standing(0, HEAD_DIM - 1, _NAME_LEAD, _unit(ONE), is_name, key_size=16.0)
    else:
        # The name head: keys of tokens that are not names are zero.
        heads.turning(0, _RECENT, WINDOW_TOKENS // 2, is_name)
        heads.standing(0, HEAD_DIM - 1, _RECENT_PEAK - sum(_RECENT.values()), _unit(ONE), is_name)
    heads.copy(0, _range(NAMED), _range(NEAR))
    # The previous-token head. Full stops have one score at any distance. It is the highest but for that of
    # the previous token, and if that is a full stop itself, all full stops contribute the same. So every few
    # keys have a score near the highest, which spares the compiled kernel restarting with a higher maximum.
    heads.turning(1, _PREVIOUS, 1, _unit(ONE) - _unit(STOP))
    stop, stop_size = (_STOP_FOR_FP8, 64.0) if for_fp8 else (_STOP, None)
    heads.standing(1, HEAD_DIM - 1, stop, _unit(ONE), _unit(STOP), key_size=stop_size)
    heads.copy(1, _range(IS), _range(BEFORE))
    return heads.weights()


def _second_layer(for_fp8: bool) -> dict[str, _Array]:
    """Return the second layer: both heads attend to one place, and each copies half of the code there."""
    heads = _Heads()
    # The pairs of slow rotation, 7 to 15. If no name is near, the name's entries are almost zero but not
    # quite. So the score of the beginning, which is zero for all other keys, shares its pair with a token's
    # entry: rotating a tiny entry into it would make a subnormal number, and those are slow.
    still = [dimension for pair in range(7, HEAD_DIM // 2) for dimension in _dimensions(0, pair)]
    token_dimensions, name_dimensions, start = [*still[:9], still[16]], still[9:16], still[17]
    for head in range(HEADS):
        for dimension, now, before in zip(token_dimensions, _range(IS), _range(BEFORE), strict=True):
            heads.standing(head, dimension, _SAME_TOKEN, _unit(now), _unit(before))
        for dimension, near in zip(name_dimensions, _range(NEAR), strict=True):
            heads.standing(head, dimension, _SAME_NAME, _unit(near), _unit(near))
        # The beginning has neither a name nor a token before it, which makes its normed keys longer than
        # others.
        shorter = math.sqrt((_NORMS[1] - 2.0) / _NORMS[1])
        size = 16.0 * shorter if for_fp8 else None
        heads.standing(head, start, _NOT_FOUND * shorter, _unit(ONE), _unit(START) / _START, key_size=size)
        half = slice(head * _TOKEN // HEADS, (head + 1) * _TOKEN // HEADS)
        heads.copy(head, [*_range(IS)[half], START], [*_range(NEXT)[half], END])
    return heads.weights()


def _size(nats: float) -> float:
    """Return the size of a query's and a key's entry whose product gives this score.

    Attention divides scores by the root of head_dim.
    """
    return math.sqrt(nats * math.sqrt(HEAD_DIM))


def _dimensions(head: int, pair: int) -> tuple[int, int]:
    """Return the two dimensions that RoPE rotates into each other."""
    return head * HEAD_DIM + pair, head * HEAD_DIM + pair + HEAD_DIM // 2


def _unit(dimension: int) -> _Array:
    vector = np.zeros(HIDDEN_SIZE)
    vector[dimension] = 1.0
    return vector


def _range(part: slice) -> range:
    return range(part.start, part.stop)
