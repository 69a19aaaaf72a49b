"""Models of any sizes give the logits of `transformers` on any grid, or are refused with the name of what is wrong.

Sizes, formats, grids and requests are drawn: odd vocabularies, one KV head, experts that no token passes, windows shorter than
a block, groups of quantised weights that cross a slice, and grids that are no powers of two.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from medha.errors import ConfigInvalid
from medha.kv.window_tables import frees_windows
from medha.topology import Topology, stage_layers
from medha_worker.device import host_device
from medha_worker.kernels import activation_rounding, fast_forms
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.model.model_config import ModelConfig

from .. import ranks as ranks_module
from ..model.test_model_transformer import save_reference
from ..quantised_models import bend, quantise_checkpoint, quantise_experts_of, with_sizes
from ..random_steps import STRATEGIES, Cut, Query, asked
from ..ranks import Ranks
from .test_exactness import TOLERANCE, check, new_planner, smallest_window_pool, tokens_before_a_tie

pytestmark = pytest.mark.timeout(1800)  # an example may take seconds where other tests run beside it

LINEAR_FORMATS = ("", "", "", "w4a16", "w4a16-asym", "awq", "gptq-desc-act", "w8a8", "fp8-block")
FORMATS = {"gpt_oss": ("", "mxfp4")}
UNITS = {"awq": 8, "gptq-desc-act": 8, "mxfp4": 32}
"""Numbers that the widths of a format are multiples of: whole words and blocks hold them."""
FAMILIES = (
    *("llama", "llama-biased", "mistral-window", "qwen2", "qwen2-window", "qwen3", "gemma3_text-window"),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
)
LATENT = ("deepseek_v2", "deepseek_v3")
LARGEST_ROUNDING = 0.01
"""A drawn model whose own rounding moves logits by more is not compared: a wrong product could hide in it."""


@dataclass(frozen=True)
class Drawn:
    """A model of a family, with these fields of config.json, and the grid that serves it.

    `scheme` is the format of its weights, in groups of `group` columns; empty: they are float32.
    """

    family: str
    sizes: dict[str, Any]
    topology: Topology
    scheme: str = ""
    group: int = 16
    requests: list[Query] = field(default_factory=lambda: [Query(30, 3), Query(9, 2, 1)])
    strategies: list[tuple[str, Cut]] = field(default_factory=lambda: list(STRATEGIES))
    tokens_per_lane: int = 8
    frees_windows: bool = True
    seed: int = 0

    @property
    def widths(self) -> dict[str, int]:
        """The widths that tensor ranks divide among them, by field."""
        sizes, layers = self.sizes, self.sizes["num_hidden_layers"]
        sparse = 0
        if self.family in LATENT:
            sparse = max(0, layers - sizes["first_k_dense_replace"])
        elif self.family == "qwen3_moe":
            sparse = layers // sizes["decoder_sparse_step"]
        found = {"intermediate_size": sizes["intermediate_size"]} if sparse < layers else {}
        if sparse:
            found["moe_intermediate_size"] = sizes["moe_intermediate_size"]
        return found

    @property
    def faults(self) -> set[str]:
        """Words of the errors that the grid may be refused with; empty: it must serve the model."""
        sizes, size = self.sizes, self.topology.tensor
        divided = {"num_attention_heads": sizes["num_attention_heads"], **self.widths}
        found = {name for name, value in divided.items() if value % size}
        kv_heads = 1 if self.family in LATENT else sizes["num_key_value_heads"]
        if kv_heads % size and size % kv_heads:
            found.add("num_key_value_heads")
        value_dim = sizes["v_head_dim" if self.family in LATENT else "head_dim"]
        inputs = [sizes["num_attention_heads"] * value_dim, *self.widths.values()]
        if self.scheme == "fp8-block" and size > 1 and any(one // size % self.group for one in inputs):
            found.add("share a scale")
        if self.topology.stream > sizes["num_hidden_layers"]:
            found.add("parallelism.stream")
        return found


@st.composite
def drawn_models(draw: st.DrawFn, most_ranks: int) -> Drawn:
    """Draw a model and a grid of at most so many ranks, which fits the model in four of five examples."""

    def whole(least: int, most: int) -> int:
        return draw(st.integers(least, most))

    family = draw(st.sampled_from(FAMILIES))
    scheme = draw(st.sampled_from(FORMATS.get(family, LINEAR_FORMATS)))
    grids = [
        Topology(tensor, stream, kv)
        for tensor in (1, 2, 3, 4, 8)
        for stream in (1, 2, 3)
        for kv in (1, 2, 3, 4)
        if tensor * stream * kv <= most_ranks
    ]
    topology = draw(st.sampled_from(grids))
    fits = whole(0, 4) > 0
    tensor, unit = topology.tensor if fits else 1, UNITS.get(scheme, 1)
    group = draw(st.sampled_from([8, 16]))
    cut = tensor * group if fits and scheme == "fp8-block" else math.lcm(tensor, unit)

    kv_heads = draw(st.sampled_from([1, 1, tensor, 2 * tensor] if fits else [1, 2, 3]))
    heads = kv_heads * (tensor // math.gcd(kv_heads, tensor)) * whole(1, 2)
    head_dim = draw(st.sampled_from([8, 16] if unit > 1 or scheme == "fp8-block" else [6, 8, 10, 16]))
    hidden = heads * max(draw(st.sampled_from([4, 6, 8])), unit)
    if family.startswith("qwen2"):  # which has no field for it
        hidden = heads * head_dim
    if fits and scheme == "fp8-block" and heads * head_dim // tensor % group:
        head_dim = group
        hidden = heads * head_dim
    sizes: dict[str, Any] = {
        "vocab_size": whole(5, 131),
        "hidden_size": hidden,
        "intermediate_size": cut * whole(1, 6),
        "num_hidden_layers": max(whole(1, 3), topology.stream if fits else 1),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family.endswith("-window") or family == "gpt_oss":
        sizes["sliding_window"] = whole(1, 12)
    if family == "gemma3_text-window":
        sizes["query_pre_attn_scalar"] = whole(1, 40)
    if family == "qwen2-window":
        sizes["max_window_layers"] = whole(0, 2)
    if family in ("mixtral", "gpt_oss"):
        sizes["num_local_experts"] = whole(1, 7)
        sizes["num_experts_per_tok"] = whole(1, min(3, sizes["num_local_experts"]))
    if family == "qwen3_moe":
        sizes["num_experts"] = whole(1, 7)
        sizes |= {
            "num_experts_per_tok": whole(1, min(3, sizes["num_experts"])),
            "moe_intermediate_size": cut * whole(1, 4),
            "decoder_sparse_step": whole(1, 2),
            "norm_topk_prob": draw(st.booleans()),
        }
    if family in LATENT:
        groups, in_group = whole(1, 3), whole(2, 3)
        kept = whole(1, groups)
        width = head_dim if scheme else 1
        # transformers views pairs of numbers of DeepSeek-V2 as complex, which must begin at an even place: behind the latent,
        # and behind the part of a query without positions.
        even = 2 if family == "deepseek_v2" else 1
        sizes |= {
            "num_key_value_heads": heads,
            "q_lora_rank": draw(st.sampled_from([None, 8, 24])),
            "kv_lora_rank": 8 * whole(1, 4) if scheme else even * whole(2, 33 // even),
            "qk_nope_head_dim": width * whole(1, 2) if scheme else even * whole(2, 20 // even),
            "qk_rope_head_dim": 8 if scheme else 2 * whole(1, 9),
            "v_head_dim": width * whole(1, 2) if scheme else whole(2, 20),
            "n_routed_experts": groups * in_group,
            "num_experts_per_tok": whole(1, min(3, kept * in_group)),
            "n_group": groups,
            "topk_group": kept,
            "n_shared_experts": whole(1, 2),
            "moe_intermediate_size": cut * whole(1, 4),
            "first_k_dense_replace": whole(0, 2),
        }
        sizes.pop("head_dim")
    return Drawn(
        family,
        sizes,
        topology,
        scheme,
        group,
        requests=draw(st.lists(asked(40), min_size=1, max_size=3)),
        strategies=draw(st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=3)),
        tokens_per_lane=draw(st.sampled_from([4, 8, 16, 60])),
        frees_windows=draw(st.booleans()),
        seed=whole(0, 1000),
    )


def refusal_of(config: ModelConfig, topology: Topology) -> str | None:
    """Return the error with which ranks refuse a grid; None if they serve it."""
    try:
        config.require_tensor_size(topology.tensor)
        stage_layers(config.num_layers, topology.stream)
    except ConfigInvalid as refusal:
        return str(refusal)
    return None


@torch.inference_mode()
def rounding_of(reference: torch.nn.Module, vocab: int) -> float:
    """Return how far logits of `transformers` move, at most, if each product is rounded once more, over random texts.

    Wide models with large weights make such a difference many times larger from layer to layer.
    """
    generator = torch.Generator().manual_seed(0)

    def rounded(_: torch.nn.Module, __: object, product: torch.Tensor) -> torch.Tensor:
        """Move each number by some units in the last place of its row's largest, as another order of sums does."""
        unit = torch.finfo(product.dtype).eps * product.abs().amax(-1, keepdim=True)
        return product + unit * torch.randn(product.shape, generator=generator)

    largest = 0.0
    for ids in torch.randint(vocab, (4, 64), generator=generator):
        certain = ids[: tokens_before_a_tie(reference, ids)]
        if not len(certain):
            continue
        before = reference(certain[None]).logits
        with ExitStack() as hooks:
            for module in reference.modules():
                if isinstance(module, torch.nn.Linear):
                    hooks.callback(module.register_forward_hook(rounded).remove)
            largest = max(largest, float((reference(certain[None]).logits - before).abs().max()))
    return largest


