"""The MLP of a sparse layer: a router chooses experts for each row, and each expert computes its rows at once.

No row is dropped, however many choose the same expert. All tensor ranks choose the same experts, because they route the
same bits: an all-reduce gives the same sum to all of them.
"""

from __future__ import annotations

import torch

from medha_worker.kernels.protocol import Kernels
from medha_worker.model.model_config import ExpertsConfig
from medha_worker.model.weights import LayerWeights


def chosen_experts(logits: torch.Tensor, experts: ExpertsConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the indexes of each row's experts, float32 and int64 [rows, per_token].

    The softmax is over all experts, before the choice. A row of NaN has weights of NaN and some experts.
    """
    probabilities = torch.softmax(logits.float(), dim=-1)
    weights, chosen = probabilities.topk(experts.per_token, dim=-1)
    if experts.renormalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


def experts_mlp(
    kernels: Kernels, experts: ExpertsConfig, layer: LayerWeights, normed: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of the results of each row's experts, [rows, hidden_size], of this rank's columns.

    Nothing waits for the device, unless the products do.
    """
    assert layer.router is not None
    assert isinstance(layer.gate_up, torch.Tensor), "experts are never quantised"
    assert isinstance(layer.down, torch.Tensor), "experts are never quantised"
    rows, per_token = normed.shape[0], experts.per_token
    weights, chosen = chosen_experts(kernels.products.product(normed, layer.router), experts)

    by_expert, order = chosen.flatten().sort(stable=True)
    indexes = torch.arange(experts.count, device=normed.device)
    row_ends = torch.searchsorted(by_expert, indexes, right=True).to(torch.int32)
    x = normed[order // per_token]
    wide = kernels.rows.silu_multiply(kernels.experts.product(x, layer.gate_up, row_ends))
    found = kernels.experts.product(wide, layer.down, row_ends)

    results = torch.empty_like(found)
    results[order] = found
    results = results.view(rows, per_token, -1)
    # Added one by one in float32: in the order of each row's own choice, whatever rows are beside it.
    total = results[:, 0] * weights[:, :1]
    for index in range(1, per_token):
        total.addcmul_(results[:, index], weights[:, index, None])
    return total.to(normed.dtype)
