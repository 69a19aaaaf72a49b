"""An MTP layer of DeepSeek-V3 in plain torch, written from the technical report: the reference for the prediction head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

Weights = Mapping[str, torch.Tensor]


@dataclass
class ReferenceHead:
    """The MTP layer of index `layer`; `config` is the content of config.json. It computes whole sequences at once."""

    weights: Weights
    config: Mapping[str, Any]
    layer: int

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[f"model.layers.{self.layer}.{name}.weight"].float()

    def hidden(self, before: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the normed hidden states of a sequence, [n, hidden].

        `before` are those at positions 0 to n - 1, of the model or, behind its tokens, of the head; `tokens` are those at 1
        to n, int64 [n].
        """
        embedded = self._norm(self["embed_tokens"][tokens], self["enorm"], self._eps)
        both = torch.cat([embedded, self._norm(before, self["hnorm"], self._eps)], dim=1)
        x = both @ self["eh_proj"].T
        x = x + self._attention(self._norm(x, self["input_layernorm"], self._eps))
        x = x + self._experts(self._norm(x, self["post_attention_layernorm"], self._eps))
        return self._norm(x, self["shared_head.norm"], self._eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self["shared_head.head"].T

    @property
    def _eps(self) -> float:
        return float(self.config["rms_norm_eps"])

    @staticmethod
    def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        c, count = self.config, len(x)
        heads, plain, turned, wide = (
            c["num_attention_heads"],
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
            c["v_head_dim"],
        )
        attention = "self_attn."
        down = self._norm(x @ self[f"{attention}q_a_proj"].T, self[f"{attention}q_a_layernorm"], 1e-6)
        q = (down @ self[f"{attention}q_b_proj"].T).view(count, heads, plain + turned)
        rows = x @ self[f"{attention}kv_a_proj_with_mqa"].T
        latent, key = rows[:, : c["kv_lora_rank"]], rows[:, c["kv_lora_rank"] :]
        latent = self._norm(latent, self[f"{attention}kv_a_layernorm"], 1e-6)
        kv = (latent @ self[f"{attention}kv_b_proj"].T).view(count, heads, plain + wide)
        q = torch.cat([q[..., :plain], self._turned(q[..., plain:])], dim=-1)
        key = self._turned(key[:, None]).expand(count, heads, turned)
        k = torch.cat([kv[..., :plain], key], dim=-1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(plain + turned)
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(dim=-1), kv[..., plain:])
        return attended.reshape(count, heads * wide) @ self[f"{attention}o_proj"].T

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate neighbouring values of [n, heads, width] by the positions 0 to n - 1."""
        width = x.shape[-1]
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angles = (torch.arange(len(x))[:, None] * frequencies)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        found = torch.empty_like(x)
        found[..., 0::2] = even * angles.cos() - odd * angles.sin()
        found[..., 1::2] = even * angles.sin() + odd * angles.cos()
        return found

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = x @ self[f"{name}.gate_proj"].T, x @ self[f"{name}.up_proj"].T
        return (F.silu(gate) * up) @ self[f"{name}.down_proj"].T

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        groups, kept, chosen = c["n_group"], c["topk_group"], c["num_experts_per_tok"]
        scores = (x @ self["mlp.gate"].T).sigmoid()
        correction = self.weights[f"model.layers.{self.layer}.mlp.gate.e_score_correction_bias"]
        corrected = scores + correction
        in_groups = corrected.view(len(x), groups, -1)
        best = in_groups.topk(2, dim=-1).values.sum(dim=-1).topk(kept, dim=-1).indices
        allowed = torch.zeros(len(x), groups).scatter(1, best, 1.0).bool()
        allowed = allowed.repeat_interleave(in_groups.shape[-1], dim=1)
        experts = corrected.masked_fill(~allowed, -torch.inf).topk(chosen, dim=-1).indices
        shares = scores.gather(1, experts)
        shares = shares / shares.sum(dim=1, keepdim=True) * c["routed_scaling_factor"]
        total = self._mlp(x, "mlp.shared_experts")
        for row in range(len(x)):
            for expert, share in zip(experts[row].tolist(), shares[row], strict=True):
                total[row] += share * self._mlp(x[row : row + 1], f"mlp.experts.{expert}")[0]
        return total