def examine(one: Drawn, *, compiles: bool) -> None:
    """Write the model, and compare it on the grid with `transformers`, or see it refused for a fault that it has.

    `compiles`: with the kernels that a rank chooses, which are compiled for these sizes; else in plain torch.
    """
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        directory = Path(scratch)
        sizes = dict(one.sizes)
        if one.family.startswith("qwen2"):
            sizes.pop("head_dim")
        reference = save_reference(directory, one.family, initializer_range=0.3, **sizes)
        reference.set_experts_implementation(
            "eager"
        )  # torch's grouped matmul takes no widths that are not aligned
        if one.scheme == "mxfp4":
            quantise_experts_of(directory, reference)
        elif one.scheme:
            quantise_checkpoint(directory, reference, with_sizes(one.scheme, one.group), is_smooth=True)
        patch.setattr(activation_rounding, "_nearest", bend)
        patch.setattr(fast_forms, "_names", lambda _: ())  # integers cannot be bent
        if not compiles:
            plain = torch_kernels(host_device(torch.float32))
            patch.setattr(ranks_module, "kernels_of_a_rank", lambda *_: plain)
        config = ModelConfig.from_directory(directory)
        refusal = refusal_of(config, one.topology)
        assert (refusal is None) == (not one.faults)
        if refusal is not None:
            assert any(word in refusal for word in one.faults), refusal
            return
        ranks = Ranks(one.topology, directory)
        try:
            frees = one.frees_windows and frees_windows(ranks.windows, has_tiers=False)
            planner = new_planner(
                one.topology.kv,
                one.tokens_per_lane,
                False,
                one.seed,
                vocab=one.sizes["vocab_size"],
                window_pool=smallest_window_pool(ranks) if frees else None,
            )
            rounding = rounding_of(reference, one.sizes["vocab_size"])
            assume(rounding <= LARGEST_ROUNDING)
            tolerance = max(TOLERANCE, rounding)
            check(ranks, reference, planner, one.requests, one.strategies, 1, tolerance=tolerance)
        finally:
            ranks.close()


