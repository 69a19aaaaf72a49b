"""The head of kind `eagle3`: a layer of its own that goes on from hidden states of three layers of the served model.

At a position, the three hidden states are side by side, and one product reduces them to one of the head's width. That and
the embedding of the token that comes next are normed, and together are the input of attention; the reduced state is what
the layer adds to. Norm and output head after it are the head's own. Its logits are of the token after the one that was
embedded, for a part of the vocabulary: all other tokens have no probability. Its own hidden state, before the norm, takes
the place of the reduced one where a further token is guessed.

Reference: EAGLE-3 (arXiv 2503.01840), section 3, and the tensors of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from medha_worker.device import Device
from medha_worker.kernels.protocol import Kernels
from medha_worker.model.eagle3_config import Eagle3Config
from medha_worker.model.eagle3_tensors import (
    EMBEDDING,
    FC_BIAS,
    Eagle3Tensors,
    find_eagle3_tensors,
    is_saved_by_torch,
)
from medha_worker.model.kv_scales import HeadWeights, LayerScales, scales_of_heads
from medha_worker.model.prediction_head import PredictionHead
from medha_worker.model.prepared_step import PreparedStep
from medha_worker.model.rope import inverse_frequencies
from medha_worker.model.torch_file import read_torch_file
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import LayerWeights, Weights

_NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class Eagle3Weights:
    """The parts of an EAGLE-3 head around its layer.

    Attributes:
        embedding: [vocab, hidden].
        owns_embedding: Whether it takes memory of its own, beside the served model's on this rank.
        reduction: [3 * target hidden, hidden].
        reduction_bias: [hidden]; None: there is none.
        hidden_norm: The norm of the reduced state, [hidden]. That of the embedding is the layer's `input_norm`.
        targets: Tokens that the head's ids stand for, int64 [draft vocab]; None: the same.
    """

    embedding: torch.Tensor
    owns_embedding: bool
    reduction: torch.Tensor
    reduction_bias: torch.Tensor | None
    hidden_norm: torch.Tensor
    targets: torch.Tensor | None


class Eagle3Head(PredictionHead):
    """An EAGLE-3 head, whole on one rank."""

    def __init__(
        self, config: Eagle3Config, weights: Weights, head: Eagle3Weights, *, kernels: Kernels
    ) -> None:
        super().__init__(config.layer, weights, head.embedding, kernels=kernels)
        self._head = head
        self._target_hidden_size = config.target_hidden_size
        self._norms_before_residual = config.norms_before_residual

    @classmethod
    def read(
        cls,
        directory: Path,
        config: Eagle3Config,
        *,
        device: Device,
        kernels: Kernels,
        embedding: torch.Tensor | Callable[[], torch.Tensor],
    ) -> Eagle3Head:
        """Read the head of `config`.

        `embedding` is that of the served model, for a head without one: the tensor that this rank holds anyway, or what reads
        it.

        Raises:
            CheckpointInvalid, ModelUnsupported: as in `find_eagle3_tensors`.
        """
        reader = _Reader(find_eagle3_tensors(directory, config), device)
        return cls(config, *reader.read(config, embedding), kernels=kernels)

    @property
    def weights_bytes(self) -> int:
        head = self._head
        parts = [head.reduction, head.reduction_bias, head.hidden_norm, head.targets]
        parts += [head.embedding] if head.owns_embedding else []
        own = sum([part.untyped_storage().nbytes() for part in parts if part is not None])
        return super().weights_bytes + own

    @torch.inference_mode()
    def taken(self, model: Transformer, hidden: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return self._reduced(hidden[:, self._target_hidden_size :].contiguous())

    def _taken_of_nothing(self, embedded: torch.Tensor) -> torch.Tensor:
        return self._reduced(embedded.new_zeros(embedded.shape[0], self._head.reduction.shape[0]))

    def _reduced(self, collected: torch.Tensor) -> torch.Tensor:
        return self._products.product(collected, self._head.reduction, self._head.reduction_bias)

    def onward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def _run_head(self, embedded: torch.Tensor, before: torch.Tensor, step: PreparedStep) -> torch.Tensor:
        (layer,) = self._weights.layers
        assert step.layers is not None
        assert step.rotations is not None
        step.ready.wait()
        normed = self._norm(before, self._head.hidden_norm)
        both = torch.cat([self._norm(embedded, layer.input_norm), normed], dim=1)
        hidden = (normed if self._norms_before_residual else before).clone()
        try:
            self._layer(0, layer, hidden, both, None, step.rotations[self._ropes[0]], step.layers)
        finally:  # after an error, too: work before it may still run
            self._in_flight.keep(step)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits over the served model's vocabulary, float32 [rows, vocab]."""
        assert self._weights.head is not None
        own = self._products.product(self.normed(hidden), self._weights.head).float()
        if self._head.targets is None:
            return own
        logits = own.new_full((own.shape[0], self.config.vocab_size), _NEGATIVE_INFINITY)
        return logits.index_copy_(1, self._head.targets, own)


