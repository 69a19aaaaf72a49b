"""The head of kind `mtp`: a layer after a model's last one that predicts the token after the next one (DeepSeek-V3).

At a position, it takes the model's hidden state there, as the output head does, and the embedding of the token that
comes next. Both are normed and projected to one hidden state, which passes a decoder layer of the model's kind. Norm and
output head after it are the head's own, and its logits are of the token after the one that was embedded. Its normed
result takes the place of the model's hidden state where a further token is guessed.

Reference: DeepSeek-V3 Technical Report, section 2.2, and the tensors of the published checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch

from medha_worker.device import Device
from medha_worker.kernels.protocol import Kernels
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prediction_head import PredictionHead
from medha_worker.model.prepared_step import PreparedStep
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import PredictionWeights, Progress, Weights, load_head


class MtpHead(PredictionHead):
    """The layer of an MTP head, whole on one rank, with the part before it."""

    def __init__(
        self, config: ModelConfig, weights: Weights, head: PredictionWeights, *, kernels: Kernels
    ) -> None:
        """`config` is that of a model with a head (`ModelConfig.with_head`)."""
        super().__init__(config, weights, head.embedding, kernels=kernels)
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
    ) -> MtpHead:
        """Read the head of the model of `config`."""
        return cls(config, *load_head(directory, config, device=device, progress=progress), kernels=kernels)

    def taken(self, model: Transformer, hidden: torch.Tensor) -> torch.Tensor:
        return model.normed(hidden)

    def onward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.normed(hidden)

    @property
    def weights_bytes(self) -> int:
        head = self._head
        parts: list[torch.Tensor] = [head.embedding, head.token_norm, head.hidden_norm, head.projection]
        return super().weights_bytes + sum([part.untyped_storage().nbytes() for part in parts])

    def _run_head(self, embedded: torch.Tensor, before: torch.Tensor, step: PreparedStep) -> torch.Tensor:
        both = [self._norm(embedded, self._head.token_norm), self._norm(before, self._head.hidden_norm)]
        entering = self._products.product(torch.cat(both, dim=1), self._head.projection)
        return self._run_layer(entering, step)
