"""Memory that runs out on one rank of a grid ends the request that needs it, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medha.api.replica import MedhaReplicaSpec
from medha.errors import OutOfMemory
from medha.kv.context_parallel import OWNER, PASS_KV, PASS_Q, balanced
from medha.shards import Segment, place
from medha.topology import Topology
from medha.wire.messages import Admit, Done, Extent, Rendezvous, Sampling, Step, StepEntry, Tokens
from medha_process.part_settings import RankSettings
from medha_worker.device import host_device
from medha_worker.kernels.expert_products import ProductPerExpert
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_products import TorchProducts
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.sampler import NotSampled, SampledToken, SequenceSampler
from medha_worker.model.sampling_plan import SamplingPlan
from medha_worker.model.tensor_group import Alone
from medha_worker.model.token_sampler import TokenSampler
from medha_worker.model.weights import Shard
from medha_worker.rank import engine as engine_module
from medha_worker.rank.engine import Engine, Loaded
from medha_worker.rank.executor import Executor
from medha_worker.rank.step_recorder import StepRecorder

from ..model.test_model_transformer import save_reference
from ..models import load_model, run_step
from ..ranks import Ranks, free_endpoint

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
LARGE = 40  # rows of one sequence
BLOCK_TOKENS, KV_BLOCKS = 4, 32


class Tight:
    """Attention on a rank whose memory is too small for a sequence of at least so many rows."""

    def __init__(self, backend: Any, rows: float) -> None:
        self._backend = backend
        self.rows = rows

    def plan(self, spans: Any, *more: Any) -> Any:
        planned = self._backend.plan(spans, *more)
        return TightStep(planned) if any(span.row_count >= self.rows for span in spans) else planned


class TightStep:
    def __init__(self, planned: Any) -> None:
        self._planned = planned

    def attend(self, *arguments: Any, **options: Any) -> Any:
        self._planned.attend(*arguments, **options)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")


@pytest.fixture(params=[(2, 1, 1), (1, 2, 1), (2, 2, 1)], ids=["TP2", "SPP2", "TP2 x SPP2"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    save_reference(tmp_path, "llama")
    ranks = Ranks(Topology(*request.param), tmp_path)
    yield ranks
    ranks.close()


def admit(name: str, tokens: int) -> Admit:
    return Admit(name, name, tokens, tokens, seed=1, sampling=GREEDY, reserved_tokens=tokens + 4)


def entry(name: str, start: int, count: int, *, samples: bool = True) -> StepEntry:
    return StepEntry(name, 0, (Extent(start, count),), samples)


def steps(*, large: bool, goes_ahead: bool = False) -> list[Step]:
    """Return steps in which a small request decodes beside the two chunks of a large one; a third takes its KV later.

    The second chunk is in flight when the first one's failure is known. If the large request's first decode
    `goes_ahead`, it is in flight too, and its result is dropped.
    """
    ahead = [Step(2, 0, (entry("small", 10, 1), *([entry("large", LARGE + 20, 1)] if large else [])))]
    last = 2 + goes_ahead
    first = [entry("small", 0, 9)] + ([entry("large", 0, LARGE, samples=False)] if large else [])
    second = [entry("small", 9, 1)] + ([entry("large", LARGE, 20)] if large else [])
    return [
        Step(
            0, 0, tuple(first), admits=(admit("small", 9), *([admit("large", LARGE + 20)] if large else []))
        ),
        Step(1, 0, tuple(second)),
        *(ahead if goes_ahead else ()),
        Step(
            last,
            0,
            (entry("small", 8 + last, 1), entry("after", 0, 30)),
            releases=("large",) if large else (),
            admits=(admit("after", 30),),
        ),
        Step(last + 1, 0, (entry("small", 9 + last, 1), entry("after", 30, 1))),
    ]


def run(ranks: Ranks, *, large: bool, tight_rank: int | None, goes_ahead: bool = False) -> list[Done]:
    """Return what the sampling rank reports of each step."""
    ids = {
        name: np.random.default_rng(len(name)).integers(0, 100, 64).astype(np.int32)
        for name in ("small", "large", "after")
    }
    ranks._rendezvous()

    def work(rank: int) -> list[Done]:
        grid = ranks._grids[rank]
        model = ranks._models[rank].in_grid(grid.tensor_group, grid.plane)
        if rank == tight_rank:
            tight: Any = Tight(model.kernels.attention, LARGE)
            model.kernels = replace(model.kernels, attention=tight)
        runner = Executor(
            model, model.new_kv_cache(KV_BLOCKS, BLOCK_TOKENS), vocab_size=model.config.vocab_size, eos_token_ids=(),
            clock=lambda: 0.0, pipeline=grid,
        )  # fmt: skip
        reported = []
        for step in steps(large=large, goes_ahead=goes_ahead):
            runner.prepare(step)
            for name in runner.missing_prompts(step):
                tokens = next(one.tokens for one in step.admits if one.prompt == name)
                runner.add_tokens(Tokens(prompt=name, offset=0, total=tokens), ids[name][:tokens])
            done = runner.execute(step)
            assert done is not None
            reported.append(done)
        return reported

    reports: list[list[Done]] = ranks.on_all(work)
    return reports[ranks._grids[0].sampling_rank]


def test_only_the_sequence_that_does_not_fit_fails_and_what_takes_its_blocks_is_whole(ranks: Ranks) -> None:
    require_that_only_the_large_one_fails(ranks)


def test_that_holds_where_results_are_normed_before_they_are_added(tmp_path: Path) -> None:
    save_reference(tmp_path, "gemma3_text-window")
    ranks = Ranks(Topology(1, 2, 1), tmp_path)
    try:
        require_that_only_the_large_one_fails(ranks)
    finally:
        ranks.close()


def require_that_only_the_large_one_fails(ranks: Ranks) -> None:
    expected = run(ranks, large=False, tight_rank=None)
    assert all(done.failures == () for done in run(ranks, large=True, tight_rank=None))
    for tight_rank in range(ranks.topology.ranks):
        found = run(ranks, large=True, tight_rank=tight_rank)
        failed = [[one.id for one in done.failures] for done in found]
        assert failed[0] == ["large"]
        assert failed[2:] == [[], []]
        for done, alone in zip(found, expected, strict=True):
            sampled = [(one.id, one.token) for one in done.samples if one.id != "large"]
            assert sampled == [(one.id, one.token) for one in alone.samples]


def test_a_row_for_whose_tokens_memory_runs_out_fails_and_the_others_are_sampled(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rank that samples notices it, and others wait for a token of every row."""
    expected = run(ranks, large=False, tight_rank=None, goes_ahead=True)

    sample, plan_alone = TokenSampler.sample, TokenSampler.plan

    def tight(
        sampler: TokenSampler, logits: torch.Tensor, samplers: Sequence[SequenceSampler], plan: Any
    ) -> list[SampledToken | NotSampled]:
        if len(samplers) > 1 or any(one.position == LARGE + 20 for one in samplers):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")
        return sample(sampler, logits, samplers, plan)

    def tight_plan(sampler: TokenSampler, samplers: Sequence[SequenceSampler], vocab: int) -> SamplingPlan:
        if len(samplers) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")
        return plan_alone(sampler, samplers, vocab)

    monkeypatch.setattr(TokenSampler, "sample", tight)
    monkeypatch.setattr(TokenSampler, "plan", tight_plan)
    found = run(ranks, large=True, tight_rank=None, goes_ahead=True)
    failed = [[(one.id, one.reason) for one in done.failures] for done in found]
    assert failed[:2] == [[], [("large", "out_of_memory")]]
    assert failed[3:] == [[], []]
    for done, alone in zip(found, expected, strict=True):
        sampled = [(one.id, one.token) for one in done.samples if one.id != "large"]
        assert sampled == [(one.id, one.token) for one in alone.samples]


