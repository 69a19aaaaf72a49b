"""Every shape of grid computes the logits of `transformers`, whichever lane computes a row or holds its KV.

The tests write random steps, and real ranks run them, as threads of this process that are connected by gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.kv.pools import WindowPool
from medha.kv.window_tables import frees_windows, widest_window, window_need
from medha.model.latent_shape import LatentShape
from medha.shards import segments_of
from medha.topology import Topology
from medha_worker.checkpoints.quantised_checkpoint import QUANTISATIONS
from medha_worker.device import Device, host_device
from medha_worker.kernels import activation_rounding, fast_forms
from medha_worker.kernels import torch_attention as attention
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.protocol import Kernels
from medha_worker.model import latent_forms
from medha_worker.model.transformer import Transformer
from medha_worker.rank.kv_parallel_plan import positions

from ..fp8_kv_reference import round_kv
from ..model.test_model_transformer import save_reference
from ..quantised_models import bend, quantise_checkpoint, quantise_experts_of, with_sizes
from ..random_steps import STRATEGIES, Cut, Planner, Query, Running, asked
from ..ranks import Ranks

pytestmark = pytest.mark.timeout(400)  # an example may take seconds where other tests run beside it

TOLERANCE = 1e-4
BLOCK_TOKENS = 4
KV_BLOCKS = 256

ARCHITECTURES = ("llama", "llama-biased", "mistral", "qwen2", "qwen3")
SPARSE = ("mixtral", "qwen3_moe", "qwen3_moe-mixed")
LATENT = ("deepseek_v2", "deepseek_v3")
# Experts of width 96 have three blocks of MXFP4, which slices cut.
GPT_OSS = {"gpt_oss": {}, "gpt_oss-mxfp4": {"intermediate_size": 96}}
# Eight stages need as many layers, eight tensor ranks as many heads: four times as many as there are KV heads.
SIZES = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.1}

QUANTISED = ("w8a8", "w4a16", "w4a16-asym", "fp8", "fp8-tensor", "awq", "gptq-desc-act")
"""Formats, in groups of 16 columns that slices cut. Blocks of FP8, whose activations have groups, cannot be cut."""
QUANTISED_EXPERTS: dict[str, dict[str, Any]] = {
    # Widths that blocks of 16 divide on eight ranks, and those of the others do not.
    "fp8-block deepseek_v3": {"moe_intermediate_size": 128, "intermediate_size": 128, "v_head_dim": 16},
    "fp8-block qwen3_moe": {"moe_intermediate_size": 128, "intermediate_size": 128},
    "fp8 mixtral": {},
    "w8a8 deepseek_v2": {},
    "w4a16 deepseek_v3": {},
    "w4a16-asym mixtral": {},
    "awq qwen3_moe": {},
    "awq deepseek_v3": {},
    "gptq-desc-act mixtral": {},
    "gptq-desc-act deepseek_v2": {},
}
"""Formats of models with experts, and sizes of these models.