WIDE = {
    "vocab_size": 5,
    "hidden_size": 256,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
DENSE = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 10,
}


@given(drawn_models(4))
@example(Drawn("llama", DENSE | {"vocab_size": 5}, Topology(4, 1, 1)))
@example(Drawn("mistral-window", DENSE | {"sliding_window": 3}, Topology(1, 2, 2)))
@example(
    Drawn(
        "mixtral",
        DENSE | {"num_local_experts": 7, "num_experts_per_tok": 1},
        Topology(2, 1, 2),
        requests=[Query(3, 2)],  # some experts have no token
    )
)
@example(Drawn("qwen3", DENSE | {"intermediate_size": 36}, Topology(4, 1, 1), "w4a16", 8))
@example(Drawn("qwen3", DENSE | {"head_dim": 8}, Topology(4, 1, 1), "fp8-block", 16))
@example(Drawn("llama", DENSE, Topology(3, 1, 1)))
@example(Drawn("qwen2", WIDE, Topology(4, 1, 1), "awq"))  # one more rounding moves logits by 6e-4
@settings(max_examples=8)
def test_a_model_of_any_size_is_right_on_any_grid_or_refused(one: Drawn) -> None:
    examine(one, compiles=False)


@pytest.mark.long
@given(drawn_models(8), st.booleans())
@settings(max_examples=400)
def test_many_models_of_any_size_are_right_on_any_grid_or_refused(one: Drawn, compiles: bool) -> None:
    examine(one, compiles=compiles)
