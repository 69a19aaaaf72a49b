"""The race for the next token in plain torch: noise on every logit, or only on those that can win."""

from __future__ import annotations

import torch
from torch import Tensor

from medha_worker.kernels.random_stream import NOISE_SPAN, gumbel_noise, uniforms


class DenseRace:
    """Races all tokens, without control flow that depends on data; the reference for other implementations."""

    def winners(self, scores: Tensor, keys: Tensor) -> Tensor:
        tokens = torch.arange(scores.shape[1], device=scores.device)
        return scores.add_(gumbel_noise(uniforms(keys[:, None], tokens))).argmax(dim=-1)


class SparseRace:
    """Races only the tokens that can win, which it must count first: that is free in host memory alone."""

    def winners(self, scores: Tensor, keys: Tensor) -> Tensor:
        vocab = scores.shape[1]
        flat = scores.flatten()
        running = (flat > -NOISE_SPAN).nonzero().squeeze(1)
        row = torch.div(running, vocab, rounding_mode="floor")
        uniform = uniforms(keys.index_select(0, row), running - row * vocab)
        # Logits that do not take part are far below: the best one has at least 0 - 3.7, and they get no noise.
        flat[running] += gumbel_noise(uniform)
        return flat.view_as(scores).argmax(dim=-1)
