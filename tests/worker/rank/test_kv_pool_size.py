"""KV pool sizing within simulated cgroups, and the profile that a warm-up measures."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from medha.cost.cost_profile import Attention, Operation, Profile
from medha.cost.predictor import Predictor, Work
from medha.errors import OutOfMemory
from medha.kv.window_tables import WindowNeed
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.host_memory import host_free_bytes
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard
from medha_worker.profiling.profile_fit import MeasuredStep
from medha_worker.profiling.step_timer import StepTimer
from medha_worker.rank import warmup
from medha_worker.rank.kv_pool_size import (
    MIB,
    PoolRequest,
    PoolSizes,
    exchange_bytes,
    keeps_windows_alone,
    pool_blocks,
    pool_sizes,
)

from ..models import load_model

REQUEST = PoolRequest(
    block_bytes=MIB,
    block_size_tokens=16,
    max_model_len=1000,  # 63 blocks
    max_running=100,
    size_bytes=None,
    memory_fraction=0.5,
    weights_bytes=300 * MIB,
    activation_bytes=40 * MIB,
)


def test_the_pool_is_the_fraction_of_what_activations_leave() -> None:
    assert pool_blocks(REQUEST, 1040 * MIB) == 500


def test_the_pool_is_no_larger_than_all_sequences_can_use() -> None:
    assert pool_blocks(replace(REQUEST, max_running=4), 10_000 * MIB) == 4 * 63


def test_a_size_that_is_named_is_taken() -> None:
    assert pool_blocks(replace(REQUEST, size_bytes=200 * MIB + 5), 1000 * MIB) == 200


def test_the_error_for_a_length_that_does_not_fit_the_fraction_names_numbers_and_the_fix() -> None:
    with pytest.raises(OutOfMemory) as caught:
        pool_blocks(REQUEST, 100 * MIB)
    text = str(caught.value)
    for part in ("maxModelLen 1000", "63 MiB", "50% (kvCache.memoryFraction) of 60 MiB", "300 MiB", "40 MiB"):
        assert part in text
    assert "lower model.maxModelLen to 480" in text
    assert pool_blocks(replace(REQUEST, max_model_len=480), 100 * MIB) == 30


def test_a_length_that_does_not_fit_the_named_size_names_the_size_that_would() -> None:
    with pytest.raises(OutOfMemory, match=r"raise kvCache\.size to at least 63 MiB"):
        pool_blocks(replace(REQUEST, size_bytes=62 * MIB), 1000 * MIB)


def test_a_size_beyond_what_is_free_is_refused() -> None:
    with pytest.raises(OutOfMemory, match=r"kvCache\.size asks for 500 MiB, but 460 MiB are free"):
        pool_blocks(replace(REQUEST, size_bytes=500 * MIB), 500 * MIB)


def test_nothing_free_is_refused_and_not_a_negative_pool() -> None:
    with pytest.raises(OutOfMemory, match=r"of 0 MiB free holds 0 tokens"):
        pool_blocks(REQUEST, 10 * MIB)


NEED = WindowNeed(1, 100, 63)  # 200 blocks for 100 sequences
WINDOWED = replace(REQUEST, windows=NEED, window_block_bytes=MIB // 2)


@pytest.mark.parametrize(
    ("request_", "free_mib", "sizes"),
    [
        pytest.param(REQUEST, 1040, PoolSizes(500, 0), id="no layer has a window"),
        pytest.param(WINDOWED, 1040, PoolSizes(500, 800, 200), id="the windows take a fifth of the pool"),
        pytest.param(
            replace(WINDOWED, windows=WindowNeed(5, 100, 63)), 1040, PoolSizes(500, 650, 350),
            id="windows of fewer sequences",
        ),
        pytest.param(
            replace(WINDOWED, windows=WindowNeed(5, 100, 63), max_running=8), 250, PoolSizes(105, 70, 140),
            id="too many windows for the fewest sequences",
        ),
        pytest.param(
            replace(WINDOWED, windows=WindowNeed(5, 900, 63)), 1040, PoolSizes(500, 0), id="a step alone does not fit"
        ),
        pytest.param(
            replace(WINDOWED, window_block_bytes=MIB), 1040, PoolSizes(500, 6300, 200), id="all layers have one"
        ),
        pytest.param(
            replace(WINDOWED, windows=WindowNeed(2, 20, 63), max_running=10), 150, PoolSizes(0, 70, 40), id="the longest fits beside windows alone"
        ),
        pytest.param(
            replace(WINDOWED, max_running=4), 9000, PoolSizes(252, 252, 104), id="no more than can be used"
        ),
        pytest.param(
            replace(WINDOWED, caches_windows=True), 1040, PoolSizes(500, 711, 289), id="a block of windows for eight others"
        ),
        pytest.param(
            replace(WINDOWED, window_block_bytes=MIB, caches_windows=True), 1040, PoolSizes(500, 6300, 500),
            id="all layers have one, and the rest is for cached windows",
        ),
        pytest.param(
            replace(WINDOWED, window_block_bytes=MIB, windows=WindowNeed(9, 100, 63)), 1040, PoolSizes(500, 6300, 500),
            id="all layers have one, and the pool has windows of fewer sequences",
        ),
        pytest.param(
            replace(WINDOWED, max_running=4, caches_windows=True), 9000, PoolSizes(252, 252, 252),
            id="no more windows than can be used",
        ),
    ],
)  # fmt: skip
def test_a_pool_beside_windows_is_what_they_leave(
    request_: PoolRequest, free_mib: int, sizes: PoolSizes
) -> None:
    assert pool_sizes(request_, free_mib * MIB) == sizes


def test_a_length_that_fits_in_neither_form_names_the_size_of_whole_requests() -> None:
    with pytest.raises(OutOfMemory, match="maxModelLen 1000 needs 63 MiB"):
        pool_sizes(replace(WINDOWED, windows=WindowNeed(3, 30, 63), max_running=10), 150 * MIB)


def test_a_size_that_exceeds_what_is_free_is_refused_also_where_windows_could_be_freed() -> None:
    request = replace(WINDOWED, size_bytes=800 * MIB)
    assert pool_sizes(request, 840 * MIB) == PoolSizes(800, 1400, 200)
    with pytest.raises(OutOfMemory, match=r"kvCache\.size asks for 800 MiB, but 799 MiB are free"):
        pool_sizes(request, 839 * MIB)


def test_kv_before_windows_is_freed_only_if_more_tokens_fit_then() -> None:
    assert keeps_windows_alone(500, 800)
    assert keeps_windows_alone(0, 70)
    assert not keeps_windows_alone(500, 400)
    assert not keeps_windows_alone(252, 252)
    assert not keeps_windows_alone(500, 0)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GROUP_2 = "sys/fs/cgroup"
GROUP_1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        pytest.param(
            {
                "proc/self/cgroup": "0::/",
                f"{GROUP_2}/memory.max": "9000000",
                f"{GROUP_2}/memory.current": "1000000",
            },
            8_000_000,
            id="version 2",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/",
                f"{GROUP_2}/memory.max": "9000000",
                f"{GROUP_2}/memory.current": "1000000",
                f"{GROUP_2}/memory.stat": "anon 5\ninactive_file 400000\nactive_file 9\n",
            },
            8_400_000,
            id="file pages can be dropped",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b",
                f"{GROUP_2}/a/b/memory.max": "max",
                f"{GROUP_2}/a/b/memory.current": "10",
                f"{GROUP_2}/a/memory.max": "5000000",
                f"{GROUP_2}/a/memory.current": "2000000",
                f"{GROUP_2}/memory.max": "9000000",
                f"{GROUP_2}/memory.current": "2000000",
            },
            3_000_000,
            id="the tightest limit above",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/pod\n3:cpuset:/\n0::/",
                f"{GROUP_1}/pod/memory.limit_in_bytes": "7000000",
                f"{GROUP_1}/pod/memory.usage_in_bytes": "3000000",
                f"{GROUP_1}/pod/memory.stat": "inactive_file 1\ntotal_inactive_file 500000\n",
                f"{GROUP_1}/memory.limit_in_bytes": "9223372036854771712",
                f"{GROUP_1}/memory.usage_in_bytes": "3000000",
            },
            4_500_000,
            id="version 1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/not/visible/here",
                f"{GROUP_2}/memory.max": "6000000",
                f"{GROUP_2}/memory.current": "7000000",
            },
            0,
            id="a container's own view, over its limit",
        ),
    ],
)
def test_memory_is_counted_within_the_cgroup(tmp_path: Path, files: dict[str, str], free: int) -> None:
    root = write(tmp_path, files)
    assert host_free_bytes(1, root) == free
    assert host_free_bytes(4, root) == free // 4


def test_without_a_cgroup_the_machines_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = psutil.virtual_memory()._replace(available=123_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert host_free_bytes(3, tmp_path) == 41_000


# --- the warm-up --------------------------------------------------------------------------------------


def test_the_profile_of_a_warm_up_predicts_what_it_measured_and_beyond() -> None:
    truth = Profile(
        name="truth",
        source="test",
        layers=1,
        linear_points=((1, 2e-3), (16, 3e-3), (64, 4e-3), (256, 9e-3), (2048, 60e-3)),
        attention=Attention(points=((1, 1e-8), (16, 6e-8), (256, 8e-7))),
        head=Operation("head", launch_seconds=1e-3, compute_seconds_per_row=5e-5),
    )
    predictor = Predictor(truth)

    def played(works: tuple[Work, ...]) -> MeasuredStep:
        head = predictor.explain(works).head
        return MeasuredStep(works, predictor.stage_seconds(works) - head, head)

    shapes = warmup._shapes(max_chunk_tokens=2048, max_running=100, max_model_len=100_000)
    fitted = Predictor(warmup.step_profile([played(works) for works in shapes]))
    batches = [*shapes, (Work(50_000, 1),) * 9, (Work(9000, 128), Work(100, 1)), (Work(3000, 700),)]
    for works in batches:
        assert fitted.stage_seconds(works) == pytest.approx(predictor.stage_seconds(works), rel=0.02)


@pytest.mark.parametrize(
    ("max_chunk", "max_running", "max_model_len"), [(1, 1, 16), (2048, 1, 17), (32, 3, 2050), (5000, 9, 4096)]
)
def test_warm_up_steps_stay_within_the_limits(max_chunk: int, max_running: int, max_model_len: int) -> None:
    shapes = warmup._shapes(max_chunk, max_running, max_model_len)
    assert (Work(0, min(max_chunk, max_model_len)),) in shapes
    for works in shapes:
        assert len(works) <= max_running
        assert all(
            1 <= work.count <= max_chunk and work.context + work.count <= max_model_len for work in works
        )
    fitted = Predictor(warmup.step_profile([MeasuredStep(works, 0.01, 0.0) for works in shapes]))
    assert fitted.stage_seconds([Work(0, 1)]) == pytest.approx(0.01, rel=0.01)


def test_a_warm_up_measures_chunks_behind_a_far_context_where_the_model_has_one() -> None:
    def longest(max_model_len: int) -> int:
        return max(work.context for works in warmup._shapes(512, 16, max_model_len) for work in works)

    assert longest(100_000) == warmup.FAR_CONTEXT_TOKENS
    assert longest(8000) == warmup.CONTEXT_TOKENS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=1)
    return load_model(directory, ModelConfig.from_directory(directory))


WARM_UP = """
import sys, time, torch
from pathlib import Path
from medha_worker.device import host_device
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import DTYPES, Shard
from medha_worker.rank.warmup import warm_up

