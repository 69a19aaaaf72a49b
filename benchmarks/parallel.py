"""What it gives to split one request over two ranks: stages (SPP), lanes (KVP), and rings of lanes, one core each.

    flock /tmp/quiet python benchmarks/parallel.py [--quick] [--only PART] [--rounds N] [--json FILE]

Ranks are processes pinned to a core, which meet over gloo as those of `medha up` do and run steps that are written
here: what is measured is the engine, without controller and HTTP. Configurations take turns within a round, because a
shared machine changes its speed by the minute; figures are medians of ratios within a round.

* **spp** the `small` preset prefills 16K tokens: on one core, on two threads, and on two stages of one core each.
* **kvp** the `small` preset decodes behind 128K tokens, whose KV is filled with random data: on one lane and on two.
  How fast one core reads memory is measured in the same round, as the largest rate of several reductions.
* **prefill** one prompt on two ranks by every strategy, at several lengths.
* **cached** the same for a prompt of which all but 2.5, 10 or 50 % are cached.
* **batch** decodes of several long requests, each of which lies on both lanes: asked directly, and as a ring that passes queries.
* **replicated** steps behind a long context on two lanes: owner-compute with a helper, and both lanes computing the linear layers
  of all rows (as the papers do), so that only partial results travel. This path exists here alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as `medha up` sets it for ranks; read when torch is loaded

import numpy as np
import torch
from revision import revision

from medha.kv.context_parallel import OWNER, PASS_KV, PASS_Q, balanced, striped
from medha.shards import Segment, ShardMap, deal, place
from medha.topology import Topology, stage_layers
from medha.wire.messages import Admit, Extent, Sampling, Step, StepEntry, Tokens
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import host_device
from medha_worker.host_memory import keep_freed_memory
from medha_worker.kernels.name_table import choose_kernels
from medha_worker.kernels.partial_results import merge_partials
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.spread import Landing
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard
from medha_worker.rank.executor import Executor
from medha_worker.rank.kv_parallel_plan import SpreadEntry, plan_spread
from medha_worker.rank.mesh import Grid

BLOCK_TOKENS = 16
STRIPE_TOKENS = 2048
GOALS = {"spp / one core": 1.75, "spp / two threads": 0.9, "kvp / one lane": 1.5, "KV read rate": 0.8}
PEERS = {
    "spp / one core": "one rank on one core",
    "spp / two threads": "one rank on two threads",
    "kvp / one lane": "one lane on one core",
    "KV read rate": "one core that sums the same bytes",
}
PARTS = ("spp", "kvp", "prefill", "cached", "batch", "replicated")
MISS_PERCENT = (2.5, 10, 50)  # of a prompt, the part that is not cached
OWNER_COMPUTE, SPP, STRIPED = "ownerCompute", "spp", "striped"


@dataclass(frozen=True)
class Member:
    """One rank of a configuration."""

    tensor: int
    stream: int
    kv: int
    rank: int
    endpoint: str
    cores: tuple[int, ...]
    threads: int
    checkpoint: str
    tokens: int  # the longest request

    @property
    def topology(self) -> Topology:
        return Topology(self.tensor, self.stream, self.kv)


# --- in a rank's process ------------------------------------------------------------------------------


class Clocked:
    """Attention kernels that count the time spent in them."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.seconds = 0.0

    def plan(self, *arguments: Any) -> Any:
        step, clock = self._backend.plan(*arguments), self

        class Step:
            def attend(self, *arguments: Any) -> Any:
                start = time.perf_counter()
                result = step.attend(*arguments)
                clock.seconds += time.perf_counter() - start
                return result

        return Step()


class Merging:
    """Attention that every lane computes over what it holds, for the same rows, and then merges with the other lane's."""

    def __init__(self, backend: Any, grid: Grid) -> None:
        self._backend, self._grid = backend, grid

    def plan(self, *arguments: Any) -> Any:
        step, grid, other = self._backend.plan(*arguments), self._grid, 1 - self._grid.lane

        class Step:
            def attend(self, *arguments: Any) -> Any:
                output, sums = step.attend(*arguments)
                own = torch.cat([output.float().flatten(), sums.float().flatten()])
                theirs = torch.empty_like(own)
                grid.finish(grid.start({other: own}, {other: theirs}))
                of_output = theirs[: output.numel()].view(output.shape)
                of_sums = theirs[output.numel() :].view(sums.shape)
                return merge_partials((output, of_output), (sums.float(), of_sums))

        return Step()


