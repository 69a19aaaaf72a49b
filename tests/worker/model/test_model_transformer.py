"""The model gives the logits of `transformers`, whatever the chunking, the block table and the batch.

The references are tiny random models made by `transformers`, saved and read back by our loader.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from medha.kv.blocks import BlockCopy
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard

from ..models import kernels_of_a_rank, load_model, run_step

TOLERANCE = 1e-4
LENGTH = 150

BLOCK_TOKENS = 16

# Grouped heads, and a head dimension that is not hidden_size / heads where the architecture allows it.
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # Large enough for logits of a standard deviation near one, so that an error of 1e-4 would be one.
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

ARCHITECTURES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama-biased": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True},
    ),
    "mistral": (
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"head_dim": 32, "sliding_window": None},
    ),
    "mistral-window": (
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        {"head_dim": 32, "sliding_window": 11},
    ),
    "qwen2-window": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"rms_norm_eps": 1e-5}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3-biased": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"head_dim": 32, "attention_bias": True},
    ),
    # The layers are named: by `max_window_layers` it would be the other one that has the window.
    "qwen3-window": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 13,
            "max_window_layers": 1,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"head_dim": 32, "num_local_experts": 6, "sliding_window": None},
    ),
    "mixtral-window": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"head_dim": 32, "num_local_experts": 4, "sliding_window": 9},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"head_dim": 32, "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 80},
    ),
    "qwen3_moe-window": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 11},
    ),
    # Of six layers, the second and the sixth have experts.
    "qwen3_moe-mixed": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "num_hidden_layers": 6,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
        },
    ),
    # Of widths that fill no vector registers, with queries that are projected at once.
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        transformers.DeepseekV2ForCausalLM,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 32,
            "v_head_dim": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
}

# The first layer has a window; scores are divided by another root than that of the head dimension.
ARCHITECTURES["gemma3_text-window"] = (
    transformers.Gemma3TextConfig,
    transformers.Gemma3ForCausalLM,
    {
        "head_dim": 32,
        "query_pre_attn_scalar": 40,
        "sliding_window": 11,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": False,
    },
)

WINDOWED = [name for name in ARCHITECTURES if name.endswith("-window")]

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
}
ROPE_THETA = 5000.0
LOCAL_ROPE_THETA = 300.0
GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """The reference and our model, read from the directory that the reference was saved to."""

    directory: Path
    reference: Any
    config: ModelConfig
    model: Transformer

    @torch.inference_mode()
    def reference_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.reference(tokens[None]).logits[0]
        return logits


def save_reference(
    directory: Path,
    architecture: str,
    rope: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Any:
    """Save a random `transformers` model in which every weight, also of biases and norms, differs from its default."""
    config_class, model_class, extra = ARCHITECTURES[architecture]
    parameters = {"rope_theta": ROPE_THETA} | dict(rope or ROPES["default"])
    if config_class is transformers.Gemma3TextConfig:
        parameters = {"full_attention": parameters, "sliding_attention": {"rope_theta": LOCAL_ROPE_THETA}}
    config = config_class(**SIZES | extra | overrides, rope_parameters=parameters)
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter) * 2)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def make_pair(
    directory: Path, architecture: str, rope: Mapping[str, Any] | None = None, **options: Any
) -> Pair:
    reference = save_reference(directory, architecture, rope, **options)
    config = ModelConfig.from_directory(directory)
    kernels = kernels_of_a_rank(config)  # those that a rank chooses
    return Pair(directory, reference, config, load_model(directory, config, kernels=kernels))


def respell_rope(directory: Path, *, type_key: str = "type") -> None:
    """Rewrite config.json in the spelling of files from before transformers 5."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {type_key: kind} | parameters
    path.write_text(json.dumps(config))