torch.set_num_threads(1)
directory = Path(sys.argv[1])
config = ModelConfig.from_directory(directory)
device = host_device(DTYPES[config.dtype])
model = Transformer.load(directory, config, Shard.whole(config), device=device, kernels=torch_kernels(device))
warm = warm_up(model, max_chunk_tokens=int(sys.argv[2]), max_running=4, max_model_len=1024, clock=time.perf_counter)
print(warm.activation_bytes)
"""


@pytest.mark.long
def test_the_warm_up_measures_more_memory_for_larger_chunks(tmp_path: Path) -> None:
    """Hidden states alone are 512 bytes a token; a chunk of 512 tokens makes several copies of them.

    Each runs in a process of its own: otherwise memory that something else has freed would be used first.
    """
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=1)
    command = [sys.executable, "-c", WARM_UP, str(tmp_path / "tiny")]
    small, large = (
        int(subprocess.run([*command, chunk], capture_output=True, text=True, check=True).stdout)
        for chunk in ("64", "512")
    )
    assert large > small
    assert large >= 512 * 512 * 2


def test_a_far_context_takes_no_memory_in_the_warm_up(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[int] = []

    class Timer(StepTimer):
        def __init__(self, model: Transformer, pool_tokens: int, clock: Callable[[], float]) -> None:
            pools.append(pool_tokens)
            super().__init__(model, pool_tokens, clock)

    monkeypatch.setattr(warmup, "StepTimer", Timer)
    for max_model_len in (4096, 100_000):
        warm = warmup.warm_up(
            model, max_chunk_tokens=64, max_running=2, max_model_len=max_model_len, clock=time.perf_counter
        )
    assert max(step.longest_context for step in warm.steps) == warmup.FAR_CONTEXT_TOKENS
    assert pools[0] == pools[1]


@pytest.mark.parametrize(("layers", "window"), [((0, 2), (32, 0.5)), ((0, 1), (1, 0.0)), ((1, 2), (32, 1.0))])
def test_a_warm_up_reports_the_windows_of_the_layers_that_it_runs(
    layers: tuple[int, int], window: tuple[int, float], tmp_path: Path
) -> None:
    """Stages are as slow as their own layers, of which only the second has a window."""
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=1, architecture="qwen3", window_tokens=32)
    config = ModelConfig.from_directory(tmp_path / "tiny")
    model = load_model(tmp_path / "tiny", config, Shard(0, 1, *layers, config.num_layers))
    warm = warmup.warm_up(
        model, max_chunk_tokens=64, max_running=2, max_model_len=4096, clock=time.perf_counter
    )
    assert (warm.profile.window_tokens, warm.profile.window_share) == window


def test_what_lanes_exchange_is_counted_beside_the_activations() -> None:
    """A ring that passes K and V holds two lanes' blocks of a layer at once, which grow with the context."""
    with_lanes = partial(
        exchange_bytes, chunk_tokens=10, shard_tokens=1000, query_heads=8, kv_heads=2, head_dim=16, element_bytes=4,
        kv_element_bytes=4,
    )  # fmt: skip
    assert with_lanes(lanes=1, passes_keys=True) == 0
    queries = 10 * 8 * 2 * (16 * 4 + 17 * 4)
    assert with_lanes(lanes=3, passes_keys=False) == 2 * queries
    assert with_lanes(lanes=3, passes_keys=True) == 2 * queries + 2 * (2 * 2 * 1000 * 16 * 4)


def test_the_error_for_a_batch_that_does_not_fit_the_warm_up_names_the_fix(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(model, "forward", exhausted)
    with pytest.raises(OutOfMemory, match=r"lower scheduling\.maxChunkTokens or scheduling\.maxRunning"):
        warmup.warm_up(model, max_chunk_tokens=64, max_running=2, max_model_len=256, clock=lambda: 0.0)


def test_a_pool_need_not_hold_what_the_longest_sequence_streams() -> None:
    streams = replace(REQUEST, streamed_blocks=40, streamed_share=0.75, memory_fraction=1.0)
    least = streams.least_blocks
    assert int(0.75 * least) + 40 >= streams.longest_blocks
    assert int(0.75 * (least - 2)) + 40 < streams.longest_blocks
    assert pool_blocks(streams, (40 + least) * MIB) == least
    with pytest.raises(OutOfMemory, match=r"640 of its tokens can be streamed.*raise kvCache.streaming.size"):
        pool_blocks(streams, (39 + least) * MIB)
    assert replace(streams, streamed_blocks=0).least_blocks == streams.longest_blocks
