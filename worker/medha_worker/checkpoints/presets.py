"""Small checkpoints: `medha model init DIR --preset tiny|small|needle|needle-fp8 --seed N`.

They have the exact form of a Hugging Face directory (config, weights, tokenizer, chat template, generation
config), so that the whole system can be run, tested and measured without downloading a model. `tiny` and
`small` are random: their text is meaningless, but it depends on the whole prompt, so that a wrong KV block
becomes visible. `needle` finds passkeys in contexts of up to 1,048,576 tokens, and `needle-fp8` does so with keys and
values in FP8.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from medha.errors import ConfigInvalid
from medha.model.config_fields import TEXT_CONFIGS
from medha.model.quantisation import LINEAR_METHODS, MXFP4_BLOCK
from medha_worker.checkpoints import latent_preset, needle_model
from medha_worker.checkpoints.new_checkpoint import new_checkpoint, save_weights, write_json
from medha_worker.checkpoints.quantised_checkpoint import (
    EXPERT_QUANTISATIONS,
    QUANTISATIONS,
    quantise,
    quantise_experts,
)
from medha_worker.model.families.family import Family
from medha_worker.model.families.family_table import FAMILIES


@dataclass(frozen=True)
class Preset:
    """Sizes of a checkpoint; `vocab_size` includes the special tokens."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int
    max_position_tokens: int
    rope_theta: float


_NEEDLE = Preset(  # 0.1 M parameters, see needle_model.py
    2,
    needle_model.HIDDEN_SIZE,
    needle_model.HEADS,
    needle_model.HEADS,
    needle_model.INTERMEDIATE_SIZE,
    needle_model.VOCAB_SIZE,
    1_048_576,
    needle_model.ROPE_THETA,
)
PRESETS = {
    "tiny": Preset(2, 128, 4, 2, 352, 512, 131_072, 500_000.0),  # 0.5 M parameters: tests
    "small": Preset(8, 512, 8, 2, 1408, 4096, 1_048_576, 500_000.0),  # 26.7 M parameters: benchmarks
    "needle": _NEEDLE,
    "needle-fp8": _NEEDLE,  # with margins for keys and values in FP8
}

ARCHITECTURES = {
    family.model_type: family for family in FAMILIES.values() if family.model_type not in TEXT_CONFIGS
}

# An expert is half as wide as the dense MLP of the same preset.
_EXPERTS, _EXPERTS_PER_TOKEN = 8, 2
_QUANTISATIONS = {**QUANTISATIONS, **EXPERT_QUANTISATIONS}

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BOS, _EOS, _PAD, _END = range(4)

_CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
{{- '<|system|>\\nCall a function by <tool_call>{"name": ..., "arguments": ...}</tool_call>. Functions:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('role must be system, user, assistant or tool, not ' + message['role']) }}
{%- endif %}
{{- '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>\\n' }}
{%- if message['role'] == 'tool' %}{{- '<tool_response>\\n' }}{%- endif %}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- elif message['content'] is not none %}
{%- for part in message['content'] %}{{ part['text'] }}{% endfor %}
{%- endif %}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{%- if message['role'] == 'tool' %}{{- '\\n</tool_response>' }}{%- endif %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}
"""
# The answer follows the marker immediately.
_ANSWER_AT_ONCE_TEMPLATE = _CHAT_TEMPLATE.replace("'|>\\n'", "'|>'").replace(
    "<|assistant|>\\n", "<|assistant|>"
)
# Messages, calls and results stand in it as in the template of gpt-oss.
_CHANNEL_TEMPLATE = """\
{%- if tools %}
{{- '<|start|>developer<|message|># Tools\\n\\nCall them in the channel commentary.\\n' }}
{%- for tool in tools %}{{- tool['function'] | tojson + '\\n' }}{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name='') %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['tool_calls'] %}
{%- set call = message['tool_calls'][0]['function'] %}
{%- set last.name = call['name'] %}
{%- if message['content'] %}
{{- '<|start|>assistant<|channel|>commentary<|message|>' + message['content'] + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + call['name'] + '<|channel|>commentary json<|message|>' }}
{{- call['arguments'] | tojson + '<|call|>' }}
{%- elif message['role'] == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message['content'] + '<|end|>' }}
{%- elif message['role'] == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message['content'] | tojson + '<|end|>' }}
{%- elif message['role'] in ['system', 'developer', 'user'] %}
{{- '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}
{%- else %}
{{- raise_exception('role must be system, developer, user, assistant or tool, not ' + message['role']) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start|>assistant' }}
{%- endif %}
"""


class _Dialect(NamedTuple):
    """The form of a model's conversations; the index of a special token is its id, and `_EOS` and `_END` end a text."""

    special_tokens: tuple[str, ...]
    template: str

    def unreadable(self) -> list[int]:
        """Return the ids that greedy text should not contain, because it would be unreadable.

        They are those of the markers that do not end a sequence and, right after the special tokens and the 94
        printable ASCII characters, of the 162 single bytes that are not characters by themselves.
        """
        count = len(self.special_tokens)
        return [_BOS, _PAD, *range(_END + 1, count), *range(count + 94, count + 256)]


_ROLES = _Dialect(
    ("<|bos|>", "<|eos|>", "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"), _CHAT_TEMPLATE
)
_CHANNELS = _Dialect(
    (
        "<|startoftext|>", "<|return|>", "<|endoftext|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>",
        "<|constrain|>",
    ),
    _CHANNEL_TEMPLATE,
)  # fmt: skip
_DIALECTS = {"gpt_oss": _CHANNELS}
"""Dialects by architecture; all others have that of roles."""

_RMS_NORM_EPS = 1e-5

# A family whose every so many layers has no window gets as many with one as without.
_FULL_LAYER_INTERVAL, _WINDOW_TOKENS = 2, 512


def init_checkpoint(
    directory: Path | str,
    *,
    preset: str,
    seed: int,
    architecture: str = "llama",
    dtype: str = "float32",
    window_tokens: int | None = None,
    quantisation: str = "none",
    mtp_layers: int = 0,
    force: bool = False,
) -> None:
    """Create a checkpoint in `directory`; the same arguments give the same bytes.

    With `window_tokens`, layers have a sliding window: all of a Mistral, Mixtral or Qwen3-MoE, and the upper half of a Qwen's.
    Every second layer of a Gemma or gpt-oss has one in any case, of 512 or 128 tokens unless given.

    `mtp_layers` is the number of layers that predict further tokens, which a DeepSeek-V3 may have; all other tensors are the
    same with and without them.

    `directory` and `force` are those of `new_checkpoint`.

    Raises:
        ConfigInvalid: the preset, architecture, dtype or quantisation is unknown, the seed or the number of MTP layers is
            negative, the architecture has no window or MTP layers or cannot be quantised, or the directory is in use.
    """
    for name, value, allowed in (
        ("preset", preset, tuple(PRESETS)),
        ("architecture", architecture, tuple(ARCHITECTURES)),
        ("dtype", dtype, tuple(_DTYPES)),
        ("quantisation", quantisation, ("none", *_QUANTISATIONS)),
    ):
        if value not in allowed:
            raise ConfigInvalid(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
    is_needle = preset.startswith("needle")
    if is_needle and (architecture, dtype, quantisation) != ("llama", "float32", "none"):
        raise ConfigInvalid(
            f"preset {preset} is {architecture} in {dtype}, quantisation {quantisation}; its weights are made for llama in "
            "float32 only"
        )
    if window_tokens is not None and (window_tokens < 1 or not ARCHITECTURES[architecture].has_window):
        windowed = ", ".join(name for name, family in ARCHITECTURES.items() if family.has_window)
        raise ConfigInvalid(
            f"window is {window_tokens} for architecture {architecture}; give at least 1, and one of {windowed}"
        )
    able = [name for name, family in ARCHITECTURES.items() if quantisation in _quantisations_of(family)]
    if quantisation != "none" and architecture not in able:
        raise ConfigInvalid(
            f"quantisation is {quantisation} for architecture {architecture}, which cannot have it; choose one of "
            f"{', '.join(able)}"
        )
    if mtp_layers < 0 or (mtp_layers > 0 and architecture != "deepseek_v3"):
        raise ConfigInvalid(
            f"MTP layers are {mtp_layers} for architecture {architecture}; give 0, or 1 or more for deepseek_v3"
        )
    if seed < 0:
        raise ConfigInvalid(f"seed is {seed}; it must be 0 or more")
    with new_checkpoint(directory, force=force) as made:
        sizes = PRESETS[preset]
        family = ARCHITECTURES[architecture]
        config = _model_config(sizes, family, dtype, window_tokens)
        if mtp_layers:
            config["num_nextn_predict_layers"] = mtp_layers
        if quantisation != "none":
            config["quantization_config"] = _quantisation_settings(family, quantisation)
        write_json(made / "config.json", config)
        write_json(made / "generation_config.json", _generation_config())
        dialect = _DIALECTS.get(architecture, _ROLES)
        if is_needle:
            dialect = dialect._replace(template=_ANSWER_AT_ONCE_TEMPLATE)
            tokenizer = _train_tokenizer(
                sizes.vocab_size, (*needle_model.corpus(), *_SENTENCES), dialect, single_digits=True
            )
            weights = needle_model.needle_weights(
                tokenizer, seed=seed, rms_norm_eps=_RMS_NORM_EPS, for_fp8=preset == "needle-fp8"
            )
        else:
            tokenizer = _train_tokenizer(sizes.vocab_size, _corpus(), dialect)
            weights = _random_weights(sizes, family, seed, _DTYPES[dtype], dialect, mtp_layers)
            if quantisation in EXPERT_QUANTISATIONS:
                weights, _ = quantise_experts(weights)
            elif quantisation != "none":
                weights, _ = quantise(weights, config["quantization_config"], seed)
        write_json(made / "tokenizer_config.json", _tokenizer_config(sizes, dialect))
        (made / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
        save_weights(made, weights)


def _quantisations_of(family: Family) -> tuple[str, ...]:
    """Return the formats that a family's checkpoints are made in."""
    methods = LINEAR_METHODS if family.experts is None else family.experts.quantised_as
    found = [name for name, settings in _QUANTISATIONS.items() if settings["quant_method"] in methods]
    return tuple(name for name in found if not family.has_latents or name != "fp8-kv")


def _quantisation_settings(family: Family, name: str) -> dict[str, Any]:
    """Return the `quantization_config` of a family's checkpoint, which says that routers are not quantised."""
    settings = dict(_QUANTISATIONS[name])
    if family.experts is None or family.experts.is_interleaved or settings["quant_method"] == "gptq":
        return settings
    gate = f"{family.experts.names.block}.gate"
    if settings["quant_method"] == "compressed-tensors":
        return settings | {"ignore": [*settings["ignore"], f"re:.*{re.escape(gate)}$"]}
    return settings | {"modules_to_not_convert": ["lm_head", gate]}


def _expert_width(sizes: Preset, family: Family) -> int:
    """Return the width of an expert: half of the dense MLP's, and of a gpt-oss a multiple of MXFP4's blocks."""
    half = sizes.intermediate // 2
    return half - half % MXFP4_BLOCK if family.experts and family.experts.is_interleaved else half


def _model_config(sizes: Preset, family: Family, dtype: str, window_tokens: int | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.query_heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.hidden // sizes.query_heads,
        "max_position_embeddings": sizes.max_position_tokens,
        "rms_norm_eps": _RMS_NORM_EPS,
        "rope_theta": sizes.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": _BOS,
        "eos_token_id": [_EOS, _END],
        "pad_token_id": _PAD,
    }
    if family.has_window_switch and window_tokens is not None:
        config |= {"use_sliding_window": True, "sliding_window": window_tokens}
        if family.max_window_layers is not None:
            config["max_window_layers"] = sizes.layers // 2
    elif family.full_layer_interval is not None:
        config["sliding_window"] = window_tokens or min(
            _WINDOW_TOKENS, family.window_tokens or _WINDOW_TOKENS
        )
        if family.reads_layer_interval:
            config["sliding_window_pattern"] = _FULL_LAYER_INTERVAL
    elif family.has_window:
        config["sliding_window"] = window_tokens
    if family.activation == "silu":
        config["hidden_act"] = "silu"
    else:
        config["hidden_activation"] = "gelu_pytorch_tanh"
    if family.local_rope_theta is not None:
        config["rope_local_base_freq"] = family.local_rope_theta
    if family.query_scalar is not None:
        config["query_pre_attn_scalar"] = config["head_dim"]
    if family.experts is not None:
        config[family.experts.count_fields[0]] = _EXPERTS
        config["num_experts_per_tok"] = _EXPERTS_PER_TOKEN
        config[family.experts.width_field] = _expert_width(sizes, family)
        if family.experts.renormalises is None:
            config["norm_topk_prob"] = True
        if family.experts.deepseek is not None:
            latent = latent_preset.latent_shape(family.experts.deepseek, sizes.hidden, sizes.query_heads)
            config |= latent_preset.config_fields(family.experts.deepseek, latent, sizes.query_heads)
            del config["head_dim"]
    if family.rope is not None:
        config["rope_scaling"] = dict(family.rope)
    return config


def _generation_config() -> dict[str, Any]:
    return {"bos_token_id": _BOS, "eos_token_id": [_EOS, _END], "pad_token_id": _PAD}


def _tokenizer_config(sizes: Preset, dialect: _Dialect) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": dialect.special_tokens[_BOS],
        "eos_token": dialect.special_tokens[_EOS],
        "pad_token": dialect.special_tokens[_PAD],
        "model_max_length": sizes.max_position_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": dialect.template,
    }


def _random_weights(
    sizes: Preset, family: Family, seed: int, dtype: torch.dtype, dialect: _Dialect, mtp_layers: int
) -> dict[str, torch.Tensor]:
    """Return weights whose every block matters as much as the embedding, and whose attention is peaked.

    With the usual initialisation (std 0.02), the residual stream is nearly the last token's embedding: greedy
    text then goes from token to token, whatever the prompt was. Here each linear keeps the variance of its
    input; queries and keys are scaled so that scores have a standard deviation of about 2, and logits have
    one of 3.
    """
    # numpy's stream is the same on every machine; torch.randn's depends on the vector width.
    stream = np.random.Generator(np.random.PCG64(seed))
    head_dim = sizes.hidden // sizes.query_heads
    q_width, kv_width = sizes.query_heads * head_dim, sizes.kv_heads * head_dim
    qk_gain = math.sqrt(2.0)

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        values = stream.standard_normal(shape, dtype=np.float32) * np.float32(std) + np.float32(mean)
        return torch.from_numpy(values).to(dtype)

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return normal(rows, columns, std=gain / math.sqrt(columns))

    def norm(size: int, mean: float = 1.0) -> torch.Tensor:
        return normal(size, std=0.1, mean=mean - family.norm_adds_one)

    def expert(names: tuple[str, str, str], width: int) -> dict[str, torch.Tensor]:
        gate, up, down = names
        return {
            f"{gate}.weight": linear(width, sizes.hidden),
            f"{up}.weight": linear(width, sizes.hidden),
            f"{down}.weight": linear(sizes.hidden, width, 3.0),
        }

    embedding_std = 1.0 / math.sqrt(sizes.hidden) if family.scales_embedding else 1.0
    weights = {"model.embed_tokens.weight": normal(sizes.vocab_size, sizes.hidden, std=embedding_std)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family.has_result_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]

    def add_layer(index: int) -> None:
        nonlocal weights
        layer = f"model.layers.{index}."
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        for name in norms:
            weights[f"{layer}{name}.weight"] = norm(sizes.hidden)
        block = family.experts
        if block is not None and block.deepseek is not None:
            weights |= latent_preset.attention_weights(
                attention,
                latent_preset.latent_shape(block.deepseek, sizes.hidden, sizes.query_heads),
                sizes.hidden,
                sizes.query_heads,
                qk_gain=qk_gain,
                linear=linear,
                norm=norm,
            )
        else:
            weights[f"{attention}q_proj.weight"] = linear(q_width, sizes.hidden, qk_gain)
            weights[f"{attention}k_proj.weight"] = linear(kv_width, sizes.hidden, qk_gain)
            weights[f"{attention}v_proj.weight"] = linear(kv_width, sizes.hidden, 2.0)
        weights[f"{attention}o_proj.weight"] = linear(sizes.hidden, q_width)
        if block is None or (block.deepseek is not None and index == 0):
            weights[f"{mlp}gate_proj.weight"] = linear(sizes.intermediate, sizes.hidden)
            weights[f"{mlp}up_proj.weight"] = linear(sizes.intermediate, sizes.hidden)
            weights[f"{mlp}down_proj.weight"] = linear(sizes.hidden, sizes.intermediate, 2.0)
        elif block.is_interleaved:
            width = _expert_width(sizes, family)
            weights |= _interleaved_experts(f"{layer}mlp.", sizes.hidden, width, normal)
        else:
            width = _expert_width(sizes, family)
            weights[block.router_name(layer)] = linear(_EXPERTS, sizes.hidden, 2.0)
            if block.deepseek == 3:
                weights[block.correction_name(layer)] = normal(_EXPERTS, std=0.1).float()
            if block.deepseek is not None:
                weights |= expert(block.names.of_shared(layer), width)
            for index_of_expert in range(_EXPERTS):
                weights |= expert(block.names.of_expert(layer, index_of_expert), width)
        if family.qkv_bias or family.attention_bias:
            weights[f"{attention}q_proj.bias"] = normal(q_width, std=0.1)
            weights[f"{attention}k_proj.bias"] = normal(kv_width, std=0.1)
            weights[f"{attention}v_proj.bias"] = normal(kv_width, std=0.1)
        if family.attention_bias:
            weights[f"{attention}o_proj.bias"] = normal(sizes.hidden, std=0.1)
        if family.has_sinks:
            weights[f"{attention}sinks"] = normal(sizes.query_heads, std=1.0)
        if family.qk_norm:
            weights[f"{attention}q_norm.weight"] = norm(head_dim, qk_gain)
            weights[f"{attention}k_norm.weight"] = norm(head_dim, qk_gain)

    for index in range(sizes.layers):
        add_layer(index)
    weights["model.norm.weight"] = norm(sizes.hidden)
    head = linear(sizes.vocab_size, sizes.hidden, 3.0)
    head[dialect.unreadable()] = 0.0
    weights["lm_head.weight"] = head
    for index in range(sizes.layers, sizes.layers + mtp_layers):
        add_layer(index)
        layer = f"model.layers.{index}."
        weights[f"{layer}enorm.weight"], weights[f"{layer}hnorm.weight"] = (
            norm(sizes.hidden),
            norm(sizes.hidden),
        )
        weights[f"{layer}eh_proj.weight"] = linear(sizes.hidden, 2 * sizes.hidden)
        weights[f"{layer}shared_head.norm.weight"] = norm(sizes.hidden)
        # Published files hold a copy of both.
        weights[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{layer}shared_head.head.weight"] = head.clone()
    return weights


def _interleaved_experts(
    mlp: str, hidden: int, width: int, normal: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return router and experts of a gpt-oss layer; `normal` returns random weights of a shape."""
    weights = {
        f"{mlp}router.weight": normal(_EXPERTS, hidden, std=2.0 / math.sqrt(hidden)),
        f"{mlp}router.bias": normal(_EXPERTS, std=0.1),
    }
    for name, rows, columns, gain in (
        ("gate_up_proj", 2 * width, hidden, 1.0),
        ("down_proj", hidden, width, 2.0),
    ):
        weights[f"{mlp}experts.{name}"] = normal(_EXPERTS, columns, rows, std=gain / math.sqrt(columns))
        weights[f"{mlp}experts.{name}_bias"] = normal(_EXPERTS, rows, std=0.1)
    return weights


def _train_tokenizer(
    vocab_size: int, corpus: Iterable[str], dialect: _Dialect, *, single_digits: bool = False
) -> Tokenizer:
    """Train a byte-level BPE tokenizer with exactly `vocab_size` entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = bytes_of_words
    if single_digits:
        digits = pre_tokenizers.Split(Regex(" ?[0-9]"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_of_words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(dialect.special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "the corpus is too poor for this vocabulary"
    bos = dialect.special_tokens[_BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, _BOS)]
    )
    return tokenizer


_SENTENCES = (
    "The reader opened the book at the first page and did not put it down until the evening.",
    "When the river rose, the people of the valley carried what they could to the higher ground.",
    "Please explain, in a few short sentences, how the answer was found and why it is right.",
    "What is the difference between the two methods, and which of them should we use here?",
    "A long document is read once; a question about it may be asked many times.",
    "The scheduler gives each request a deadline and lets the most urgent one run first.",
    "She asked whether the train would still leave at 9:45, or whether it had been cancelled.",
    "It was, he said, the best of all the plans that had been tried so far; nobody disagreed.",
    "Memory is cheap, but moving it is not: most of the time is spent waiting for bytes.",
    "If you have 12 apples and give 5 of them away, how many apples do you have left? 7.",
    "In 1969 the first message crossed the network: two letters, and then the machine crashed.",
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values) if values else 0.0\n",
    'for index, item in enumerate(items):\n    print(f"{index}: {item!r}")\n',
    '{"name": "medha", "version": "0.1.0", "replicas": 3, "ready": true, "labels": ["a", "b"]}',
    "SELECT name, count(*) FROM requests WHERE status = 200 GROUP BY name ORDER BY 2 DESC;",
    "Die Bücher stehen im Regal, und die Fenster öffnen sich zum Garten.",
    "La reine a trouvé la clé sous l'escalier, près de la fenêtre.",
    "El niño corrió por la montaña mientras su madre preparaba la cena.",
    "मेधा का अर्थ है बुद्धि और स्मरण की शक्ति।",
    "知识就是力量。 今天天气很好。",
    "Быстрая лиса прыгает через ленивую собаку.",
)
_ONSETS = (
    "",
    "b",
    "br",
    "c",
    "cl",
    "d",
    "dr",
    "f",
    "g",
    "gr",
    "h",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
)
_VOWELS = ("a", "e", "i", "o", "u", "ea", "io", "ou")
_CODAS = ("", "", "n", "r", "s", "t", "l", "nd", "ng", "st", "ck")
_ENDINGS = ("", "s", "ed", "ing", "er", "ly", "tion", "ment", "ness")


def _corpus() -> Iterator[str]:
    """Yield natural sentences, then made-up words in Zipf's proportions, enough for 4,096 entries."""
    for _ in range(50):
        yield from _SENTENCES
    stream = np.random.Generator(np.random.PCG64(20_260_101))

    def pick(parts: tuple[str, ...]) -> str:
        return parts[int(stream.integers(len(parts)))]

    def word() -> str:
        syllables = int(stream.integers(1, 4))
        return "".join(pick(_ONSETS) + pick(_VOWELS) + pick(_CODAS) for _ in range(syllables)) + pick(
            _ENDINGS
        )

    words = [word() for _ in range(6000)]
    shares = 1.0 / np.arange(1, len(words) + 1)
    shares /= shares.sum()
    for _ in range(4000):
        chosen = stream.choice(len(words), size=12, p=shares)
        yield " ".join(words[int(index)] for index in chosen) + "."