Activations are bent where they would be rounded: a number that is rounded to the other step can lead a row to other experts.
"""
# An activation that lies between two steps may be rounded to the other one, which the last bit of a sum decides.
TOLERANCES = {"w8a8": 0.1, "fp8": 0.3, "fp8-tensor": 0.3}

ROUNDED_KV = " fp8-kv"
"""End of the names of models whose K and V are rounded to FP8."""
# A number of K or V may likewise be rounded to the other one of two.
ROUNDED_KV_TOLERANCE = 0.05
ROUNDED_KV_CASES = [
    ((2, 2, 2), "llama"),
    ((1, 2, 2), "gemma3_text-window"),
    ((2, 1, 2), "deepseek_v2"),
    ((1, 1, 2), "gpt_oss"),
]

POWERS = (1, 2, 4, 8)
SHAPES = [shape for shape in product(POWERS, repeat=3) if np.prod(shape) <= 8]
# Each pair of sizes that fits eight ranks occurs, and so does each architecture.
PAIRWISE = [
    ((2, 2, 2), "llama"),
    ((1, 2, 4), "qwen3"),
    ((4, 1, 2), "qwen2"),
    ((1, 8, 1), "mistral"),
    ((8, 1, 1), "llama-biased"),
    ((1, 1, 8), "llama"),
    ((1, 4, 2), "llama-biased"),
    ((2, 4, 1), "qwen2"),
    ((4, 2, 1), "qwen3"),
    ((2, 1, 4), "mistral"),
    ((1, 2, 2), "mixtral"),
    ((2, 1, 2), "qwen3_moe-mixed"),
    ((2, 2, 1), "mixtral"),
    ((4, 1, 1), "qwen3_moe"),
    ((1, 2, 2), "deepseek_v2"),
    ((2, 1, 2), "deepseek_v3"),
    ((4, 1, 1), "deepseek_v2"),
    ((1, 1, 4), "gpt_oss"),
    ((2, 1, 2), "gpt_oss-mxfp4"),
]

NEAR_TIE = 2e-5
"""Least distance of what a router ranks at which rounding cannot decide which expert a token goes to."""

FORMS: list[Callable[[LatentShape, int, int, int], bool]] = [
    LatentShape.makes_heads,
    lambda _shape, _rows, _keys, _pairs: True,
    lambda _shape, rows, keys, _pairs: (rows + keys) % 2 == 0,
]
"""Functions that choose the form of attention to latents."""

# Windows end in each of the places where rows, blocks, chunks, stripes, shards and prompts can.
WINDOWS = (1, 2, 3, BLOCK_TOKENS, 7, 16, 30, 64, 149)
WINDOWED = [
    ((1, 1, 4), "mistral-window"),
    ((1, 4, 1), "qwen2-window"),
    ((1, 2, 2), "mistral-window"),
    ((2, 1, 2), "qwen2-window"),
    ((2, 1, 2), "gemma3_text-window"),
]

CASES = (
    [
        pytest.param(
            (shape, architecture, max(1, 4 // max(shape[0], 2))), id=f"{Topology(*shape)} {architecture}"
        )
        for shape, architecture in PAIRWISE  # fewer examples where many all-reduces share two cores
    ]
    + [
        pytest.param((shape, architecture, 2), id=f"{Topology(*shape)} {architecture}")
        for shape, architecture in WINDOWED
    ]
    + [
        pytest.param((shape, name, 1), id=f"{Topology(*shape)} {name}")
        for shape, name in [
            ((2, 1, 1), "w8a8"),
            ((2, 1, 2), "w4a16-asym"),
            ((2, 2, 1), "fp8"),
            ((4, 1, 1), "gptq-desc-act"),
            ((2, 1, 2), "w4a16 gemma3_text-window"),
        ]
    ]
    + [
        pytest.param((shape, name, 1), id=f"{Topology(*shape)} {name}")
        for shape, name in [
            ((2, 1, 2), "fp8-block deepseek_v3"),
            ((1, 2, 2), "w4a16-asym mixtral"),
            ((2, 1, 1), "gptq-desc-act deepseek_v2"),
        ]
    ]
    + [
        pytest.param((shape, name + ROUNDED_KV, 1), id=f"{Topology(*shape)} {name}{ROUNDED_KV}")
        for shape, name in ROUNDED_KV_CASES
    ]
    + [
        pytest.param(
            (shape, name + ROUNDED_KV, 5),
            id=f"{Topology(*shape)} {name}{ROUNDED_KV} long",
            marks=pytest.mark.long,
        )
        for shape, name in product(SHAPES, ("llama", "mistral-window", "deepseek_v3"))
    ]
    + [
        pytest.param((shape, name, 3), id=f"{Topology(*shape)} {name} long", marks=pytest.mark.long)
        for shape, name in product(SHAPES, (*QUANTISED, *QUANTISED_EXPERTS))
    ]
    + [
        pytest.param(
            (shape, architecture, 5), id=f"{Topology(*shape)} {architecture} long", marks=pytest.mark.long
        )
        for index, shape in enumerate(SHAPES)
        for architecture in [("mistral-window", "qwen2-window")[index % 2]]
    ]
    + [
        pytest.param(
            (shape, "gemma3_text-window", 10), id=f"{Topology(*shape)} gemma3 long", marks=pytest.mark.long
        )
        for shape in SHAPES
    ]
    + [
        pytest.param(
            (shape, ARCHITECTURES[index % len(ARCHITECTURES)], 15),
            id=f"{Topology(*shape)} long",
            marks=pytest.mark.long,
        )
        for index, shape in enumerate(SHAPES)
    ]
    + [
        pytest.param(
            (shape, architecture, 5), id=f"{Topology(*shape)} {architecture} long", marks=pytest.mark.long
        )
        for shape, architecture in product(SHAPES, (*SPARSE, *LATENT, *GPT_OSS))
    ]
)

TEXT_PAIRS = [
    ((2, 2, 1), "mixtral"),
    ((1, 2, 1), "gpt_oss"),
    ((2, 1, 1), "w8a8"),
    ((1, 1, 2), "mistral-window"),
    ((1, 2, 1), "awq deepseek_v3"),
    ((1, 1, 2), "llama fp8-kv"),
]
"""Grids and models whose text `make test` compares; `long` has all."""
TEXT_NAMES = (
    *ARCHITECTURES,
    *("mistral-window", "qwen2-window", "gemma3_text-window"),
    *SPARSE,
    *LATENT,
    *GPT_OSS,
    *QUANTISED,
    *QUANTISED_EXPERTS,
    *(name + ROUNDED_KV for name in ("llama", "mistral-window", "deepseek_v3", "gpt_oss")),
)
TEXTS = [
    pytest.param(
        shape,
        name,
        id=f"{Topology(*shape)} {name}",
        marks=[] if (shape, name) in TEXT_PAIRS else [pytest.mark.long],
    )
    for shape, name in product(SHAPES, TEXT_NAMES)
]

TEXT_FAMILIES = {"w8a8 deepseek_v2": 1, "gpt_oss fp8-kv": 1}
"""Other prompts, for models of which two experts tie in the text of the first one."""


def new_planner(lanes: int, tokens_per_lane: int, striped: bool, seed: int, **more: Any) -> Planner:
    fields = {"kv_blocks": KV_BLOCKS, "block_tokens": BLOCK_TOKENS, **more}
    return Planner(lanes, tokens_per_lane, striped, np.random.default_rng(seed), **fields)


def check(
    ranks: Ranks,
    reference: torch.nn.Module,
    planner: Planner,
    asked: list[Query],
    strategies: list[tuple[str, Cut]],
    steps_ahead: int,
    *,
    one_by_one: bool = False,
    kernels: Kernels | None = None,
    tolerance: float = TOLERANCE,
    may_tie: bool = True,
) -> dict[str, Running]:
    """Run random steps of these requests, and compare the logits of every position that was computed.

    Nothing is compared behind a tie of two experts, which fails the test unless it `may_tie`.
    """
    everyone = planner.run(asked, strategies, one_by_one=one_by_one)
    samples, logits = ranks.run(
        planner.steps, planner.prompts, kv_blocks=planner.kv_blocks, block_tokens=BLOCK_TOKENS, steps_ahead=steps_ahead,
        kernels=kernels, window_blocks=planner.window_pool.blocks if planner.window_pool else 0,
    )  # fmt: skip
    for name, one in everyone.items():
        sampled = [sample.token for sample in samples if sample.id == name]
        assert len(sampled) == one.asked.output_tokens
        ids = torch.tensor([*planner.prompts[name].tolist(), *sampled[:-1]])
        with torch.inference_mode():
            wanted = reference(ids[None]).logits[0]
        certain = tokens_before_a_tie(reference, ids)
        assert may_tie or certain == len(ids), f"two experts tie at position {certain}"
        found = {position: logits[name, position] for position in range(one.there, one.length)}
        for position in range(one.there, certain):
            error = float((found[position] - wanted[position]).abs().max())
            assert error <= tolerance, f"{name}, position {position}: {error}"
        ends = wanted[one.asked.prompt_tokens - 1 : certain]
        before_tie = torch.tensor(sampled[: len(ends)], dtype=torch.int64)
        if tolerance == TOLERANCE:
            assert before_tie.tolist() == ends.argmax(-1).tolist()
        chosen = ends.gather(1, before_tie[:, None])
        assert bool((ends.amax(-1) - chosen[:, 0] <= 2 * tolerance).all())
        if certain < len(ids):
            continue
        check_prompt(ranks, name, wanted, ids, range(one.there + 1, one.asked.prompt_tokens), tolerance)
    return everyone


@torch.inference_mode()
def tokens_before_a_tie(reference: torch.nn.Module, ids: torch.Tensor) -> int:
    """Return how many of these tokens come before the first that two experts, or groups, are all but equally good for.

    The reference itself sends such a token to either, as its rows are cut. All tokens behind it attend to it.
    """
    experts = getattr(reference.config, "num_experts_per_tok", None)
    if experts is None:
        return len(ids)
    certain = torch.ones(len(ids), dtype=torch.bool)
    gates = [
        getattr(layer.mlp, name)
        for layer in reference.model.layers
        for name in ("gate", "router")
        if hasattr(layer.mlp, name)
    ]
    if not gates:  # of few layers, all may be dense
        return len(ids)
    routed = reference(ids[None], output_router_logits=True).router_logits
    for logits, gate in zip(routed, gates, strict=True):
        ranked, best_of_group = logits, 1
        if hasattr(gate, "e_score_correction_bias"):
            ranked, best_of_group = logits.sigmoid() + gate.e_score_correction_bias, 2
        if getattr(reference.config, "n_group", None) is not None:
            by_group = ranked.view(len(ids), reference.config.n_group, -1)
            groups = by_group.topk(best_of_group, dim=-1).values.sum(-1)
            kept = groups.topk(reference.config.topk_group, dim=-1).indices
            certain &= _is_certain(groups, reference.config.topk_group)
            outside = torch.ones_like(groups, dtype=torch.bool).scatter_(1, kept, False)
            ranked = by_group.masked_fill(outside[..., None], -torch.inf).flatten(1)
        certain &= _is_certain(ranked, experts)
    return len(ids) if bool(certain.all()) else int(certain.int().argmin())


def _is_certain(ranked: torch.Tensor, count: int) -> torch.Tensor:
    """True for each row whose `count` best numbers are clearly better than the others, if there are any."""
    if count == ranked.shape[1]:
        return torch.ones(len(ranked), dtype=torch.bool)
    best = ranked.topk(count + 1, dim=-1).values
    return best[:, -2] - best[:, -1] > NEAR_TIE


def smallest_window_pool(ranks: Ranks) -> WindowPool:
    """Return the smallest pool in which five requests find their windows: little is left for those of cached prefixes."""
    window = widest_window(ranks.windows)
    blocks = window_need(
        window, block_size_tokens=BLOCK_TOKENS, max_running=5, max_chunk_tokens=5 * 150, max_model_len=160
    ).of(5)
    return WindowPool(blocks, window)


def slide(ranks: Ranks, reference: Any, window_tokens: int) -> None:
    """Give this window to the layers of the replica and of the reference that have one."""
    config = reference.config
    layers = getattr(config, "layer_types", ["sliding_attention"] * config.num_hidden_layers)
    if getattr(config, "sliding_window", None) is not None and "sliding_attention" in layers:
        config.sliding_window = window_tokens
        ranks.slide([window_tokens if layer == "sliding_attention" else None for layer in layers])


def check_prompt(
    ranks: Ranks,
    name: str,
    logits: torch.Tensor,
    ids: torch.Tensor,
    asked: range,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare the log-probabilities of a prompt's tokens at positions `asked` with the logits of transformers."""
    parts = [part for reported in ranks.scored.values() for one, part in reported if one == name]
    natural = torch.log_softmax(logits, dim=-1)
    places = [int(place) for part in parts for place in positions(part.extents)]
    assert sorted(places) == list(asked)
    if not places:
        return
    before = natural[torch.tensor(places) - 1]
    own = before.gather(1, ids[places][:, None])
    found = torch.tensor([number for part in parts for number in part.logprobs])
    assert float((found - own.flatten()).abs().max()) <= tolerance
    tops = torch.tensor([number for part in parts for number in part.top_logprobs]).view(len(places), -1)
    assert float((tops - before.topk(2, dim=-1).values).abs().max()) <= tolerance
    top_ids = torch.tensor([token for part in parts for token in part.top_ids]).view(len(places), -1)
    assert float((before.gather(1, top_ids) - tops).abs().max()) <= tolerance
    place = torch.tensor([place for part in parts for place in part.ranks])
    assert bool(((before > own + tolerance).sum(1) < place).all())
    assert bool(((before > own - tolerance).sum(1) + 1 >= place).all())