def random_tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def run_chunks(
    model: Transformer,
    tokens: torch.Tensor,
    chunks: Sequence[int],
    blocks: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the logits of every token, computed in steps of `chunks` tokens."""
    assert sum(chunks) == tokens.numel()
    block_count = -(-tokens.numel() // BLOCK_TOKENS)
    if blocks is None:
        blocks = range(block_count)
    kv_cache = model.new_kv_cache(max(blocks) + 1, BLOCK_TOKENS)
    logits, done = [], 0
    for count in chunks:
        span = SequenceSpan(0, count, done, blocks)
        positions = torch.arange(done, done + count)
        hidden = run_step(model, tokens[done : done + count], positions, [span], kv_cache)
        logits.append(model.logits(hidden))
        done += count
    return torch.cat(logits)


def largest_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.float() - wanted.float()).abs().max())


PairMaker = Callable[..., Pair]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> PairMaker:
    """Return `pair_of(architecture, rope)`, which makes each model once."""
    made: dict[tuple[str, str], Pair] = {}

    def pair(architecture: str, rope: str = "default") -> Pair:
        if (architecture, rope) not in made:
            directory = tmp_path_factory.mktemp(f"{architecture}-{rope}")
            made[architecture, rope] = make_pair(directory, architecture, ROPES[rope])
        return made[architecture, rope]

    return pair


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers_for_whole_prefill_chunks_and_decode(
    pair_of: PairMaker, architecture: str, rope: str
) -> None:
    pair = pair_of(architecture, rope)
    tokens = random_tokens(LENGTH)
    wanted = pair.reference_logits(tokens)
    assert float(wanted.std()) > 0.3, "logits too small for the tolerance to mean something"
    stream = random.Random(7)
    cuts = sorted(stream.sample(range(1, LENGTH), 5))
    random_chunks = [last - first for first, last in zip([0, *cuts], [*cuts, LENGTH], strict=True)]
    for chunks in ([LENGTH], random_chunks, [1] * 20 + [LENGTH - 60] + [1] * 40):
        assert largest_error(run_chunks(pair.model, tokens, chunks), wanted) <= TOLERANCE


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_the_old_spelling_of_rope_gives_the_same_model(
    pair_of: PairMaker, architecture: str, rope: str, type_key: str, tmp_path: Path
) -> None:
    pair = pair_of(architecture, rope)
    config_file = tmp_path / "config.json"
    config_file.write_bytes((pair.directory / "config.json").read_bytes())
    respell_rope(tmp_path, type_key=type_key)
    assert ModelConfig.from_directory(tmp_path) == pair.config
    # We read the old spelling as transformers does.
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert theirs.items() >= pair.reference.config.rope_parameters.items()


def test_gpt_oss_without_rope_parameters_has_those_of_transformers(tmp_path: Path) -> None:
    """YaRN whose ramp is not rounded to whole dimensions; and a window in every second layer where none are named."""
    pair = make_pair(tmp_path, "gpt_oss", num_hidden_layers=4, rope=GPT_OSS_ROPE)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["layer_types"] == ["sliding_attention", "full_attention"] * 2
    tokens = random_tokens(LENGTH)
    assert largest_error(run_chunks(pair.model, tokens, [LENGTH]), pair.reference_logits(tokens)) <= TOLERANCE
    for name in ("rope_parameters", "layer_types", "attention_bias", "rms_norm_eps"):
        fields.pop(name)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert ModelConfig.from_directory(tmp_path) == pair.config
    assert transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters == GPT_OSS_ROPE


@pytest.mark.parametrize("architecture", ["llama", "qwen3", *WINDOWED])
def test_scattered_blocks_give_the_same_logits_as_contiguous_ones(
    pair_of: PairMaker, architecture: str
) -> None:
    pair = pair_of(architecture)
    tokens = random_tokens(LENGTH + 300)
    wanted = pair.reference_logits(tokens)
    needed = -(-tokens.numel() // BLOCK_TOKENS)
    contiguous = list(range(7, 7 + needed))
    shuffled = random.Random(3).sample(range(60), needed)
    two_runs = [*range(40, 40 + 15), *range(2, 2 + needed - 15)]
    for blocks in (contiguous, shuffled, two_runs, contiguous[::-1]):
        for chunks in ([450], [200, 1, 1, 3, 200, 44, 1], [37] * 12 + [6]):
            assert largest_error(run_chunks(pair.model, tokens, chunks, blocks), wanted) <= TOLERANCE


def test_a_chunk_longer_than_every_internal_tile_gives_the_same_logits(pair_of: PairMaker) -> None:
    """Rows of the MLP, rows and keys of attention are each computed in pieces of at most 512."""
    pair = pair_of("llama")
    tokens = random_tokens(1020)
    wanted = pair.reference_logits(tokens)
    for chunks in ([1020], [60, 900, 60]):
        assert largest_error(run_chunks(pair.model, tokens, chunks), wanted) <= TOLERANCE


def test_a_mixed_batch_gives_each_sequence_what_it_gets_alone(pair_of: PairMaker) -> None:
    """Chunks and decodes of six sequences share each step; logits are computed for the last row of each."""
    model = pair_of("qwen3").model
    stream = random.Random(5)
    lengths = [1, 2, 40, 90, 130, 200]
    texts = [random_tokens(length, seed=length) for length in lengths]
    wanted = [pair_of("qwen3").reference_logits(text) for text in texts]
    free = stream.sample(range(60), 60)
    tables = [[free.pop() for _ in range(-(-length // BLOCK_TOKENS))] for length in lengths]
    cache = model.new_kv_cache(60, BLOCK_TOKENS)
    done = [0] * len(texts)
    steps = 0
    while any(count < length for count, length in zip(done, lengths, strict=True)):
        spans, tokens, positions, last_rows, members = [], [], [], [], []
        for index, text in enumerate(texts):
            count = min(stream.choice([1, 1, 7, 60]), lengths[index] - done[index])
            if count == 0 or (stream.random() < 0.2 and steps % 2):
                continue
            spans.append(SequenceSpan(sum(map(len, tokens)), count, done[index], tables[index]))
            tokens.append(text[done[index] : done[index] + count])
            positions.append(torch.arange(done[index], done[index] + count))
            done[index] += count
            last_rows.append(sum(map(len, tokens)) - 1)
            members.append(index)
        steps += 1
        if not spans:
            continue
        hidden = run_step(model, torch.cat(tokens), torch.cat(positions), spans, cache)
        logits = model.logits(hidden[last_rows])
        for row, index in enumerate(members):
            assert largest_error(logits[row], wanted[index][done[index] - 1]) <= TOLERANCE
    assert steps > 5


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "mixtral",
        "qwen3_moe",
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
        *WINDOWED,
    ],
)
def test_greedy_text_of_64_tokens_is_identical(pair_of: PairMaker, architecture: str) -> None:
    pair = pair_of(architecture, "llama3")
    prompt = random_tokens(30, seed=2)
    wanted = pair.reference.generate(
        prompt[None], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 30:].tolist()
    cache = pair.model.new_kv_cache(8, BLOCK_TOKENS)
    blocks = [6, 2, 0, 5, 7, 1]
    text, fresh, done = [], prompt, 0
    for _ in range(64):
        span = SequenceSpan(0, fresh.numel(), done, blocks)
        hidden = run_step(pair.model, fresh, torch.arange(done, done + fresh.numel()), [span], cache)
        done += fresh.numel()
        fresh = pair.model.logits(hidden[-1:]).argmax(-1)
        text.append(int(fresh))
    assert text == wanted
    assert len(set(text)) > 8, "a text of few tokens would be identical by accident"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text-window"])
def test_tied_embeddings_share_the_memory_of_the_embedding(architecture: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, architecture, tie_word_embeddings=True)
    tokens = random_tokens(20)
    assert largest_error(run_chunks(pair.model, tokens, [20]), pair.reference_logits(tokens)) <= TOLERANCE
    weights = pair.model._weights
    assert weights.embedding is not None
    assert weights.head is not None
    assert weights.head.data_ptr() == weights.embedding.data_ptr()


def test_sharded_safetensors_give_the_same_model(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama", max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    tokens = random_tokens(20)
    assert largest_error(run_chunks(pair.model, tokens, [20]), pair.reference_logits(tokens)) <= TOLERANCE


@pytest.mark.parametrize("is_published", [True, False])
def test_the_text_model_of_a_checkpoint_that_sees_images(is_published: bool, tmp_path: Path) -> None:
    """Published checkpoints name tensors in another way than `transformers` does, and leave fields out."""
    text = SIZES | ARCHITECTURES["gemma3_text-window"][2]
    vision = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    reference = transformers.Gemma3ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    plain = {
        name.removeprefix("model.").removeprefix("language_model.").removeprefix("model."): tensor
        for name, tensor in weights.items()
    }
    is_text = {name: name.startswith(("layers.", "embed_tokens.", "norm.")) for name in plain}
    assert 0 < sum(is_text.values()) < len(plain)
    prefix = "language_model.model." if is_published else "model.language_model."
    save_file(
        {(prefix if is_text[name] else "") + name: tensor for name, tensor in plain.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    found = ModelConfig.from_directory(tmp_path)
    assert found.tie_word_embeddings
    tokens = random_tokens(40)
    with torch.inference_mode():
        wanted = reference(tokens[None]).logits[0]
    assert largest_error(run_chunks(load_model(tmp_path, found), tokens, [30, 10]), wanted) <= TOLERANCE


def test_two_stages_one_after_the_other_give_the_whole_models_logits(pair_of: PairMaker) -> None:
    pair = pair_of("llama")
    tokens = random_tokens(40)
    stages = [load_model(pair.directory, pair.config, Shard(0, 1, first, first + 1, 2)) for first in (0, 1)]
    caches = [stage.new_kv_cache(3, BLOCK_TOKENS) for stage in stages]
    state, logits = tokens, []
    for first, last in ((0, 25), (25, 40)):
        state = tokens[first:last]
        for stage, cache in zip(stages, caches, strict=True):
            span = SequenceSpan(0, last - first, first, range(3))
            state = run_step(stage, state, torch.arange(first, last), [span], cache)
        logits.append(stages[1].logits(state))
    assert largest_error(torch.cat(logits), pair.reference_logits(tokens)) <= TOLERANCE


@pytest.mark.parametrize(
    "architecture",
    ["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "gemma3_text-window"],
)
def test_bfloat16_is_as_near_to_float32_as_the_reference_in_bfloat16(
    architecture: str, tmp_path: Path
) -> None:
    """Two bfloat16 computations round differently, so each is compared with float32.

    Ours may be 1.5 times as far from it as transformers is: the median over rows, so that no outlier decides.
    """
    save_reference(tmp_path, architecture, dtype=torch.bfloat16)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    config = ModelConfig.from_directory(tmp_path)
    assert config.dtype == "bfloat16"
    tokens = random_tokens(LENGTH)
    model = load_model(tmp_path, config)
    ours = [run_chunks(model, tokens, chunks) for chunks in ([LENGTH], [1, 70, 1, 40, 38])]
    with torch.inference_mode():
        theirs = reference(tokens[None]).logits[0].float()
    exact = run_chunks(load_model(tmp_path, config, dtype=torch.float32), tokens, [LENGTH])

    def distance(logits: torch.Tensor) -> float:
        return float((logits - exact).abs().amax(-1).median())

    for logits in ours:
        assert 0 < distance(logits) <= 1.5 * distance(theirs)


def test_a_wider_format_than_the_checkpoints_is_exact(tmp_path: Path) -> None:
    """A bfloat16 checkpoint run in float32 equals the reference run in float32."""
    save_reference(tmp_path, "llama", dtype=torch.bfloat16)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = load_model(tmp_path, ModelConfig.from_directory(tmp_path), dtype=torch.float32)
    tokens = random_tokens(30)
    with torch.inference_mode():
        wanted = reference(tokens[None]).logits[0]
    assert largest_error(run_chunks(model, tokens, [30]), wanted) <= TOLERANCE


def test_a_copied_block_continues_as_the_original_would(pair_of: PairMaker) -> None:
    """Copy-on-write: two continuations of one prompt whose last block is partly filled."""
    pair = pair_of("llama")
    prompt, first, second = random_tokens(20), random_tokens(5, seed=8), random_tokens(5, seed=9)
    cache = pair.model.new_kv_cache(4, BLOCK_TOKENS)
    run_step(pair.model, prompt, torch.arange(20), [SequenceSpan(0, 20, 0, [0, 1])], cache)
    cache.copy_blocks([BlockCopy(1, 3)])
    spans = [SequenceSpan(0, 5, 20, [0, 1]), SequenceSpan(5, 5, 20, [0, 3])]
    hidden = run_step(pair.model, torch.cat([first, second]), torch.arange(20, 25).repeat(2), spans, cache)
    logits = pair.model.logits(hidden)
    for rows, continuation in ((logits[:5], first), (logits[5:], second)):
        wanted = pair.reference_logits(torch.cat([prompt, continuation]))[20:]
        assert largest_error(rows, wanted) <= TOLERANCE
