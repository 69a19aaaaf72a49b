"""The base of prediction heads: layers that guess further tokens from the hidden states of the served model.

At position p, a head combines the served model's hidden state at p with the embedding of token p + 1, and predicts token
p + 2. To guess further tokens, it takes its own hidden states in place of the served model's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

from medha_worker.kernels.protocol import Kernels
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prepared_step import PreparedStep
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard, Weights


class PredictionHead(Transformer, ABC):
    """A layer, whole on one rank, with the parts before and after it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        embedding: torch.Tensor,
        *,
        kernels: Kernels,
    ) -> None:
        """The layer is the last one of `config`; `embedding` is [vocab, hidden_size]."""
        last = config.num_layers
        super().__init__(config, Shard(0, 1, last - 1, last, last), weights, kernels=kernels)
        self._embedding = embedding

    @property
    def takes_ids(self) -> bool:
        return True

    @abstractmethod
    def taken(self, model: Transformer, hidden: torch.Tensor) -> torch.Tensor:
        """Convert the served model's hidden states to the argument `before` of `forward`, [rows, hidden_size].

        `hidden` are rows of the result of the served model's last stage, [rows, leaving_size].
        """

    @abstractmethod
    def onward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Convert the head's own hidden states to the argument `before` of `forward`, for guesses after the first."""

    @abstractmethod
    def _run_head(self, embedded: torch.Tensor, before: torch.Tensor, step: PreparedStep) -> torch.Tensor:
        """Return the head's hidden states; both inputs are [rows, hidden_size]."""

    @torch.inference_mode()
    def forward(
        self, tokens_or_hidden: torch.Tensor, step: PreparedStep, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the head over a prepared step, writing K and V at its positions.

        Args:
            tokens_or_hidden: Ids of the tokens after the positions of the rows, int64 [rows].
            step: The step.
            before: What `taken` or `onward` has returned for these positions. None, to measure time.

        Returns:
            Hidden states, [rows, hidden_size], before the head's norm.
        """
        embedded = F.embedding(self.device.place(tokens_or_hidden), self._embedding)
        return self._run_head(embedded, self._taken_of_nothing(embedded) if before is None else before, step)

    def _taken_of_nothing(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return what `taken` would for as many rows, in as much time, without hidden states of the served model."""
        return torch.zeros_like(embedded)

    def _run_layer(self, entering: torch.Tensor, step: PreparedStep) -> torch.Tensor:
        """Run the layer as one of the served model's is run."""
        return super().forward(entering, step)
