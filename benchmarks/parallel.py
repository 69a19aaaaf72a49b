"""Measure the gain of splitting one request over two ranks of one core each: stages, lanes and rings of lanes.

    python benchmarks/parallel.py --quick
    python benchmarks/parallel.py --only spp --rounds 9
    python benchmarks/parallel.py --json benchmarks/results/parallel.json

Ranks are processes pinned to a core. They connect over gloo as those of `medha up` do, and run steps that this script
makes: the engine is measured without controller and HTTP. Configurations take turns within a round, because a shared
machine changes its speed by the minute. The figures are medians of ratios within a round.

* **spp** the `small` preset prefills 16K tokens: on one core, on two threads, and on two stages of one core each.
* **kvp** the `small` preset decodes after 128K tokens, whose KV is random data: on one lane and on two. How fast one
  core reads memory is measured in the same round, as the largest rate of several reductions.
* **prefill** one prompt on two ranks by every strategy, at several lengths.
* **cached** the same for a prompt of which all but 2.5, 10 or 50 % is cached.
* **batch** decodes of several long requests, each of which lies on both lanes: asked directly, and in a ring that passes
  queries.
* **replicated** steps after a long context on two lanes: owner-compute with a helper, and both lanes computing the linear
  layers of all rows (as the papers do), so that only partial results travel. Only this script has that path.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # as `medha up` sets it for ranks; read when torch is loaded

import numpy as np
import torch
from harness import Row, claim, exit_with, in_turn, parser, progress, ratio, report, revision, table

from medha.kv.context_parallel import OWNER, PASS_KV, PASS_Q, balanced, striped
from medha.shards import Segment, ShardMap, place, striped_map
from medha.topology import Topology, stage_layers
from medha.wire.messages import Admit, Extent, Sampling, Step, StepEntry, Tokens
from medha_process.host_resources import free_port
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
from medha_worker.rank.mesh import Mesh

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
MISS_PERCENT = (2.5, 10, 50)  # shares of a prompt that are not cached
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
            def attend(self, *arguments: Any, **options: Any) -> Any:
                start = time.perf_counter()
                result = step.attend(*arguments, **options)
                clock.seconds += time.perf_counter() - start
                return result

        return Step()


class Merging:
    """Attention that each lane computes for the same rows over its own KV, and merges with the other lane's result."""

    def __init__(self, backend: Any, grid: Mesh) -> None:
        self._backend, self._grid = backend, grid

    def plan(self, *arguments: Any) -> Any:
        step, grid, other = self._backend.plan(*arguments), self._grid, 1 - self._grid.lane

        class Step:
            def attend(self, *arguments: Any, **_: Any) -> Any:
                output, sums = step.attend(*arguments)
                own = torch.cat([output.float().flatten(), sums.float().flatten()])
                theirs = torch.empty_like(own)
                grid.plane.finish(grid.plane.start({other: own}, {other: theirs}))
                of_output = theirs[: output.numel()].view(output.shape)
                of_sums = theirs[output.numel() :].view(sums.shape)
                return merge_partials((output, of_output), (sums.float(), of_sums))

        return Step()