class _Reader:
    """Reads a head's tensors into the device's memory, in its data type."""

    def __init__(self, found: Eagle3Tensors, device: Device) -> None:
        self._found, self._device = found, device

    def read(
        self, config: Eagle3Config, embedding: torch.Tensor | Callable[[], torch.Tensor]
    ) -> tuple[Weights, Eagle3Weights]:
        layer, targets = self._layer(config), self._found.targets
        hidden_norm = self._tensor("midlayer.hidden_norm.weight")
        is_fp8 = config.layer.kv_dtype == "fp8"
        if EMBEDDING in self._found.places:
            embedded, owns = self._tensor(EMBEDDING), True
        else:
            embedded, owns = (embedding(), True) if callable(embedding) else (embedding, False)
        return (
            Weights(
                self._device,
                [layer],
                0,
                None,
                self._tensor("norm.weight"),
                self._linear("lm_head"),
                [_kv_scales(config, layer, hidden_norm)] if is_fp8 else None,
            ),
            Eagle3Weights(
                embedding=embedded,
                owns_embedding=owns,
                reduction=self._linear("fc"),
                reduction_bias=self._tensor(FC_BIAS) if FC_BIAS in self._found.places else None,
                hidden_norm=hidden_norm,
                targets=None if targets is None else self._device.place(torch.from_numpy(targets)),
            ),
        )

    def _layer(self, config: Eagle3Config) -> LayerWeights:
        layer = config.layer
        attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
        qkv = [f"{attention}{name}_proj" for name in "qkv"]
        gate_up = [f"{mlp}gate_proj", f"{mlp}up_proj"]
        return LayerWeights(
            input_norm=self._tensor("midlayer.input_layernorm.weight"),
            qkv=self._linear(*qkv),
            qkv_bias=self._biases(*qkv) if layer.qkv_bias else None,
            q_norm=None,
            k_norm=None,
            output=self._linear(f"{attention}o_proj"),
            output_bias=self._biases(f"{attention}o_proj") if layer.output_bias else None,
            post_norm=self._tensor("midlayer.post_attention_layernorm.weight"),
            gate_up=self._linear(*gate_up),
            gate_up_bias=self._biases(*gate_up) if layer.mlp_bias else None,
            down=self._linear(f"{mlp}down_proj"),
            down_bias=self._biases(f"{mlp}down_proj") if layer.mlp_bias else None,
        )

    def _linear(self, *names: str) -> torch.Tensor:
        """Return weights side by side, [in, out of all]."""
        return torch.cat([self._tensor(f"{name}.weight") for name in names]).t().contiguous()

    def _biases(self, *names: str) -> torch.Tensor:
        return torch.cat([self._tensor(f"{name}.bias") for name in names])

    def _tensor(self, name: str) -> torch.Tensor:
        path, stored_as = self._found.places[name]
        tensor: Any
        if is_saved_by_torch(path):
            tensor = read_torch_file(path)[stored_as].clone()  # so that the file may change later
        else:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(stored_as)
        placed: torch.Tensor = tensor.to(device=self._device.torch_device, dtype=self._device.dtype)
        return placed.contiguous()


def _kv_scales(config: Eagle3Config, layer: LayerWeights, hidden_norm: torch.Tensor) -> LayerScales:
    """Return scales of K and V that no hidden states can exceed, for a pool in FP8."""
    _, factor = inverse_frequencies(config.layer.rope, config.layer.rope_dim)
    norms = torch.cat([layer.input_norm, hidden_norm])
    made_by = HeadWeights(layer.qkv, layer.qkv_bias, norms, None, factor)
    return scales_of_heads(made_by, config.layer.num_kv_heads, config.layer.head_dim)
