"""The MLP of a sparse layer: a router chooses experts for each row, and each expert computes its rows at once.

No row is dropped, however many choose the same expert. All tensor ranks choose the same experts, because they route the
same bits, an all-reduce gives the same sum to all of them, and they route the same rows at once. In a product of fewer
rows, a library may round otherwise: a rank would then add its columns of one expert to the others' columns of another.
"""

from __future__ import annotations

import torch

from medha_worker.kernels.protocol import Kernels
from medha_worker.model.expert_routing import ExpertRouting
from medha_worker.model.model_config import ClampedSwiglu, ExpertsConfig
from medha_worker.model.quantised_experts import QuantisedExperts, products_of_experts
from medha_worker.model.quantised_weights import LinearProducts
from medha_worker.model.weights import LayerWeights

_LEAST_SUM = 1e-20
"""Addend of a sum of weights before they are divided by it, because all scores of a sigmoid can be 0."""

Choice = tuple[torch.Tensor, torch.Tensor]
"""The weights and the indexes of each row's experts, float32 and int64 [rows, per_token]."""


def choose(kernels: Kernels, experts: ExpertsConfig, layer: LayerWeights, normed: torch.Tensor) -> Choice:
    """Return the choice of the layer's router for each row of `normed`, [rows, hidden_size].

    Scores are over all experts, before the choice. Probabilities that are scaled to a sum of 1 are those of a softmax over
    the chosen experts alone (gpt-oss). A row of NaN has weights of NaN and some experts.
    """
    assert layer.router is not None
    routing = experts.routing
    logits = kernels.products.product(normed.to(layer.router.dtype), layer.router, layer.router_bias).float()
    if routing.scores == "softmax":
        scores = ranked = torch.softmax(logits, dim=-1)
    else:
        scores = ranked = _sigmoid(logits)
    if layer.router_correction is not None:
        ranked = scores + layer.router_correction
    if routing.kept_groups < routing.groups:
        ranked = _within_groups(routing, ranked)
    chosen = ranked.topk(experts.per_token, dim=-1).indices
    weights = scores.gather(1, chosen)
    if experts.renormalises:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    return (weights if routing.scale == 1 else weights * routing.scale), chosen


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid of each value, with the same bits wherever the value stands: the softmax of it and 0.

    `torch.sigmoid` has two ways to compute it on CPUs. The number of all values, and of threads, decides which values
    it computes in the slower one, which rounds otherwise.
    """
    return torch.softmax(torch.stack([logits, torch.zeros_like(logits)], dim=-1), dim=-1)[..., 0]


def _within_groups(routing: ExpertRouting, ranked: torch.Tensor) -> torch.Tensor:
    """Return ranked scores, [rows, experts], with -inf in place of those outside of a row's best groups."""
    by_group = ranked.view(len(ranked), routing.groups, ranked.shape[1] // routing.groups)
    best = by_group.topk(1 if routing.scores == "softmax" else 2, dim=-1).values.sum(dim=-1)
    kept = best.topk(routing.kept_groups, dim=-1).indices
    outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
    return by_group.masked_fill(outside[..., None], -torch.inf).flatten(1)


def experts_mlp(
    kernels: Kernels,
    products: LinearProducts,
    experts: ExpertsConfig,
    layer: LayerWeights,
    normed: torch.Tensor,
    choice: Choice,
) -> torch.Tensor:
    """Return the weighted sum of the results of each row's experts, [rows, hidden_size], of this rank's columns.

    The MLP that every row passes beside its experts is not part of it (`add_shared`).

    `choice` is what `choose` returned for these rows. Nothing waits for the device, unless the products do.
    """
    assert isinstance(layer.gate_up, torch.Tensor | QuantisedExperts)
    assert isinstance(layer.down, torch.Tensor | QuantisedExperts)
    rows, per_token = normed.shape[0], experts.per_token
    weights, chosen = choice

    by_expert, order = chosen.flatten().sort(stable=True)
    indexes = torch.arange(experts.count, device=normed.device)
    row_ends = torch.searchsorted(by_expert, indexes, right=True).to(torch.int32)
    x = normed[order // per_token]
    wide = products_of_experts(kernels, products, x, layer.gate_up, row_ends)
    if layer.gate_up_bias is not None:
        wide.add_(layer.gate_up_bias[by_expert])
    if experts.swiglu is not None:
        _clamp(wide, experts.swiglu)
    narrow = kernels.rows.silu_multiply(wide)
    found = products_of_experts(kernels, products, narrow, layer.down, row_ends, is_partial=True)
    if layer.down_bias is not None:
        found.add_(layer.down_bias[by_expert])

    results = torch.empty_like(found)
    results[order] = found
    results = results.view(rows, per_token, -1)
    # Added one by one in float32: in the order of each row's own choice, whatever rows are beside it.
    total = results[:, 0] * weights[:, :1]
    for index in range(1, per_token):
        total.addcmul_(results[:, index], weights[:, index, None])
    return total.to(normed.dtype)


def add_shared(
    kernels: Kernels, products: LinearProducts, layer: LayerWeights, normed: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """Add what the MLP beside the experts makes of `normed` to `total`, both [rows, hidden_size]; return that."""
    if layer.shared_gate_up is not None:
        assert layer.shared_down is not None
        wide = kernels.rows.silu_multiply(products.product(normed, layer.shared_gate_up))
        products.add_product(total, wide, layer.shared_down, is_partial=True)
    return total


def _clamp(gate_up: torch.Tensor, swiglu: ClampedSwiglu) -> None:
    """Change gates and ups, [rows, 2 * width], in place, so that silu(gate) * up of them is the clamped activation.

    With a = alpha, silu(a * gate) * ((up + 1) / a) = (up + 1) * gate * sigmoid(a * gate). So one kernel serves both.
    """
    gate, up = gate_up.chunk(2, dim=1)
    gate.clamp_(max=swiglu.limit).mul_(swiglu.alpha)
    up.clamp_(-swiglu.limit, swiglu.limit).add_(1.0).div_(swiglu.alpha)