class RankProcess:
    """Runs the scenarios that the lines of its input name, one after another."""

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
        self.grid: Mesh | None = None
        self.lane = here.kv
        if topology.ranks > 1:
            self.grid = Mesh(
                topology, member.rank, member.endpoint, address="127.0.0.1", epoch=0, hidden_size=config.hidden_size,
                device=device, rendezvous_seconds=60, wait_seconds=60,
            )  # fmt: skip
            model = model.in_grid(self.grid.tensor_group, self.grid.plane)
        self.model = model
        blocks = -(-(member.tokens // topology.kv + 2 * STRIPE_TOKENS) // BLOCK_TOKENS)
        self.cache: KVCache = model.new_kv_cache(blocks, BLOCK_TOKENS)
        # This allocates the pages now; decodes need random data.
        for pool in (*self.cache.keys, *self.cache.values):
            block = torch.randn(pool.shape[0], BLOCK_TOKENS, pool.shape[2])
            pool.copy_(block.repeat(1, pool.shape[1] // BLOCK_TOKENS, 1))

    def executor(self, name: str, shards: ShardMap, tokens: int) -> Executor:
        """Return an executor that has admitted one request and has its ids."""
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
        """Run steps; return when all ranks were ready and when this one was done, and its seconds of attention."""
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
        """Prefill a prompt whose first `cached` tokens are there already, as random KV."""
        lanes = self.member.kv
        shards = place_prompt(tokens, tokens + 1, lanes, strategy)
        steps: list[Step] = []
        for start in range(cached, tokens, chunk):
            stop = min(start + chunk, tokens)
            steps.append(prefill_step(len(steps) + 1, shards, start, stop, strategy, samples=stop == tokens))
        executor = self.executor("a", shards, tokens)
        executor._state.sequences["a"].computed = cached
        return self.run(executor, steps)

    def decode(self, tokens: int, steps: int) -> dict[str, Any]:
        """Decode after `tokens` tokens of random KV; the first decode warms up and is not counted."""
        shards = place_prompt(tokens, tokens + steps + 1, self.member.kv, OWNER_COMPUTE)
        executor = self.executor("a", shards, tokens)
        executor._state.sequences["a"].computed = tokens - 1
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
        """Decode for requests that lie on both lanes in equal parts and are owned in turn.

        The first step warms up and is not counted.
        """
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
            executor._state.sequences[name].computed = tokens - 1
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
        """Run the same `rows` after `tokens` of random KV on two lanes, `steps` times.

        In the result, `last` is the largest logit of the last step; it is 0 on a lane that computes no rows.
        """
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
        if replicated:
            # Both lanes have K and V of the rows. None asks the other; each merges its attention with the other's.
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
                hidden = self.model.forward(ids, self.model.prepare(at, (), self.cache, plan))
                if computes:
                    logits = self.model.logits(hidden[-1:])
                    assert logits is not None
                    last = float(logits.max())
            return {"start": start, "end": time.monotonic(), "last": last}
        finally:
            self.model.kernels = kernels

    def read(self) -> dict[str, Any]:
        """Measure how fast this core reads its KV pools, in bytes a second of plain reductions.

        All ranks begin each reduction at the same time.
        """
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
        shards = striped_map(
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


Taken = tuple[float, list[dict[str, Any]]]
"""Seconds of a run on all ranks, and each rank's answer."""


class Configuration:
    """The processes of one grid. They use no core while others run."""

    def __init__(
        self, stream: int, kv: int, checkpoint: str, tokens: int, cores: list[tuple[int, ...]]
    ) -> None:
        endpoint = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
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

    def do(self, what: str, **arguments: Any) -> Taken:
        """Run a scenario on all ranks; return the seconds from the first start to the last end, and the answers."""
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


def seconds_in_turn(
    rounds: int, runs: dict[str, Callable[[], Taken]], per: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each run in each round, divided by `per`."""
    found = in_turn(rounds, runs)
    return {name: [seconds / per for seconds, _ in taken] for name, taken in found.items()}


def as_fast(seconds: dict[str, list[float]], base: str) -> dict[str, float]:
    """Return how many times as fast as the base each of the others is."""
    return {name: ratio(seconds[base], taken) for name, taken in seconds.items() if name != base}


def show(title: str, found: dict[str, dict[str, list[float]]], base: str) -> None:
    """Print the time of the base, and how many times as fast the others are."""
    others = list(as_fast(next(iter(found.values())), base))
    rows = [
        (key, statistics.median(seconds[base]), *as_fast(seconds, base).values())
        for key, seconds in found.items()
    ]
    print(f"\n{title}: times as fast as {base}")
    table(("", f"{base}, s", *others), rows)


def spp(checkpoint: str, cores: list[int], rounds: int, *, tokens: int, chunk: int) -> dict[str, Any]:
    first, second = (cores[0],), (cores[1],)
    configurations = {
        "one core": Configuration(1, 1, checkpoint, tokens, [first]),
        "two threads": Configuration(1, 1, checkpoint, tokens, [first + second]),
        "two stages": Configuration(2, 1, checkpoint, tokens, [first, second]),
    }
    for configuration in configurations.values():
        configuration.do("prefill", tokens=2 * chunk, chunk=chunk, strategy=SPP)  # warm up
    runs = {
        name: partial(configuration.do, "prefill", tokens=tokens, chunk=chunk, strategy=SPP)
        for name, configuration in configurations.items()
    }
    seconds = seconds_in_turn(rounds, runs)
    for configuration in configurations.values():
        configuration.close()
    show("prefill", {f"{tokens} tokens": seconds}, "one core")
    ratios = {
        "spp / one core": ratio(seconds["one core"], seconds["two stages"]),
        "spp / two threads": ratio(seconds["two threads"], seconds["two stages"]),
    }
    return {"tokens": tokens, "chunk_tokens": chunk, "seconds": seconds, "ratios": ratios}


def kvp(checkpoint: str, cores: list[int], rounds: int, *, tokens: int, steps: int) -> dict[str, Any]:
    """Measure decodes on one lane and on two.

    One lane runs on each core in turn, and counts as the mean of both: two lanes need both cores, and cores differ.
    """
    alone = [Configuration(1, 1, checkpoint, tokens, [(core,)]) for core in cores]
    two = Configuration(1, 2, checkpoint, tokens, [(core,) for core in cores])
    result: dict[str, list[Any]] = {
        "one lane": [], "two lanes": [], "attention": [], "attention of two": [], "read": [], "read at once": [], "KV read": [],
    }  # fmt: skip
    for number in range(1, rounds + 1):
        progress(f"  round {number} of {rounds}: decode behind {tokens} tokens on one lane and on two")
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
    for configuration in (*alone, two):
        configuration.close()
    one_lane = [statistics.mean(each) for each in result["one lane"]]
    show(
        "step of a decode",
        {f"{tokens} tokens": {"one lane": one_lane, "two lanes": result["two lanes"]}},
        "one lane",
    )
    ratios = {
        "kvp / one lane": ratio(one_lane, result["two lanes"]),
        "KV read rate": ratio(chain(*result["KV read"]), map(max, chain(*result["read"]))),
    }
    # The limit if each core has half of the keys, all else is as on one lane, and the exchange is free.
    slower = max(1.0, ratio(chain(*chain(*result["read"])), chain(*chain(*result["read at once"]))))
    share = statistics.median(chain(*result["attention"])) / statistics.median(chain(*result["one lane"]))
    return {
        "tokens": tokens, "steps": steps, **result, "attention share": share, "slower at once": slower,
        "limit": 1 / (1 - share + slower * share / 2),
        "by medians": statistics.median(one_lane) / statistics.median(result["two lanes"]),
        "over the first core": ratio([first for first, _ in result["one lane"]], result["two lanes"]),
        "ratios": ratios,
    }  # fmt: skip


def prompt_runs(
    one: Configuration, stages: Configuration, lanes: Configuration, chunk: int
) -> dict[str, tuple[Configuration, str, int]]:
    """Return, for one core and for every strategy on two ranks: configuration, strategy and tokens of a chunk."""
    return {
        "one core": (one, SPP, 512),
        SPP: (stages, SPP, chunk),
        OWNER_COMPUTE: (lanes, OWNER_COMPUTE, 512),
        PASS_KV: (lanes, PASS_KV, 2048),
        PASS_Q: (lanes, PASS_Q, 2048),
        STRIPED: (lanes, STRIPED, 2048),
    }


def prompts(
    checkpoint: str, cores: list[int], rounds: int, wanted: dict[str, tuple[int, int, int]]
) -> dict[str, dict[str, list[float]]]:
    """Measure prompts on one core, and on two ranks by each strategy.

    `wanted` has, for each prompt, its tokens, how many of them are cached, and SPP's chunk.
    """
    first, second = (cores[0],), (cores[1],)
    longest = max(tokens for tokens, _, _ in wanted.values())
    one = Configuration(1, 1, checkpoint, longest, [first])
    stages = Configuration(2, 1, checkpoint, longest, [first, second])
    lanes = Configuration(1, 2, checkpoint, longest, [first, second])
    found = {}
    for key, (tokens, held, chunk) in wanted.items():
        progress(f"prompt: {key}")
        runs = {
            name: partial(place.do, "prefill", tokens=tokens, chunk=size, strategy=strategy, cached=held)
            for name, (place, strategy, size) in prompt_runs(one, stages, lanes, chunk).items()
        }
        found[key] = seconds_in_turn(rounds, runs)
    for configuration in (one, stages, lanes):
        configuration.close()
    return found


def prefill(checkpoint: str, cores: list[int], rounds: int, lengths: list[int]) -> dict[str, Any]:
    """Measure a prompt of each length on one core, and on two ranks by each strategy."""
    found = prompts(checkpoint, cores, rounds, {str(length): (length, 0, 512) for length in lengths})
    show("prompt tokens", found, "one core")
    chunks = {
        name: 512 if name in ("one core", SPP, OWNER_COMPUTE) else 2048 for name in found[str(lengths[0])]
    }
    return {"chunk_tokens": chunks, "seconds": found}


def cached(checkpoint: str, cores: list[int], rounds: int, *, tokens: int) -> dict[str, Any]:
    """Measure the new part of a cached prompt, on one core and on two ranks by each strategy."""
    wanted = {}
    for miss in MISS_PERCENT:
        left = round(tokens * miss / 100)
        chunk = max(min(512, left // 4), 64)  # a pipeline needs several chunks
        wanted[f"{miss:g} %"] = (tokens, tokens - left, chunk)
    found = prompts(checkpoint, cores, rounds, wanted)
    show(f"new part of {tokens} tokens", found, "one core")
    return {"tokens": tokens, "seconds": found}


def batch(
    checkpoint: str, cores: list[int], rounds: int, *, tokens: int, sizes: list[int], steps: int
) -> dict[str, Any]:
    """Measure decodes of requests that lie on two lanes, asked directly and around the ring."""
    lanes = Configuration(1, 2, checkpoint, tokens * max(sizes), [(cores[0],), (cores[1],)])
    found = {}
    for requests in sizes:
        asked = partial(lanes.do, "decode_batch", tokens=tokens, requests=requests, steps=steps)
        runs = {strategy: partial(asked, strategy=strategy) for strategy in (OWNER, PASS_Q)}
        found[str(requests)] = seconds_in_turn(rounds, runs, steps)
    lanes.close()
    show(f"step of so many decodes behind {tokens} tokens each", found, OWNER)
    return {"tokens": tokens, "steps": steps, "seconds": found}


def replicated(
    checkpoint: str, cores: list[int], rounds: int, *, contexts: list[int], steps: int
) -> dict[str, Any]:
    """Measure owner-compute beside linear layers that both lanes repeat.

    Both run a decode and a chunk after several contexts.
    """
    lanes = Configuration(1, 2, checkpoint, max(contexts) + 512, [(cores[0],), (cores[1],)])
    found = {}
    for context, rows in product(contexts, (1, 512)):
        asked = partial(lanes.do, "behind", tokens=context, rows=rows, steps=steps)
        runs = {
            OWNER_COMPUTE: partial(asked, replicated=False),
            "replicated": partial(asked, replicated=True),
        }
        answers = in_turn(rounds, runs)
        said = {name: max(one["last"] for one in taken[-1][1]) for name, taken in answers.items()}
        assert abs(said[OWNER_COMPUTE] - said["replicated"]) < 1e-3, f"they say different things: {said}"
        found[f"{rows} rows behind {context}"] = {
            name: [together / steps for together, _ in taken] for name, taken in answers.items()
        }
    lanes.close()
    show("step", found, OWNER_COMPUTE)
    return {"steps": steps, "seconds": found}


def main() -> int:
    options = parser(__doc__, quick="shorter prompts, two parts, one round: a look", rounds=3)
    options.add_argument("--only", choices=PARTS, action="append", help="only this one; may be repeated")
    options.add_argument("--chunk", type=int, default=512, metavar="N", help="tokens of a chunk of `spp`")
    options.add_argument("--member", help=argparse.SUPPRESS)  # a rank's process, started by this one
    arguments = options.parse_args()
    if arguments.member:
        said = json.loads(arguments.member)
        rank_main(Member(**said | {"cores": tuple(said["cores"])}))
        return 0

    quick = arguments.quick
    only = arguments.only or (("spp", "kvp") if quick else PARTS)
    rounds = 1 if quick else arguments.rounds
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("two cores are needed, and this process may use one")
    lengths = [2048, 4096] if quick else [2048, 4096, 8192, 16384]
    tokens = 4096 if quick else 16384
    contexts = [4096] if quick else [16384, 131072]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(Path(folder) / "small")
        init_checkpoint(checkpoint, preset="small", seed=0)
        where = (checkpoint, cores, rounds)
        parts: dict[str, Callable[[], Row]] = {
            "spp": lambda: spp(*where, tokens=tokens, chunk=arguments.chunk),
            "kvp": lambda: kvp(*where, tokens=32768 if quick else 131072, steps=8),
            "prefill": lambda: prefill(*where, lengths),
            "cached": lambda: cached(*where, tokens=tokens),
            "batch": lambda: batch(*where, tokens=tokens, sizes=[2, 8], steps=8),
            "replicated": lambda: replicated(*where, contexts=contexts, steps=4),
        }
        result = {}
        for part in parts:
            if part in only:
                progress(part)
                result[part] = parts[part]()
    conditions = {"rounds": rounds, "cores": cores, "torch": torch.__version__, "revision": revision()}
    result = {part: figures | conditions for part, figures in result.items()}
    if arguments.json is not None and arguments.json.exists():
        before = json.loads(arguments.json.read_text(encoding="utf-8"))
        result = {part: before[part] for part in PARTS if part in before} | result
    return report(claims(result), arguments.json, result)


def claims(result: dict[str, Any]) -> list[Row]:
    """Return the claims on the parts that were measured."""
    return [
        claim(name, value, "ratio", GOALS[name], "more", PEERS[name])
        for part in ("spp", "kvp")
        for name, value in result.get(part, {}).get("ratios", {}).items()
    ]


if __name__ == "__main__":
    exit_with(main)