class RankProcess:
    """Runs one scenario after the other, as the lines of its input say."""

    def __init__(self, member: Member) -> None:
        os.sched_setaffinity(0, member.cores)
        torch.set_num_threads(member.threads)
        keep_freed_memory()
        self.member = member
        self.config = config = ModelConfig.from_directory(Path(member.checkpoint))
        topology = member.topology
        here = topology.coordinates(member.rank)
        layers = stage_layers(config.num_layers, topology.stream)[here.stream]
        shard = Shard(here.tensor, topology.tensor, layers.start, layers.stop, config.num_layers)
        device = host_device(torch.float32)
        chosen = choose_kernels(shard.kernel_sizes(config), device)
        self.clocked = Clocked(chosen.attention)
        kernels = replace(chosen, attention=self.clocked)
        model = Transformer.load(member.checkpoint, config, shard, device=device, kernels=kernels)
        self.grid: Grid | None = None
        self.lane = here.kv
        if topology.ranks > 1:
            self.grid = Grid(
                topology, member.rank, member.endpoint, address="127.0.0.1", epoch=0, hidden_size=config.hidden_size,
                dtype=torch.float32, meet_seconds=60, wait_seconds=60,
            )  # fmt: skip
            model = model.in_grid(self.grid.tensor_group, self.grid)
        self.model = model
        blocks = -(-(member.tokens // topology.kv + 2 * STRIPE_TOKENS) // BLOCK_TOKENS)
        self.cache: KVCache = model.new_kv_cache(blocks, BLOCK_TOKENS)
        for pool in (*self.cache.keys, *self.cache.values):  # pages are taken now; random data for decodes
            pool.copy_(torch.randn(pool.shape[0], BLOCK_TOKENS, pool.shape[2]).repeat(1, blocks, 1))

    def executor(self, name: str, shards: ShardMap, tokens: int) -> Executor:
        """With one request admitted whose ids are here."""
        executor = Executor(
            self.model, self.cache, vocab_size=self.config.vocab_size, eos_token_ids=(), clock=time.perf_counter,
            lane=self.lane, pipeline=self.grid,
        )  # fmt: skip
        ids = np.random.default_rng(0).integers(10, self.config.vocab_size, tokens).astype(np.int32)
        executor.add_tokens(Tokens(prompt=name, offset=0, total=tokens), ids)
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        admit = Admit(name, name, tokens, tokens, 1, sampling, shards.tokens, segments=shards.segments)
        executor.prepare(Step(0, 0, ()))
        executor.execute(Step(0, 0, (), admits=(admit,), lanes=(self.lane,)))
        return executor

    def run(self, executor: Executor, steps: Sequence[Step]) -> dict[str, Any]:
        """From when all ranks are ready until this one has done its part."""
        if self.grid is not None:
            self.grid.smallest(0)
        self.clocked.seconds = 0.0
        start = time.monotonic()
        for step in steps:
            executor.prepare(step)
            executor.execute(step)
        end = time.monotonic()
        executor.learn_all()  # tokens of the last steps are still on their way
        return {"start": start, "end": end, "attention_seconds": self.clocked.seconds}

    def prefill(self, tokens: int, chunk: int, strategy: str, cached: int = 0) -> dict[str, Any]:
        """Of a prompt whose first `cached` tokens are there already, as random KV."""
        lanes = self.member.kv
        shards = place_prompt(tokens, tokens + 1, lanes, strategy)
        steps: list[Step] = []
        for start in range(cached, tokens, chunk):
            stop = min(start + chunk, tokens)
            steps.append(prefill_step(len(steps) + 1, shards, start, stop, strategy, samples=stop == tokens))
        executor = self.executor("a", shards, tokens)
        executor._sequences["a"].computed = cached
        return self.run(executor, steps)

    def decode(self, tokens: int, steps: int) -> dict[str, Any]:
        """Decodes behind `tokens` tokens of random KV; the first one, which warms up, is not counted."""
        shards = place_prompt(tokens, tokens + steps + 1, self.member.kv, OWNER_COMPUTE)
        executor = self.executor("a", shards, tokens)
        executor._sequences["a"].computed = tokens - 1
        plans = [
            Step(
                1 + index, 0,
                (StepEntry("a", shards.owner, (Extent(tokens - 1 + index, 1),), True, strategy_of(shards)),),
                lanes=shards.lanes,
            )
            for index in range(steps + 1)
        ]  # fmt: skip
        self.run(executor, plans[:1])
        result = self.run(executor, plans[1:])
        kv_bytes = sum(pool[:, 0].nbytes for pool in (*self.cache.keys, *self.cache.values))
        return result | {"kv_bytes": steps * shards.tokens_on(self.lane) * kv_bytes}

    def decode_batch(self, tokens: int, requests: int, steps: int, strategy: str) -> dict[str, Any]:
        """Decodes of requests that lie on both lanes in equal parts and are owned in turn; the first is not counted."""
        executor = Executor(
            self.model, self.cache, vocab_size=self.config.vocab_size, eos_token_ids=(), clock=time.perf_counter,
            lane=self.lane, pipeline=self.grid,
        )  # fmt: skip
        ids = np.random.default_rng(0).integers(10, self.config.vocab_size, tokens).astype(np.int32)
        executor.add_tokens(Tokens(prompt="a", offset=0, total=tokens), ids)
        half, sampling = (
            tokens // 2 // BLOCK_TOKENS * BLOCK_TOKENS,
            Sampling(temperature=0.0, ignore_eos=True),
        )
        owners = {f"a{index}": index % 2 for index in range(requests)}
        admits = []
        for name, owner in owners.items():
            segments = (Segment(owner, 0, half), Segment(1 - owner, half, tokens + steps + 1))
            admits.append(
                Admit(name, "a", tokens, tokens, 1, sampling, tokens + steps + 1, segments=segments)
            )
        executor.prepare(Step(0, 0, ()))
        executor.execute(Step(0, 0, (), admits=tuple(admits), lanes=(self.lane,)))
        for name in owners:
            executor._sequences[name].computed = tokens - 1
        plans = [
            Step(
                1 + index, 0,
                tuple(
                    StepEntry(name, owner, (Extent(tokens - 1 + index, 1),), True, strategy)
                    for name, owner in owners.items()
                ),
                lanes=(0, 1),
            )
            for index in range(steps + 1)
        ]  # fmt: skip
        self.run(executor, plans[:1])
        return self.run(executor, plans[1:])

    def behind(self, tokens: int, rows: int, steps: int, *, replicated: bool) -> dict[str, Any]:
        """The same `rows` behind `tokens` of random KV on two lanes, `steps` times over; `last` is what comes of them."""
        assert self.grid is not None
        lane, stop = self.lane, tokens + rows
        shards = place_prompt(stop, stop, self.member.kv, OWNER_COMPUTE)
        table = np.arange(-(-shards.tokens_on(lane) // BLOCK_TOKENS))
        computes = replicated or lane == shards.owner
        entry = SpreadEntry(
            shards, lane if replicated else shards.owner, (Extent(tokens, rows),), stop, table, OWNER, "a"
        )
        plan = plan_spread(lane, [entry] if computes else [], [] if computes else [entry], BLOCK_TOKENS)
        assert plan is not None
        kernels = self.model.kernels
        if (
            replicated
        ):  # K and V are everywhere; nobody is asked, and every attention is merged with the other lane's
            plan = replace(plan, landing=Landing(plan.landing.here, {}, {}), own=())
            self.model.kernels = replace(kernels, attention=Merging(kernels.attention, self.grid))
        ids = torch.from_numpy(np.random.default_rng(0).integers(10, 100, rows if computes else 0))
        at = torch.arange(tokens, stop)[: len(ids)]
        last = 0.0
        try:
            for step in range(steps + 1):
                if step == 1:  # the first one warms up
                    self.grid.smallest(0)
                    start = time.monotonic()
                hidden = self.model.forward(ids, at, (), self.cache, plan)
                if computes:
                    logits = self.model.logits(hidden[-1:])
                    assert logits is not None
                    last = float(logits.max())
            return {"start": start, "end": time.monotonic(), "last": last}
        finally:
            self.model.kernels = kernels

    def read(self) -> dict[str, Any]:
        """How fast this core reads its KV pools: bytes a second of plain reductions; all ranks begin each at once."""
        pools = [pool.view(-1) for pool in (*self.cache.keys, *self.cache.values)]
        read_bytes, rates = sum(pool.nbytes for pool in pools), []
        for reduce in 3 * (torch.sum, torch.max, lambda x: torch.dot(x, x)):
            if self.grid is not None:
                self.grid.smallest(0)
            start = time.perf_counter()
            for pool in pools:
                reduce(pool)
            rates.append(read_bytes / (time.perf_counter() - start))
        return {"start": 0.0, "end": 0.0, "bytes_per_second": rates}


def strategy_of(shards: ShardMap) -> str:
    return OWNER if len(shards.lanes) > 1 else "local"


def place_prompt(tokens: int, reserved: int, lanes: int, strategy: str) -> ShardMap:
    room = [2 * reserved + 2 * STRIPE_TOKENS] * lanes
    if lanes > 1 and strategy != OWNER_COMPUTE:
        stripe = min(STRIPE_TOKENS, tokens // (2 * lanes) // BLOCK_TOKENS * BLOCK_TOKENS)
        shards = deal(
            tokens, reserved, room, range(lanes), stripe_tokens=stripe, block_size_tokens=BLOCK_TOKENS
        )
    else:
        share = -(-tokens // lanes)
        shards = place(
            tokens, reserved, room, block_size_tokens=BLOCK_TOKENS, tokens_per_lane=share, lane_tokens=room[0]
        )
    assert shards is not None
    return shards


def prefill_step(
    number: int, shards: ShardMap, start: int, stop: int, strategy: str, *, samples: bool
) -> Step:
    lanes = shards.lanes
    if strategy in (PASS_KV, PASS_Q, STRIPED):
        cut = (striped if strategy == STRIPED else balanced)(start, stop, len(lanes))
        passes = PASS_Q if strategy == PASS_Q else PASS_KV
        entries = [
            StepEntry("a", lane, extents, samples and lane == shards.owner, passes)
            for lane, extents in zip(lanes, cut, strict=True)
        ]
    else:
        extents = (Extent(start, stop - start),)
        entries = [StepEntry("a", shards.owner, extents, samples, strategy_of(shards))]
        lanes = shards.participants(stop)
    return Step(number, 0, tuple(entries), lanes=tuple(sorted(lanes)))


def rank_main(member: Member) -> None:
    process = RankProcess(member)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        result = getattr(process, asked.pop("do"))(**asked)
        print(json.dumps(result), flush=True)


# --- in the benchmark's process -----------------------------------------------------------------------


class Configuration:
    """The processes of one grid; they wait without using their cores while others run."""

    def __init__(
        self, stream: int, kv: int, checkpoint: str, tokens: int, cores: list[tuple[int, ...]]
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        self._processes = []
        for rank, pinned in enumerate(cores):
            member = Member(1, stream, kv, rank, endpoint, pinned, len(pinned), checkpoint, tokens)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--member", json.dumps(asdict(member))],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        self._answers()

    def do(self, what: str, **arguments: Any) -> tuple[float, list[dict[str, Any]]]:
        """Seconds from the first rank's start to the last one's end, and what each says."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": what} | arguments) + "\n")
            process.stdin.flush()
        answers = self._answers()
        start, end = min(one["start"] for one in answers), max(one["end"] for one in answers)
        return end - start, answers

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                sys.exit("a rank has ended; its error is above")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)


def spp(checkpoint: str, cores: list[int], rounds: int, *, tokens: int, chunk: int) -> dict[str, Any]:
    first, second = (cores[0],), (cores[1],)
    configurations = {
        "one core": Configuration(1, 1, checkpoint, tokens, [first]),
        "two threads": Configuration(1, 1, checkpoint, tokens, [first + second]),
        "two stages": Configuration(2, 1, checkpoint, tokens, [first, second]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in configurations}
    for configuration in configurations.values():
        configuration.do("prefill", tokens=2 * chunk, chunk=chunk, strategy=SPP)  # warm up
    for _ in range(rounds):
        for name, configuration in configurations.items():
            taken, _ = configuration.do("prefill", tokens=tokens, chunk=chunk, strategy=SPP)
            seconds[name].append(taken)
            print(f"  prefill of {tokens} tokens, {name}: {taken:.2f} s", flush=True)
    for configuration in configurations.values():
        configuration.close()
    ratios = {
        "spp / one core": ratio(seconds["one core"], seconds["two stages"]),
        "spp / two threads": ratio(seconds["two threads"], seconds["two stages"]),
    }
    return {"tokens": tokens, "chunk_tokens": chunk, "seconds": seconds, "ratios": ratios}


def kvp(checkpoint: str, cores: list[int], rounds: int, *, tokens: int, steps: int) -> dict[str, Any]:
    """One lane takes its turn on either core, and counts as the mean of both: two lanes need both, and cores differ."""
    alone = [Configuration(1, 1, checkpoint, tokens, [(core,)]) for core in cores]
    two = Configuration(1, 2, checkpoint, tokens, [(core,) for core in cores])
    result: dict[str, list[Any]] = {
        "one lane": [], "two lanes": [], "attention": [], "attention of two": [], "read": [], "read at once": [], "KV read": [],
    }  # fmt: skip
    for _ in range(rounds):
        read = [one.do("read")[1][0]["bytes_per_second"] for one in alone]
        at_once = [said["bytes_per_second"] for said in two.do("read")[1]]
        decoded = [one.do("decode", tokens=tokens, steps=steps) for one in alone]
        together, both = two.do("decode", tokens=tokens, steps=steps)
        result["one lane"].append([seconds / steps for seconds, _ in decoded])
        result["two lanes"].append(together / steps)
        result["attention"].append([said["attention_seconds"] / steps for _, (said,) in decoded])
        result["attention of two"].append([said["attention_seconds"] / steps for said in both])
        result["read"].append(read)
        result["read at once"].append(at_once)
        result["KV read"].append([said["kv_bytes"] / said["attention_seconds"] for _, (said,) in decoded])
        print(
            f"  decode behind {tokens} tokens: one lane {listed(result['one lane'][-1], 1e3)} ms, two "
            f"{1e3 * together / steps:.1f} ms (attention {listed(result['attention of two'][-1], 1e3)}); "
            f"GB/s: KV {listed(result['KV read'][-1], 1e-9)}, memory {listed(map(max, read), 1e-9)}, "
            f"both cores at once {listed(map(max, at_once), 1e-9)}",
            flush=True,
        )
    for configuration in (*alone, two):
        configuration.close()
    one_lane = [statistics.mean(each) for each in result["one lane"]]
    ratios = {
        "kvp / one lane": ratio(one_lane, result["two lanes"]),
        "KV read rate": ratio(chain(*result["KV read"]), map(max, chain(*result["read"]))),
    }
    # What half of the keys on each core would give: all else as on one lane, and nothing for the exchange.
    slower = max(1.0, ratio(chain(*chain(*result["read"])), chain(*chain(*result["read at once"]))))
    share = statistics.median(chain(*result["attention"])) / statistics.median(chain(*result["one lane"]))
    return {
        "tokens": tokens, "steps": steps, **result, "attention share": share, "slower at once": slower,
        "limit": 1 / (1 - share + slower * share / 2),
        "by medians": statistics.median(one_lane) / statistics.median(result["two lanes"]),
        "over the first core": ratio([first for first, _ in result["one lane"]], result["two lanes"]),
        "ratios": ratios,
    }  # fmt: skip


def listed(values: Iterable[float], scale: float) -> str:
    """Both of two figures, to a decimal, in units of 1 / `scale`."""
    return " and ".join(f"{scale * value:.1f}" for value in values)


def prefill(checkpoint: str, cores: list[int], rounds: int, lengths: list[int]) -> dict[str, Any]:
    """One prompt on one core, and on two ranks by each strategy."""
    first, second = (cores[0],), (cores[1],)
    longest = max(lengths)
    one = Configuration(1, 1, checkpoint, longest, [first])
    stages = Configuration(2, 1, checkpoint, longest, [first, second])
    lanes = Configuration(1, 2, checkpoint, longest, [first, second])
    runs = {
        "one core": (one, SPP, 512),
        SPP: (stages, SPP, 512),
        OWNER_COMPUTE: (lanes, OWNER_COMPUTE, 512),
        PASS_KV: (lanes, PASS_KV, 2048),
        PASS_Q: (lanes, PASS_Q, 2048),
        STRIPED: (lanes, STRIPED, 2048),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for length in lengths:
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, (configuration, strategy, chunk) in runs.items():
                taken, _ = configuration.do("prefill", tokens=length, chunk=chunk, strategy=strategy)
                seconds[name].append(taken)
        found[str(length)] = seconds
        speed = ", ".join(
            f"{name} {ratio(seconds['one core'], taken):.2f}"
            for name, taken in seconds.items()
            if name != "one core"
        )
        print(
            f"  {length} tokens: one core {statistics.median(seconds['one core']):.2f} s; times as fast: {speed}",
            flush=True,
        )
    for configuration in (one, stages, lanes):
        configuration.close()
    return {"chunk_tokens": {name: chunk for name, (_, _, chunk) in runs.items()}, "seconds": found}


def cached(checkpoint: str, cores: list[int], rounds: int, *, tokens: int) -> dict[str, Any]:
    """A prompt of which most is cached: what is left, on one core and on two ranks by each strategy."""
    first, second = (cores[0],), (cores[1],)
    one = Configuration(1, 1, checkpoint, tokens, [first])
    stages = Configuration(2, 1, checkpoint, tokens, [first, second])
    lanes = Configuration(1, 2, checkpoint, tokens, [first, second])
    found: dict[str, dict[str, list[float]]] = {}
    for miss in MISS_PERCENT:
        left = round(tokens * miss / 100)
        short = max(min(512, left // 4), 64)  # a pipeline needs several chunks
        runs = {
            "one core": (one, SPP, 512),
            SPP: (stages, SPP, short),
            OWNER_COMPUTE: (lanes, OWNER_COMPUTE, 512),
            PASS_KV: (lanes, PASS_KV, 2048),
            PASS_Q: (lanes, PASS_Q, 2048),
            STRIPED: (lanes, STRIPED, 2048),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, (configuration, strategy, chunk) in runs.items():
                taken, _ = configuration.do(
                    "prefill", tokens=tokens, chunk=chunk, strategy=strategy, cached=tokens - left
                )
                seconds[name].append(taken)
        found[f"{miss:g} %"] = seconds
        speed = ", ".join(
            f"{name} {ratio(seconds['one core'], taken):.2f}"
            for name, taken in seconds.items()
            if name != "one core"
        )
        print(
            f"  {miss:g} % of {tokens} tokens: one core {statistics.median(seconds['one core']):.2f} s; times as fast: "
            f"{speed}",
            flush=True,
        )
    for configuration in (one, stages, lanes):
        configuration.close()
    return {"tokens": tokens, "seconds": found}


def batch(
    checkpoint: str, cores: list[int], rounds: int, *, tokens: int, sizes: list[int], steps: int
) -> dict[str, Any]:
    """Decodes of requests that lie on two lanes, asked directly and around the ring."""
    lanes = Configuration(1, 2, checkpoint, tokens * max(sizes), [(cores[0],), (cores[1],)])
    found: dict[str, dict[str, list[float]]] = {}
    for requests in sizes:
        seconds: dict[str, list[float]] = {OWNER: [], PASS_Q: []}
        for _ in range(rounds):
            for strategy, taken in seconds.items():
                together, _ = lanes.do(
                    "decode_batch", tokens=tokens, requests=requests, steps=steps, strategy=strategy
                )
                taken.append(together / steps)
        found[str(requests)] = seconds
        print(
            f"  a step of {requests} decodes behind {tokens} tokens each: direct {1e3 * statistics.median(seconds[OWNER]):.1f} "
            f"ms; pass-Q {ratio(seconds[OWNER], seconds[PASS_Q]):.2f} times as fast",
            flush=True,
        )
    lanes.close()
    return {"tokens": tokens, "steps": steps, "seconds": found}


def replicated(
    checkpoint: str, cores: list[int], rounds: int, *, contexts: list[int], steps: int
) -> dict[str, Any]:
    """Owner-compute beside linear layers that both lanes repeat: a decode and a chunk, behind several contexts."""
    lanes = Configuration(1, 2, checkpoint, max(contexts) + 512, [(cores[0],), (cores[1],)])
    found: dict[str, dict[str, list[float]]] = {}
    for context in contexts:
        for rows in (1, 512):
            seconds: dict[str, list[float]] = {OWNER_COMPUTE: [], "replicated": []}
            said: dict[str, float] = {}
            for _ in range(rounds):
                for name, taken in seconds.items():
                    together, answers = lanes.do(
                        "behind", tokens=context, rows=rows, steps=steps, replicated=name == "replicated"
                    )
                    taken.append(together / steps)
                    said[name] = max(one["last"] for one in answers)
            assert abs(said[OWNER_COMPUTE] - said["replicated"]) < 1e-3, f"they say different things: {said}"
            found[f"{rows} rows behind {context}"] = seconds
            print(
                f"  {rows} rows behind {context} tokens: owner-compute {1e3 * statistics.median(seconds[OWNER_COMPUTE]):.1f} "
                f"ms; replicated linear layers {ratio(seconds[OWNER_COMPUTE], seconds['replicated']):.2f} times as fast",
                flush=True,
            )
    lanes.close()
    return {"steps": steps, "seconds": found}


def ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """The median of what was measured in pairs."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter prompts: a look, not a measurement")
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk of `spp`")
    parser.add_argument(
        "--json", type=Path, help="write every figure here; parts that are not measured stay as they are"
    )
    parser.add_argument("--member", help=argparse.SUPPRESS)  # a rank's process, started by this one
    arguments = parser.parse_args()
    if arguments.member:
        said = json.loads(arguments.member)
        rank_main(Member(**said | {"cores": tuple(said["cores"])}))
        return 0

    only = arguments.only or PARTS
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("two cores are needed, and this process may use one")
    result: dict[str, Any] = {}
    quick = arguments.quick
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(Path(folder) / "small")
        init_checkpoint(checkpoint, preset="small", seed=0)
        if "spp" in only:
            result["spp"] = spp(
                checkpoint, cores, arguments.rounds, tokens=4096 if quick else 16384, chunk=arguments.chunk
            )
        if "kvp" in only:
            tokens = 32768 if quick else 131072
            result["kvp"] = kvp(checkpoint, cores, arguments.rounds, tokens=tokens, steps=8)
        if "prefill" in only:
            lengths = [2048, 4096] if quick else [2048, 4096, 8192, 16384]
            result["prefill"] = prefill(checkpoint, cores, arguments.rounds, lengths)
        if "cached" in only:
            result["cached"] = cached(checkpoint, cores, arguments.rounds, tokens=4096 if quick else 16384)
        if "batch" in only:
            tokens = 4096 if quick else 16384
            result["batch"] = batch(checkpoint, cores, arguments.rounds, tokens=tokens, sizes=[2, 8], steps=8)
        if "replicated" in only:
            contexts = [4096] if quick else [16384, 131072]
            result["replicated"] = replicated(checkpoint, cores, arguments.rounds, contexts=contexts, steps=4)
    conditions = {
        "rounds": arguments.rounds,
        "cores": cores,
        "torch": torch.__version__,
        "revision": revision(),
    }
    result = {part: figures | conditions for part, figures in result.items()}
    for claim in claims(result):
        verdict = "met" if claim["value"] >= claim["goal"] else "not met"
        print(f"{claim['name']}: {claim['value']:.2f} (goal {claim['goal']}: {verdict})")
    if arguments.json is not None:
        if arguments.json.exists():
            before = json.loads(arguments.json.read_text(encoding="utf-8"))
            result = {part: before[part] for part in PARTS if part in before} | result
        arguments.json.write_text(
            json.dumps(result | {"claims": claims(result)}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


def claims(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What must hold, of the parts that were measured."""
    return [
        {
            "name": name,
            "value": value,
            "unit": "ratio",
            "goal": GOALS[name],
            "better": "more",
            "peer": PEERS[name],
        }
        for part in ("spp", "kvp")
        for name, value in result.get(part, {}).get("ratios", {}).items()
    ]


if __name__ == "__main__":
    sys.exit(main())