Checkpoints = Callable[..., tuple[Path, torch.nn.Module]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return `checkpoints(name, is_smooth=False)`, which makes each checkpoint once, and a reference that may be changed."""
    made: dict[tuple[str, bool], tuple[Path, torch.nn.Module]] = {}

    def checkpoint(architecture: str, *, is_smooth: bool = False) -> tuple[Path, torch.nn.Module]:
        model = architecture.removesuffix(ROUNDED_KV)
        is_smooth = model in QUANTISED_EXPERTS or (is_smooth and model in TOLERANCES)
        if (architecture, is_smooth) not in made:
            directory = tmp_path_factory.mktemp(architecture)
            scheme, _, family = model.partition(" ")
            is_quantised = scheme in QUANTISATIONS
            family = (family or "llama") if is_quantised else model.removesuffix("-mxfp4")
            more = {} if architecture.startswith("qwen2") else {"head_dim": 16}
            if family in LATENT:
                more = {"num_key_value_heads": SIZES["num_attention_heads"]}
            more |= GPT_OSS.get(model, {}) | QUANTISED_EXPERTS.get(model, {})
            reference = save_reference(directory, family, **SIZES | more)
            if is_quantised:
                quantise_checkpoint(directory, reference, with_sizes(scheme, 16), is_smooth=is_smooth)
            if architecture.endswith("-mxfp4"):
                quantise_experts_of(directory, reference)
            if architecture.endswith(ROUNDED_KV):
                round_kv(directory, reference)
            made[architecture, is_smooth] = directory, reference
        return made[architecture, is_smooth]

    return checkpoint


@pytest.fixture(params=CASES)
def replica(
    request: pytest.FixtureRequest, checkpoints: Checkpoints
) -> Iterator[tuple[Ranks, torch.nn.Module, int, float]]:
    shape, architecture, examples = request.param
    directory, reference = checkpoints(architecture)
    has_rounded_kv = architecture.endswith(ROUNDED_KV)
    tolerance = ROUNDED_KV_TOLERANCE if has_rounded_kv else TOLERANCES.get(architecture, TOLERANCE)
    with pytest.MonkeyPatch.context() as patch:
        if architecture in QUANTISED_EXPERTS:
            patch.setattr(activation_rounding, "_nearest", bend)
            patch.setattr(fast_forms, "_names", lambda _: ())  # integers cannot be bent
        ranks = Ranks(Topology(*shape), directory, kv_dtype="fp8" if has_rounded_kv else "auto")
        yield ranks, reference, examples, tolerance
    ranks.close()


def test_logits_are_those_of_transformers(replica: tuple[Ranks, torch.nn.Module, int, float]) -> None:
    """A batch has short and long requests, forks and cached prefixes; lanes join, help each other and share prefills.

    Steps are planned while earlier ones run, as in a rank that is busy when they arrive. The pools are fragmented
    before the first request, so that a chunk has runs of blocks of all lengths, in any order. The kernels are those
    that this machine chooses, or would choose in another number format. A model with windows gets one of each size, and
    frees KV before them in two thirds of the examples, of which half keep windows of cached prefixes. Latents are attended
    to in the form of fewer FLOPs, in plain form, or in either by chance.
    """
    ranks, reference, examples, tolerance = replica

    @given(
        requests=st.lists(asked(150), min_size=1, max_size=5),
        strategies=st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=5),
        tokens_per_lane=st.sampled_from([16, 24, 60, 100]),
        striped=st.booleans(),
        seed=st.integers(0, 1000),
        steps_ahead=st.integers(0, 3),
        crumbs=st.sampled_from([(1, 2, 3, 4, 5, 9), (1,), (1, 2, 3)]),
        kernels=st.sampled_from([torch_kernels(host_device(torch.float32)), None]),
        window=st.sampled_from(WINDOWS),
        freeing=st.sampled_from(["", "cached prefixes", "no cached prefixes"]),
        makes_heads=st.sampled_from(FORMS),
    )
    @settings(max_examples=examples)
    def run(
        requests: list[Query],
        strategies: list[tuple[str, Cut]],
        tokens_per_lane: int,
        striped: bool,
        seed: int,
        steps_ahead: int,
        crumbs: tuple[int, ...],
        kernels: Kernels | None,
        window: int,
        freeing: str,
        makes_heads: Callable[[LatentShape, int, int, int], bool],
    ) -> None:
        patch.setattr(LatentShape, "makes_heads", makes_heads)
        slide(ranks, reference, window)
        lanes = ranks.topology.kv
        frees = bool(freeing) and frees_windows(ranks.windows, has_tiers=False)
        planner = new_planner(
            lanes,
            tokens_per_lane,
            striped,
            seed,
            prefix_caching=not frees or freeing == "cached prefixes",
            window_pool=smallest_window_pool(ranks) if frees else None,
        )
        planner.crumble(crumbs)
        check(
            ranks, reference, planner, requests, strategies, steps_ahead, kernels=kernels, tolerance=tolerance
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_IN_PLACE_TOKENS", 2 * BLOCK_TOKENS)  # the pools are small
        patch.setattr(attention, "_GATHERED_TOKENS", 8 * BLOCK_TOKENS)
        patch.setattr(latent_forms, "MADE_BYTES", 1)
        patch.setattr(latent_forms, "_LEAST_TILE_TOKENS", 6 * BLOCK_TOKENS + 1)
        run()


@pytest.mark.parametrize(("shape", "name"), TEXTS)
def test_greedy_text_of_64_tokens_is_the_same_on_every_grid(
    checkpoints: Checkpoints, shape: tuple[int, int, int], name: str
) -> None:
    """Every lane holds a part of the prompt and of the text, and so decodes are merged from all of them.

    The text is that of `transformers`, and no router is near a tie in it. Where activations are rounded, they are bent: the
    text depends on their scales as much. Where K and V are rounded to FP8, each token is the best one to within twice the
    tolerance.
    """
    has_rounded_kv = name.endswith(ROUNDED_KV)
    directory, reference = checkpoints(name, is_smooth=True)
    topology = Topology(*shape)
    planner = new_planner(topology.kv, BLOCK_TOKENS, False, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_rounding, "_nearest", bend)
        patch.setattr(fast_forms, "_names", lambda _: ())  # integers cannot be bent
        ranks = Ranks(topology, directory, kv_dtype="fp8" if has_rounded_kv else "auto")
        try:
            slide(ranks, reference, 16)  # if it has windows: other tests have changed the reference's
            tolerance = ROUNDED_KV_TOLERANCE if has_rounded_kv else TOLERANCE
            asked = [Query(30, 64, TEXT_FAMILIES.get(name, 0))]
            check(ranks, reference, planner, asked, [STRATEGIES[0]], 1, tolerance=tolerance, may_tie=False)
        finally:
            ranks.close()
    (placed,) = (admit for step in planner.steps for admit in step.admits)
    lanes = {one.lane for one in (*placed.segments, *segments_of(placed.stripings))}
    assert topology.kv == 1 or lanes == set(range(topology.kv))


def test_ranks_that_get_no_part_of_a_small_vocabulary_embed_and_sample_with_the_others(
    tmp_path: Path,
) -> None:
    """Nine tokens over eight tensor ranks give the first ranks two each, one rank one, and the last ranks none."""
    reference = save_reference(
        tmp_path, "llama", **SIZES | {"num_hidden_layers": 1, "vocab_size": 9}, head_dim=16
    )
    ranks = Ranks(Topology(8, 1, 1), tmp_path)
    planner = new_planner(1, 60, False, 1, vocab=9)
    check(ranks, reference, planner, [Query(5, 3, 0), Query(30, 2, 1)], STRATEGIES[:1], 1)
    ranks.close()


def test_outputs_grow_on_to_a_further_lane_and_whole_prompts_are_found_cached(
    checkpoints: Checkpoints,
) -> None:
    """A lane of twelve blocks is full after 48 tokens. Only the last block of a cached prompt is computed again."""
    directory, reference = checkpoints("llama")
    for shape in ((1, 1, 2), (1, 2, 2)):
        ranks = Ranks(Topology(*shape), directory)
        try:
            for seed in (0, 1):
                planner = new_planner(2, 1000, False, seed, kv_blocks=12)
                requests = [Query(30, 46), Query(30, 50), Query(40, 3, 1), Query(40, 3, 1), Query(38, 4, 1)]
                everyone = check(ranks, reference, planner, requests, [STRATEGIES[0]], seed, one_by_one=True)
                assert planner.joined >= 1
                there = [one.there for one in everyone.values()]
                assert there[3:] == [36, 36]
        finally:
            ranks.close()


@dataclass(frozen=True)
class Apart(Device):
    """A device that is taken not to be the CPU: rows of an MLP are then computed at once."""

    @property
    def is_host(self) -> bool:
        return False


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe-mixed"])
def test_a_lane_without_rows_of_its_own_takes_part_on_every_device(
    checkpoints: Checkpoints, architecture: str
) -> None:
    directory, reference = checkpoints(architecture)
    ranks = Ranks(Topology(1, 1, 2), directory)
    device = host_device(torch.float32)
    apart = Apart(device.torch_device, device.dtype, device.memory, device.runtime)
    ranks._models = [
        Transformer(
            model.config, model.shard, replace(model._weights, device=apart), kernels=torch_kernels(device)
        )
        for model in ranks._models
    ]
    try:
        planner = new_planner(2, 16, False, 0)
        check(ranks, reference, planner, [Query(40, 3)], [STRATEGIES[0]], 1)
        assert len({entry.lane for step in planner.steps for entry in step.entries}) == 1, "one has no rows"
        assert any(len(step.lanes) == 2 for step in planner.steps)
    finally:
        ranks.close()


BORDERS = (16, 32, 48)
"""Positions between the shards of a prompt of 64 tokens, with 16 tokens a lane."""


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: f"{strategy[0]} {strategy[1].__name__}")
@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param((16, 16, 16, 16), id="one chunk a shard"),
        pytest.param((15, 1, 1, 14, 1, 1, 30, 1), id="one token at each side of a border"),
        pytest.param((32, 1, 31), id="two shards, then one token"),
    ],
)
def test_chunks_may_end_at_the_borders_of_shards(
    four_lanes: tuple[Ranks, torch.nn.Module], chunks: tuple[int, ...], strategy: tuple[str, Cut]
) -> None:
    """Shards after a chunk are empty when it runs. Of the second prompt, which is cached, one block is computed."""
    ranks, reference = four_lanes
    planner = new_planner(4, 16, False, 0, chunks=chunks)
    everyone = check(
        ranks, reference, planner, [Query(64, 3), Query(64, 3)], [strategy], len(chunks) % 3, one_by_one=True
    )
    assert [one.there for one in everyone.values()] == [0, 60]
    counts = [sum(entry.token_count for entry in step.entries if entry.id == "r0") for step in planner.steps]
    ends = set(np.cumsum(counts).tolist())
    assert ends >= set(np.cumsum(chunks).tolist())
    assert ends & set(BORDERS)


@pytest.fixture(scope="module")
def four_lanes(
    checkpoints: Checkpoints,
) -> Iterator[tuple[Ranks, torch.nn.Module]]:
    directory, reference = checkpoints("llama")
    ranks = Ranks(Topology(kv=4, stream=2, tensor=1), directory)
    yield ranks, reference
    ranks.close()


@pytest.mark.parametrize("architecture", ["gemma3_text-window", "gpt_oss"])
def test_cached_prefixes_are_found_where_kv_before_windows_is_freed(
    checkpoints: Checkpoints, architecture: str
) -> None:
    """A prompt comes twice, another one parts from it in the middle, and one goes on behind it; on lanes, all are spread."""
    directory, reference = checkpoints(architecture)
    requests = [Query(100, 5), Query(100, 5), Query(70, 5, own_tokens=20), Query(120, 5)]
    for shape in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        ranks = Ranks(Topology(*shape), directory)
        try:
            slide(ranks, reference, 16)
            pool = smallest_window_pool(ranks)
            planner = new_planner(ranks.topology.kv, 60, False, 0, window_pool=pool)
            everyone = check(ranks, reference, planner, requests, [STRATEGIES[0]], 1, one_by_one=True)
            assert [one.there for one in everyone.values()] == [0, 96, 48, 100]
        finally:
            ranks.close()
