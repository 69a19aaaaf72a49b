"""A prediction head: a layer behind a model's last one that predicts the token after the next one (MTP, DeepSeek-V3).

At a position, it takes the model's hidden state there, as the output head does, and the embedding of the token that
comes next. Both are normed and projected to one hidden state, which passes a decoder layer of the model's kind. Norm and
output head behind it are the head's own, and its logits are of the token behind the one that was embedded. Its normed
result takes the place of the model's hidden state where a further token is guessed.

Reference: DeepSeek-V3 Technical Report, section 2.2, and the tensors of the published checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

from medha_worker.device import Device
from medha_worker.kernels.protocol import Kernels
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prepared_step import PreparedStep
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import PredictionWeights, Progress, Shard, Weights, load_head


class PredictionHead(Transformer):
    """The layer of a prediction head, whole on one rank, with the part before it."""

    def __init__(
        self, config: ModelConfig, weights: Weights, head: PredictionWeights, *, kernels: Kernels
    ) -> None:
        """`config` is that of a model with a head (`ModelConfig.with_head`)."""
        last = config.num_layers
        super().__init__(config, Shard(0, 1, last - 1, last, last), weights, kernels=kernels)
        self._head = head

    @classmethod
    def read(
        cls,
        directory: Path | str,
        config: ModelConfig,
        *,
        device: Device,
        kernels: Kernels,
        progress: Progress | None = None,
    ) -> PredictionHead:
        """Read the head of the model of `config`."""
        return cls(config, *load_head(directory, config, device=device, progress=progress), kernels=kernels)

    @property
    def takes_ids(self) -> bool:
        return True

    @property
    def weights_bytes(self) -> int:
        head = self._head
        parts: list[torch.Tensor] = [head.embedding, head.token_norm, head.hidden_norm, head.projection]
        return super().weights_bytes + sum([part.untyped_storage().nbytes() for part in parts])

    @torch.inference_mode()
    def forward(
        self, tokens_or_hidden: torch.Tensor, step: PreparedStep, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the head over a prepared step, writing K and V at its positions.

        Args:
            tokens_or_hidden: Ids of the tokens behind the positions of the rows, int64 [rows].
            step: The step.
            before: Hidden states at these positions, normed, [rows, hidden_size]. None, to measure time: those are 0.

        Returns:
            Hidden states, [rows, hidden_size], before the head's norm.
        """
        embedded = F.embedding(self.device.place(tokens_or_hidden), self._head.embedding)
        before = torch.zeros_like(embedded) if before is None else before
        both = [self._norm(embedded, self._head.token_norm), self._norm(before, self._head.hidden_norm)]
        return super().forward(self._products.product(torch.cat(both, dim=1), self._head.projection), step)
