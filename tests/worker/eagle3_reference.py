"""An EAGLE-3 head written from the paper, with the pieces of transformers' Llama: the reference for ours, and heads for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

Tensors = dict[str, torch.Tensor]


@dataclass
class ReferenceEagle3:
    """A head of these tensors and fields of a flat config.json, which computes whole sequences at once."""

    weights: Mapping[str, torch.Tensor]
    fields: Mapping[str, Any]
    embedding: torch.Tensor

    def __post_init__(self) -> None:
        own = ("architectures", "eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size")
        self.llama = LlamaConfig(**{name: value for name, value in self.fields.items() if name not in own})

    def reduced(self, collected: torch.Tensor) -> torch.Tensor:
        """Return what the head begins from, [n, hidden], of three hidden states side by side."""
        return F.linear(collected, self.weights["fc.weight"], self.weights.get("fc.bias"))

    def hidden(self, before: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of a sequence, [n, hidden].

        `before` are reduced states at positions 0 to n - 1 or, behind the model's tokens, the head's own hidden states;
        `tokens` are those at 1 to n.
        """
        embedded = F.embedding(tokens, self.weights.get("embed_tokens.weight", self.embedding))
        state = self._norm("midlayer.hidden_norm", before)
        both = torch.cat([self._norm("midlayer.input_layernorm", embedded), state], dim=-1)
        residual = state if self.fields.get("norm_before_residual") else before
        x = residual + self._attention(both)
        mlp = LlamaMLP(self.llama)
        prefix = "midlayer.mlp."
        mlp.load_state_dict(
            {name.removeprefix(prefix): one for name, one in self.weights.items() if name.startswith(prefix)}
        )
        return x + mlp(self._norm("midlayer.post_attention_layernorm", x))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits over the whole vocabulary, [n, vocab]."""
        own = F.linear(self._norm("norm", hidden), self.weights["lm_head.weight"])
        offsets = self.weights.get("d2t")
        if offsets is None:
            return own
        found = torch.full((len(own), self.fields["vocab_size"]), -torch.inf)
        for index, offset in enumerate(offsets.tolist()):
            found[:, index + offset] = own[:, index]
        return found

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = LlamaRMSNorm(x.shape[-1], self.fields["rms_norm_eps"])
        norm.load_state_dict({"weight": self.weights[f"{name}.weight"]})
        found: torch.Tensor = norm(x)
        return found

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        count, dim, prefix = len(x), self.llama.head_dim, "midlayer.self_attn."

        def heads(name: str) -> torch.Tensor:
            made = F.linear(
                x, self.weights[f"{prefix}{name}_proj.weight"], self.weights.get(f"{prefix}{name}_proj.bias")
            )
            return made.view(1, count, -1, dim).transpose(1, 2)

        rotary = LlamaRotaryEmbedding(self.llama)
        q, k = apply_rotary_pos_emb(heads("q"), heads("k"), *rotary(x[None], torch.arange(count)[None]))
        groups = self.llama.num_attention_heads // self.llama.num_key_value_heads
        attended = F.scaled_dot_product_attention(
            q, repeat_kv(k, groups), repeat_kv(heads("v"), groups), is_causal=True
        )
        return F.linear(
            attended.transpose(1, 2).reshape(count, -1),
            self.weights[f"{prefix}o_proj.weight"],
            self.weights.get(f"{prefix}o_proj.bias"),
        )


def target_states(
    directory: Path, tokens: torch.Tensor, layers: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the layers of a checkpoint take, as transformers computes it, side by side; and the logits."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found: list[torch.Tensor] = []

    def keep(_: object, taken: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> None:
        found.append((taken[0] if taken else named["hidden_states"])[0].clone())

    for layer in (*model.model.layers, model.model.norm):  # the norm takes what the last layer gives
        layer.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        logits = model(tokens[None]).logits[0]
    assert len(found) == len(model.model.layers) + 1
    return torch.cat([found[layer] for layer in layers], dim=1), logits


def change_head(
    directory: Path,
    fields: Mapping[str, Any] | None = None,
    tensors: Callable[[Tensors], None] = lambda _: None,
) -> None:
    """Change a head's config.json, where None removes a field, and its tensors, which `tensors` is given to change."""
    config = json.loads((directory / "config.json").read_text()) | dict(fields or {})
    config = {name: value for name, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    found = load_file(directory / "model.safetensors")
    tensors(found)
    save_file(found, directory / "model.safetensors")


def whole_vocabulary(found: Tensors) -> None:
    """Let a head guess all tokens, whose logits are those of its tokens, repeated."""
    del found["d2t"], found["t2d"]
    found["lm_head.weight"] = found["lm_head.weight"].repeat(2, 1)


def make_target_forget(directory: Path, kept: float = 0.0) -> None:
    """Let each next token of a model depend on the last one alone, but for this share of what layers add to hidden states."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensor * kept
    save_file(tensors, directory / "model.safetensors")


def make_always_right(directory: Path, model_directory: Path, guessable: torch.Tensor | None = None) -> None:
    """Let a head know the texts of a model that `make_target_forget` has changed, for the tokens `guessable`; None: all.

    Its queries and keys are constant, and so long that RoPE lets a row see itself alone. Its values are the normed embedding
    less the normed state before. So its hidden state is the embedding of the last token, behind which it has the model's
    norm and output head.
    """
    target = load_file(model_directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    vocabulary = config["vocab_size"]
    tokens = torch.arange(vocabulary) if guessable is None else guessable

    def right(found: Tensors) -> None:
        attention = "midlayer.self_attn."
        both, one = torch.zeros(hidden, 2 * hidden), torch.eye(hidden)
        for name in "qk":
            found[f"{attention}{name}_proj.weight"] = both.clone()
            found[f"{attention}{name}_proj.bias"] = torch.full((hidden,), 20.0)
        found[f"{attention}v_proj.weight"] = torch.cat([one, -one], dim=1)
        found[f"{attention}v_proj.bias"], found[f"{attention}o_proj.bias"] = (
            torch.zeros(hidden),
            torch.zeros(hidden),
        )
        found[f"{attention}o_proj.weight"] = one
        found["midlayer.mlp.down_proj.weight"].zero_()
        found["fc.weight"].zero_()
        for norm in ("input_layernorm", "hidden_norm"):
            found[f"midlayer.{norm}.weight"] = torch.ones(hidden)
        found["norm.weight"] = target["model.norm.weight"].clone()
        found["lm_head.weight"] = target["lm_head.weight"][tokens].clone()
        found["d2t"] = tokens - torch.arange(len(tokens))
        found["t2d"] = torch.zeros(vocabulary, dtype=torch.bool)
        found["t2d"][tokens] = True

    change_head(
        directory,
        {"num_key_value_heads": heads, "attention_bias": True, "draft_vocab_size": len(tokens)},
        right,
    )