# --- experts ----


class RowsMatter:
    """Products in which a router chooses other experts for fewer rows than a whole step, as rounding may at a tie."""

    def __init__(self, experts: int, most_rows: float) -> None:
        self._experts, self._most_rows = experts, most_rows

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = TorchProducts().product(x, weight, bias, out)
        if weight.shape[1] != self._experts:
            return found
        if len(x) > self._most_rows:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")
        return found if len(x) == LARGE + 9 else found.roll(1, dims=1)

    def add_product(self, target: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        target.add_(self.product(x, weight))


class TightExperts(ProductPerExpert):
    """Products of experts for which memory suffices up to so many rows."""

    def __init__(self, products: Any, most_rows: float) -> None:
        super().__init__(products)
        self._most_rows = most_rows

    def product(self, x: torch.Tensor, weights: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        if len(x) > self._most_rows:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")
        return super().product(x, weights, row_ends)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sparse")
    save_reference(directory, "mixtral")
    return directory


def hidden_of_two(
    directory: Path, tensor_size: int, *, router_rows: float = math.inf, expert_rows: float = math.inf
) -> torch.Tensor:
    """Return the hidden states of a small and a large sequence on one of `tensor_size` ranks, without the others' part."""
    config = ModelConfig.from_directory(directory)
    assert config.experts is not None
    products: Any = RowsMatter(config.experts.count, router_rows)
    kernels = replace(
        torch_kernels(host_device(torch.float32)),
        products=products,
        experts=TightExperts(products, expert_rows),
    )
    links: Any = object()  # in a grid, sequences that do not fit end alone
    shard = Shard(0, tensor_size, 0, config.num_layers, config.num_layers)
    model = load_model(directory, config, shard, kernels=kernels).in_grid(Alone(), links)
    spans = [SequenceSpan(0, 9, 0, range(3)), SequenceSpan(9, LARGE, 0, range(3, 13))]
    positions = torch.cat([torch.arange(9), torch.arange(LARGE)])
    return run_step(model, positions, positions, spans, model.new_kv_cache(13, BLOCK_TOKENS))


def test_a_tensor_rank_whose_experts_run_out_of_memory_keeps_the_choice_that_the_others_made(
    sparse: Path,
) -> None:
    """Else it would add its columns of one expert to the other ranks' columns of another."""
    wanted = hidden_of_two(sparse, 2)
    found = hidden_of_two(sparse, 2, expert_rows=2 * LARGE)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_sequences_whose_experts_cannot_be_chosen_end_on_a_tensor_rank_and_go_on_where_there_is_one(
    sparse: Path,
) -> None:
    assert bool(hidden_of_two(sparse, 2, router_rows=LARGE).isnan().all())
    assert bool(hidden_of_two(sparse, 1, router_rows=LARGE).isfinite().all())


# --- at the start ---------------------------------------------------------------------------------------


def start(ranks: Ranks, directory: Path, *, tight_rank: int | None) -> list[Engine | Exception]:
    """Return the result of each rank's first rendezvous, if the largest chunk has `LARGE` tokens."""
    topology, endpoint = ranks.topology, free_endpoint()
    spec = MedhaReplicaSpec.model_validate(
        {
            "model": {"name": "m", "source": {"path": str(directory)}, "maxModelLen": 64},
            "parallelism": {"tensor": topology.tensor, "stream": topology.stream, "kv": topology.kv},
            "scheduling": {"maxChunkTokens": LARGE, "minChunkTokens": 8, "maxRunning": 2},
            "kvCache": {"size": "1Mi"},
        }
    )

    def rendezvous(rank: int) -> Engine | Exception:
        model = ranks._models[rank].with_kernels(ranks._models[rank].kernels)
        if rank == tight_rank:
            tight: Any = Tight(model.kernels.attention, LARGE)
            model.kernels = replace(model.kernels, attention=tight)
        settings = RankSettings(
            rank=rank, spec=spec, model_directory=directory, control="", tokens="", key_file=directory,
            controller_key_file=directory,
        )  # fmt: skip
        try:
            weights = Loaded(settings, model.config, model, StepRecorder(rank), 0.0)
            return weights.rendezvous(Rendezvous(epoch=0, address=endpoint))
        except Exception as error:  # noqa: BLE001 - the test checks it
            return error

    came_of: list[Engine | Exception] = ranks.on_all(rendezvous)
    return came_of


def test_ranks_on_which_the_largest_chunk_does_not_fit_do_not_start_and_name_the_fix(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Otherwise the replica would report that it is ready, and each large request would fail."""
    for engine in start(ranks, tmp_path, tight_rank=None):
        assert isinstance(engine, Engine)
        assert engine.grid is not None
        engine.grid.close()
    topology = ranks.topology
    for tight_rank in range(topology.ranks):
        came_of = start(ranks, tmp_path, tight_rank=tight_rank)
        tight = topology.coordinates(tight_rank)
        for rank, found in enumerate(came_of):
            assert isinstance(found, Exception)
            here = topology.coordinates(rank)
            if (here.kv, here.stream) == (tight.kv, tight.stream):  # the ranks of one pod warm up together
                assert isinstance(found, OutOfMemory)
                assert "lower scheduling.maxChunkTokens" in str(found)


# --- lanes that share the request ---------------------------------------------------------------------

PROMPT, FIRST_CHUNK, ROOM = 48, 40, 8  # of the shared request
SPREADS = [(OWNER, "owner"), (PASS_KV, "pass-KV"), (PASS_Q, "pass-Q")]


@pytest.fixture(params=[(1, 1, 2), (2, 1, 2), (1, 2, 2)], ids=["KVP2", "TP2 x KVP2", "SPP2 x KVP2"])
def lanes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    save_reference(tmp_path, "llama")
    ranks = Ranks(Topology(*request.param), tmp_path)
    yield ranks
    ranks.close()


def test_memory_that_lanes_need_for_their_exchanges_is_no_part_of_the_pool(
    lanes: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def large(**arguments: Any) -> int:
        asked.append(arguments)
        return 2**50

    monkeypatch.setattr(engine_module, "exchange_bytes", large)
    for found in start(lanes, tmp_path, tight_rank=None):
        assert isinstance(found, OutOfMemory)
        assert "activations (1073741" in str(found)
    assert {one["lanes"] for one in asked} == {2}
    assert {one["shard_tokens"] for one in asked} == {512}


def shared_steps(strategy: str, *, large: bool) -> list[Step]:
    """Return steps in which each lane decodes its own small request, beside two chunks of a large prompt on both."""
    both = (0, 1)
    segments = place(
        PROMPT, PROMPT + ROOM, [KV_BLOCKS * BLOCK_TOKENS] * 2, block_size_tokens=BLOCK_TOKENS,
        tokens_per_lane=PROMPT // 2, lane_tokens=KV_BLOCKS * BLOCK_TOKENS,
    )  # fmt: skip
    assert segments is not None

    def small(start: int, count: int) -> list[StepEntry]:
        return [StepEntry(f"small {lane}", lane, (Extent(start, count),), samples=True) for lane in both]

    def part(start: int, count: int, *, samples: bool) -> list[StepEntry]:
        if not large:
            return []
        if strategy == OWNER:
            return [StepEntry("large", segments.owner, (Extent(start, count),), samples, OWNER)]
        cut = balanced(start, start + count, 2)
        return [
            StepEntry("large", lane, extents, samples and lane == segments.owner, strategy)
            for lane, extents in zip(both, cut, strict=True)
        ]

    admits = [
        Admit(f"small {lane}", "small", 9, 9, 1, GREEDY, 13, segments=(Segment(lane, 0, 13),))
        for lane in both
    ]
    if large:
        admits.append(
            Admit("large", "large", PROMPT, PROMPT, 1, GREEDY, segments.tokens, segments=segments.segments)
        )
    after = Admit("after", "after", 30, 30, 1, GREEDY, 34, segments=(Segment(0, 0, 34),))
    first = (*small(0, 9), *part(0, FIRST_CHUNK, samples=False))
    second = (*small(9, 1), *part(FIRST_CHUNK, PROMPT - FIRST_CHUNK, samples=True))
    third = (*small(10, 1), StepEntry("after", 0, (Extent(0, 30),), samples=True))
    return [
        Step(0, 0, first, admits=tuple(admits), lanes=both),
        Step(1, 0, second, lanes=both),
        Step(2, 0, third, releases=("large",) if large else (), admits=(after,), lanes=both),
        Step(3, 0, (*small(11, 1), StepEntry("after", 0, (Extent(30, 1),), samples=True)), lanes=both),
    ]


def run_shared(
    ranks: Ranks, strategy: str, *, large: bool, tight_rank: int | None
) -> tuple[list[Done], list[int]]:
    """Return what both lanes report of each step, and the steps for which a rank reported too little memory."""
    sampled = np.random.default_rng(7).integers(0, 100, 64).astype(np.int32)
    ranks._rendezvous()
    tight_steps: list[int] = []

    def work(rank: int) -> list[Done]:
        grid = ranks._grids[rank]
        running = 0
        model = ranks._models[rank].in_grid(
            grid.tensor_group, grid.plane, lambda: tight_steps.append(running)
        )
        tight: Any = Tight(model.kernels.attention, 10 if rank == tight_rank else math.inf)
        model.kernels = replace(model.kernels, attention=tight)
        runner = Executor(
            model, model.new_kv_cache(KV_BLOCKS, BLOCK_TOKENS), vocab_size=model.config.vocab_size, eos_token_ids=(),
            clock=lambda: 0.0, lane=grid.lane, pipeline=grid,
        )  # fmt: skip
        reported = []
        for step in shared_steps(strategy, large=large):
            running = step.step_id
            tight.rows = tight.rows if running == 0 else math.inf  # only the first chunk does not fit
            runner.prepare(step)
            for name in runner.missing_prompts(step):
                tokens = next(one.tokens for one in step.admits if one.prompt == name)
                runner.add_tokens(Tokens(prompt=name, offset=0, total=tokens), sampled[:tokens])
            done = runner.execute(step)
            assert done is not None
            reported.append(done)
        return reported

    reports: list[list[Done]] = ranks.on_all(work)
    drawing = {grid.sampling_rank for grid in ranks._grids}
    of_lanes = zip(*(reports[rank] for rank in sorted(drawing)), strict=True)
    joined = [
        Done(
            dones[0].step_id,
            tuple(sample for done in dones for sample in done.samples),
            tuple(failure for done in dones for failure in done.failures),
        )
        for dones in of_lanes
    ]
    return joined, tight_steps


def sampled(done: Done, name: str) -> int:
    return next(one.token for one in done.samples if one.id == name)


@pytest.mark.parametrize("strategy", [strategy for strategy, _ in SPREADS], ids=[name for _, name in SPREADS])
def test_a_shared_request_that_does_not_fit_on_one_lane_ends_alone(lanes: Ranks, strategy: str) -> None:
    expected, _ = run_shared(lanes, strategy, large=False, tight_rank=None)
    whole, tight_steps = run_shared(lanes, strategy, large=True, tight_rank=None)
    assert all(done.failures == () for done in whole)
    assert not tight_steps
    for tight_rank in range(lanes.topology.ranks):
        found, tight_steps = run_shared(lanes, strategy, large=True, tight_rank=tight_rank)
        failed = [{(one.id, one.reason) for one in done.failures} for done in found]
        if failed[0] | failed[1] != {("large", "not_finite")}:  # no rows depend on these on the last layer
            assert failed[:2] == [set(), set()]
            assert strategy != OWNER
            assert lanes._grids[tight_rank].is_last_stage
            assert sampled(found[1], "large") == sampled(whole[1], "large")
        assert failed[2:] == [set(), set()]
        assert tight_steps == [0]
        for done, alone in zip(found, expected, strict=True):
            for one in alone.samples:
                assert sampled(done, one.id) == one.token
