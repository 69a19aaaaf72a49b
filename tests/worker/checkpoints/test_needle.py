"""The `needle` preset: the right place leads by the stated number of nats, and the answer is the passkey."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from medha.errors import ConfigInvalid
from medha.model.kv_dtype import KvDtype
from medha_worker.checkpoints.haystack import Haystack, make_haystack, question
from medha_worker.checkpoints.measured_kv_scales import measure_scales, random_sequences, write_scales
from medha_worker.checkpoints.needle_model import (
    BEFORE,
    IS,
    NAMED,
    NAMES,
    NEAR,
    WINDOW_END_TOKENS,
    WINDOW_TOKENS,
    name_ids,
)
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.rope import inverse_frequencies, rotation_table

from ..model.test_model_transformer import run_chunks
from ..models import kernels_of_a_rank, load_model

LONGEST = 2**18
NEEDED_NATS = math.log(LONGEST)  # one right place against 256 Ki wrong ones
HEADS, HEAD_DIM = 2, 32


class Model:
    """The tensors of a checkpoint, and its layers' results for vectors that a test makes."""

    def __init__(self, directory: Path) -> None:
        self.config = ModelConfig.from_directory(directory)
        self.tensors = load_file(directory / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.embedding = self.tensors["model.embed_tokens.weight"]
        self._frequencies, _ = inverse_frequencies(self.config.rope, HEAD_DIM)

    def projected(self, layer: int, which: str, hidden: torch.Tensor) -> torch.Tensor:
        """Project the residual stream [rows, hidden]; return [heads, rows, head_dim]."""
        norm = self.tensors[f"model.layers.{layer}.input_layernorm.weight"]
        mean_square = hidden.square().mean(-1, keepdim=True)
        normed = hidden * torch.rsqrt(mean_square + self.config.rms_norm_eps) * norm
        projected = normed @ self.tensors[f"model.layers.{layer}.self_attn.{which}_proj.weight"].T
        return projected.view(-1, HEADS, HEAD_DIM).transpose(0, 1)

    def turned(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate vectors by RoPE as the engine does, in float32."""
        cos, sin = rotation_table(self._frequencies, 1.0, positions)
        first, second = vectors.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.mT / math.sqrt(HEAD_DIM)


@pytest.fixture(scope="module", params=[0, 1])
def needle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("needle") / "needle"
    init_checkpoint(directory, preset="needle", seed=request.param)
    return directory


@pytest.fixture(scope="module")
def model(needle: Path) -> Model:
    return Model(needle)


@pytest.mark.parametrize("last", [1, 2, 60, 711, 4097, 2**16, LONGEST - 1, 2**20 - 1])
def test_the_previous_token_outweighs_all_others_together(model: Model, last: int) -> None:
    """Positions are real ones, in float32: rotations are rounded, and the rounding must not matter."""
    positions = torch.arange(last + 1)
    any_token = model.embedding[300:301]
    q = model.turned(model.projected(0, "q", any_token)[1], positions[-1:])
    k = model.turned(model.projected(0, "k", any_token)[1].expand(last + 1, -1), positions)
    scores = model.scores(q, k)[0]
    rivals = scores[positions != last - 1]
    assert scores[last - 1] - rivals.max() > NEEDED_NATS + 20
    assert scores[last - 1] - rivals.logsumexp(0) > 20


def test_full_stops_come_second_and_first_only_where_one_is_the_previous_token(model: Model) -> None:
    """Therefore the maximum over any few keys is near the highest score, which keeps the compiled kernel fast."""
    positions = torch.tensor([0, 10, 5000, 2**18, 2**20])
    stop, any_token = model.embedding[model.tokenizer.token_to_id(".")], model.embedding[300:301]
    q = model.turned(model.projected(0, "q", any_token)[1], positions[-1:] + 1)
    keys = model.projected(0, "k", stop[None])[1].expand(len(positions), -1)
    of_stops = model.scores(q, model.turned(keys, positions))[0]
    previous = model.scores(q, model.turned(model.projected(0, "k", any_token)[1], positions[-1:]))[0, 0]
    assert torch.allclose(previous - of_stops, torch.tensor(25.0), atol=0.1)
    rivals = model.turned(model.projected(0, "k", any_token)[1].expand(10**4, -1), torch.arange(10**4))
    assert (
        of_stops.min() - model.scores(q, rivals).max() > -3
    )  # and full stops outweigh all tokens that are further away


def test_a_name_reaches_exactly_the_window_behind_it(model: Model) -> None:
    """Tokens that are not names have the score 0, so a million of them weigh ln 2^20 = 13.9."""
    name = model.embedding[name_ids(model.tokenizer)]
    positions = torch.arange(2**20)
    q = model.turned(model.projected(0, "q", model.embedding[300:301])[0], positions[-1:])
    k = model.turned(model.projected(0, "k", name[:1])[0].expand(2**20, -1), positions)
    by_distance = model.scores(q, k)[0].flip(0)
    assert by_distance[: WINDOW_TOKENS + 1].min() > math.log(2**20) + 12
    assert by_distance[WINDOW_END_TOKENS:].max() < -20
    others = torch.ones(512, dtype=torch.bool)
    others[name_ids(model.tokenizer)] = False
    assert model.projected(0, "k", model.embedding[others])[0].abs().max() < 1e-5


def test_the_right_place_wins_against_every_wrong_one_at_every_distance(model: Model) -> None:
    """The test covers all pairs of names and of tokens, with the rotation between two places up to 256 Ki apart.

    The score is the sum of a part for the name and one for the token. So the closest wrong places are wrong in one of
    the two, or have the right token and no name near. The test makes vectors of the residual stream as layer 1 leaves
    them.
    """
    names = name_ids(model.tokenizer)
    # Markers do not occur in needles, and one of them has the code of the arrow.
    tokens = torch.arange(7, 512)
    base = model.embedding[300].clone()
    base[IS] = 0.0  # the entries that all tokens share, without this token's code

    def stream(
        now: torch.Tensor | None, near: torch.Tensor | None, before: torch.Tensor | None
    ) -> torch.Tensor:
        rows = max(len(codes) for codes in (now, near, before) if codes is not None)
        hidden = base.repeat(rows, 1)
        for codes, part in ((now, IS), (near, NEAR), (before, BEFORE)):
            if codes is not None:
                hidden[:, part] = codes
        return hidden

    token_codes, name_codes = model.embedding[tokens, IS], model.embedding[names, NAMED]
    some_token, some_name = token_codes[:1], name_codes[:1]
    still = [dimension for pair in range(7, 16) for dimension in (pair, pair + 16)]
    token_dimensions = [*still[:9], still[16]]
    name_dimensions = [*still[9:16], still[17]]  # with the score of the text's beginning

    for head in range(HEADS):
        q_names = model.projected(1, "q", stream(some_token, name_codes, some_token))[head]
        q_tokens = model.projected(1, "q", stream(token_codes, some_name, some_token))[head]
        k_names = model.projected(1, "k", stream(some_token, name_codes, some_token))[head]
        k_tokens = model.projected(1, "k", stream(some_token, some_name, token_codes))[head]
        k_nameless = model.projected(1, "k", stream(some_token, None, token_codes))[head]
        for vectors in (q_names, q_tokens, k_names, k_tokens, k_nameless):
            used = vectors.abs().amax(0).nonzero().flatten().tolist()
            assert set(used) <= {*name_dimensions, *token_dimensions}  # no pair that turns
        worst = math.inf
        for distance in torch.linspace(0, LONGEST, 65, dtype=torch.int64):
            far = distance.expand(1)
            name_part = model.scores(model.turned(_only(q_names, name_dimensions), far), k_names)
            token_part = model.scores(model.turned(_only(q_tokens, token_dimensions), far), k_tokens)
            nameless = model.scores(model.turned(_only(q_tokens, token_dimensions), far), k_nameless)
            right_name, right_token = name_part.diagonal(), token_part.diagonal()
            wrong_name = (right_name[:, None] - name_part).fill_diagonal_(math.inf).min()
            wrong_token = (right_token[:, None] - token_part).fill_diagonal_(math.inf).min()
            no_name = right_name.min() + (right_token - nameless.amax(1)).min()
            worst = min(worst, float(wrong_name), float(wrong_token), float(no_name))
        assert worst > NEEDED_NATS + 12


def _only(vectors: torch.Tensor, dimensions: list[int]) -> torch.Tensor:
    """Return the part of vectors in some dimensions, with what RoPE rotates from them into others."""
    mask = torch.zeros(HEAD_DIM)
    mask[dimensions] = 1.0
    return vectors * mask


def answers(needle: Path, haystack: Haystack) -> dict[str, str]:
    """Return the greedy answer of transformers to each question, over the haystack's KV."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(needle)
    model = transformers.AutoModelForCausalLM.from_pretrained(needle)
    found = {}
    for name in haystack.passkeys:
        encoded = tokenizer(haystack.text + question(name), return_tensors="pt")
        output = model.generate(**encoded, max_new_tokens=8, do_sample=False)
        found[name] = tokenizer.decode(output[0, encoded.input_ids.shape[1] :])
    return found


@pytest.mark.parametrize("seed", range(3))
def test_transformers_answers_every_question_and_ends(needle: Path, model: Model, seed: int) -> None:
    haystack = make_haystack(model.tokenizer, 700, seed=seed)
    expected = {name: f" {passkey}<|end|>" for name, passkey in haystack.passkeys.items()}
    assert answers(needle, haystack) == expected


@torch.inference_mode()
def recall(directory: Path, kv_dtype: KvDtype, tokens: int, seed: int = 0) -> float:
    """Return the share of the passkeys that the engine finds in a text, each with the end of its answer."""
    config = ModelConfig.from_directory(directory, kv_dtype=kv_dtype)
    model = load_model(directory, config, kernels=kernels_of_a_rank(config))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    haystack = make_haystack(tokenizer, tokens, seed=seed)
    found = 0
    for name, passkey in haystack.passkeys.items():
        asked = tokenizer.encode(haystack.text + question(name)).ids
        answered = tokenizer.encode(haystack.text + question(name) + f" {passkey}<|end|>").ids
        assert answered[: len(asked)] == asked
        read = torch.tensor(answered[:-1])
        chunks = [tokens // 2, len(read) - tokens // 2]
        best = run_chunks(model, read, chunks)[len(asked) - 1 :].argmax(-1)
        found += best.tolist() == answered[len(asked) :]
    return found / len(haystack.passkeys)


@pytest.fixture(scope="module")
def for_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("needle") / "needle-fp8"
    init_checkpoint(directory, preset="needle-fp8", seed=0)
    return directory


@pytest.mark.parametrize(
    ("tokens", "seed"),
    [(700, 0), (700, 1), (4096, 0), *(pytest.param(16_384, seed, marks=pytest.mark.long) for seed in (0, 1))],
)
def test_the_preset_for_fp8_finds_every_passkey_in_fp8(for_fp8: Path, tokens: int, seed: int) -> None:
    assert recall(for_fp8, "fp8", tokens, seed) == 1.0


def test_the_preset_for_fp8_finds_every_passkey_in_float32(for_fp8: Path) -> None:
    assert recall(for_fp8, "auto", 700) == 1.0


def test_in_fp8_the_other_preset_needs_scales_by_which_its_largest_key_is_exact(
    needle: Path, tmp_path: Path
) -> None:
    """A name's score is the difference of two of more than a thousand nats, of which one comes from the largest key.

    Random tokens are enough to measure it.
    """
    assert recall(needle, "auto", 700) == 1.0
    assert recall(needle, "fp8", 700) == 0.0
    scaled = Path(shutil.copytree(needle, tmp_path / "scaled"))
    write_scales(scaled, measure_scales(scaled, random_sequences(scaled, 4096, 0)))
    assert recall(scaled, "fp8", 700) > 0.8


def test_a_name_that_the_prompt_does_not_have_has_no_passkey(needle: Path, model: Model) -> None:
    haystack = make_haystack(model.tokenizer, 700, seed=0)
    missing = next(name for name in NAMES if name not in haystack.passkeys)
    asked = Haystack(haystack.text, haystack.tokens, {missing: ""}, {})
    assert answers(needle, asked) == {missing: "<|end|>"}


def test_a_haystack_has_its_length_and_its_needles_at_even_depths(model: Model) -> None:
    haystack = make_haystack(model.tokenizer, 4096, seed=3)
    encoded = model.tokenizer.encode(haystack.text)
    assert 4086 <= len(encoded.ids) == haystack.tokens <= 4096
    assert [encoded.tokens[place] for place in haystack.positions.values()] == [
        f"Ġ{name}" for name in haystack.passkeys
    ]
    for index, position in enumerate(haystack.positions.values()):
        assert abs(position - 4096 * index / 10) < 40
    for passkey in haystack.passkeys.values():
        assert len(set(passkey)) == 5


def test_a_haystack_too_short_for_its_needles_or_with_too_many_names_is_refused(model: Model) -> None:
    with pytest.raises(ConfigInvalid, match="tokens is 200"):
        make_haystack(model.tokenizer, 200, seed=0)
    with pytest.raises(ConfigInvalid, match="needles is"):
        make_haystack(model.tokenizer, 10_000, seed=0, needles=len(NAMES) + 1)


@pytest.mark.parametrize("preset", ["needle", "needle-fp8"])
@pytest.mark.parametrize("option", [{"architecture": "qwen3"}, {"dtype": "bfloat16"}])
def test_only_llama_in_float32_is_made(tmp_path: Path, option: dict[str, str], preset: str) -> None:
    with pytest.raises(ConfigInvalid, match="llama in float32 only"):
        init_checkpoint(tmp_path / "needle", preset=preset, seed=0, **option)
