"""Measure what stands between two steps on a rank, and the size of a step message, at short and long contexts.

    python benchmarks/step.py --quick
    python benchmarks/step.py --shape KVP2 --shape SPP2
    python benchmarks/step.py --json benchmarks/results/step.json

`medha up` serves the `tiny` preset on one rank, two tensor ranks, two stages and two lanes. The lanes share every
request, also those of 1K, so that only the context differs. Requests of 1K, 32K and 256K tokens are prefilled and
decoded in turns, one after the other. Everything is real but the prefill, whose layers are left out: the KV pool holds
random numbers from the beginning.

Every rank of the lane that owns the request measures steps that decode one token; ranks of a lane that helps are
measured separately:

* the time from the end of a step (on the last stage) to the start of the next (on the first): answer, decision, message,
  and all bookkeeping in between;
* the part of a step that is neither the model's layers, nor their preparation, nor the wait for another stage;
* the bytes of the step's message, and of a request's first step, which admits it, also if the whole prompt is cached.

None of them may grow with the context.

A step over a long context leaves the processor's caches full of keys and values, and lets every other process sleep
longer. Whatever comes next starts cold, even with the same instructions. So the peer of 256K is a context of 1K (1,500
tokens) whose steps read as many bytes as those at 256K, and discard them. The ratio to a 1K that reads no more than it
needs is reported, too. The times at 256K are also bounded as ratios to the calibrated loop (benchmarks/harness.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from harness import LOOPS, Loop, claim, exit_with, parser, progress, report, table
from rich.console import Console
from served import served, write_manifest

from medha.wire.frames import encode
from medha.wire.messages import Step
from medha_cli.local_parts import RunFiles, write_parts
from medha_cli.manifest import model_directory, read_manifest
from medha_cli.terminal_display import TerminalDisplay
from medha_process.supervision.supervisor import Part, StopRequests, supervise
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.prepared_step import PreparedStep
from medha_worker.model.transformer import Transformer
from medha_worker.rank import process as rank_module

SHAPES = {
    "1 rank": (1, 1, 1),
    "TP2": (2, 1, 1),
    "SPP2": (1, 2, 1),
    "KVP2": (1, 1, 2),
}  # tensor, stages, lanes
COLD = 1_500  # steps after a prompt of this length read as many bytes as those of the longest context, and discard them
SHORT, LONG = 1_000, 256_000
CONTEXTS = (SHORT, COLD, 32_000, LONG)
LONGEST = 262_144
DECODED = 120
ROUNDS = 4  # over all contexts, because a shared machine changes its speed by the minute
FIRST = 20  # decode steps that are not counted
PREFILL_ROWS = 64  # a step of more rows is prefill
CHUNK_TOKENS = 512  # of every chunk but the last, however slow the predictor takes the machine to be
MOST_GROWTH = 1.25
MOST_LOOPS = 2.0
MOST_BYTES = 1000
TIMES = ("between_steps_us", "step_without_layers_us")
SIZES = ("message_bytes", "first_message_bytes", "first_message_cached_bytes")

Row = dict[str, Any]


def rank(settings: str, times_file: Path) -> None:
    """Run a rank whose prefills compute nothing, and which records when its steps begin and end."""
    decodes: list[Row] = []
    admits: list[Row] = []
    layers_seconds = 0.0
    is_prefill = is_cold = False
    pools: list[torch.Tensor] = []
    read_tokens = 0
    run_step, prepare, forward, new_kv_cache = (
        rank_module.Rank._run_step,
        Transformer.prepare,
        Transformer.forward,
        Transformer.new_kv_cache,
    )
    main_thread = threading.get_ident()

    def timed_step(self: rank_module.Rank, engine: Any, step: Step) -> None:
        nonlocal layers_seconds, is_prefill, is_cold, read_tokens
        layers_seconds = 0.0
        # All lanes and stages leave out the same steps, because ranks that run one wait for each other.
        is_prefill = any(entry.token_count > PREFILL_ROWS for entry in step.entries)
        is_cold = bool(step.entries) and COLD <= step.entries[0].extents[0].start <= COLD + DECODED
        here, lanes = (engine.grid.here, engine.grid.topology.kv) if engine.grid is not None else (None, 1)
        read_tokens = LONG // lanes
        started = time.perf_counter()
        run_step(self, engine, step)
        ended = time.perf_counter()
        size = len(encode(step)[0])
        admits.extend(
            {"context": admit.tokens, "is_cached": admit.cached_tokens > 0, "bytes": size}
            for admit in step.admits
        )
        if len(step.entries) != 1 or step.entries[0].token_count != 1:
            return
        entry, waited_seconds = step.entries[0], engine.executor._waited_seconds
        lane, stage, tensor = (here.kv, here.stream, here.tensor) if here is not None else (0, 0, 0)
        if lane in step.lanes:
            own_seconds = ended - started - layers_seconds - waited_seconds
            row = {"id": step.step_id, "stage": stage, "tensor": tensor, "bytes": size}
            row |= {"context": entry.extents[0].start, "helps": entry.lane != lane}
            decodes.append(row | {"start": started, "end": ended, "own_seconds": own_seconds})

    def timed_prepare(self: Transformer, *arguments: Any) -> PreparedStep:
        """Count the preparation of the layers as part of them, where it was not done while the last step ran."""
        nonlocal layers_seconds
        started = time.perf_counter()
        prepared = prepare(self, *arguments)
        if threading.get_ident() == main_thread:
            layers_seconds += time.perf_counter() - started
        return prepared

    def no_prefill(self: Transformer, batch: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal layers_seconds
        if is_prefill:
            return torch.zeros(batch.shape[0], self.config.hidden_size, dtype=self.dtype)
        started = time.perf_counter()
        hidden = forward(self, batch, *arguments)
        if is_cold:
            for pool in pools:
                pool[:, :read_tokens].sum()
        layers_seconds += time.perf_counter() - started
        return hidden

    def random_cache(self: Transformer, *arguments: Any) -> KVCache:
        cache = new_kv_cache(self, *arguments)
        for pool in (*cache.keys, *cache.values):
            pool.normal_()
            pools.append(pool)
        return cache

    rank_module.Rank._run_step = timed_step  # type: ignore[method-assign]
    Transformer.prepare = timed_prepare  # type: ignore[assignment, method-assign]
    Transformer.forward = no_prefill  # type: ignore[assignment, method-assign]
    Transformer.new_kv_cache = random_cache  # type: ignore[method-assign]
    try:
        rank_module.main(["--settings", settings])
    finally:
        times_file.write_text(json.dumps({"decodes": decodes, "admits": admits}))


def serve(folder: Path) -> int:
    """Run `medha up` with such ranks."""
    replica = read_manifest(folder / "manifest.yaml")
    files = RunFiles(folder / "run")
    files.directory.mkdir()
    groups = write_parts(replica, model_directory(replica), files, record=None, log_level="info")
    ranks = tuple(
        Part(
            part.name,
            (sys.executable, __file__, "--rank", part.argv[-1], str(folder / f"times-{number}.json")),
            part.environment,
            part.end_signal,
        )
        for number, part in enumerate(groups[-1])
    )
    with StopRequests() as requests:
        state = supervise(
            (*groups[:-1], ranks),
            run_directory=files.directory,
            is_ready=files.is_ready,
            display=TerminalDisplay(Console(width=200), "step", lambda _: []),
            ready_seconds=120,
            drain_seconds=5,
            requests=requests,
        )
    return state.exit_status


def measure(shape: str, decoded: int, rounds: int, loop: Loop) -> list[dict[str, list[Row]]]:
    """Return the record of each rank."""
    tensor, stages, lanes = SHAPES[shape]
    with tempfile.TemporaryDirectory(prefix="step-") as name:
        folder = Path(name)
        init_checkpoint(folder / "model", preset="tiny", seed=0)
        config = json.loads((folder / "model" / "config.json").read_text())
        config["max_position_embeddings"] = LONGEST
        (folder / "model" / "config.json").write_text(json.dumps(config))
        spec = {
            "model": {"name": "m", "source": {"path": str(folder / "model")}, "maxModelLen": LONGEST},
            "threads": 1,
            "parallelism": {"tensor": tensor, "stream": stages, "kv": lanes},
            "scheduling": {"minChunkTokens": CHUNK_TOKENS, "maxChunkTokens": CHUNK_TOKENS},
            "kvCache": {"size": "1Gi"} | ({"tokensPerLane": SHORT // lanes} if lanes > 1 else {}),
        }
        url = write_manifest(folder / "manifest.yaml", "step", spec)
        with served([sys.executable, __file__, "--serve", str(folder)], url):
            _ask(url, decoded, rounds, loop)
        ranks = range(tensor * stages * lanes)
        return [json.loads((folder / f"times-{number}.json").read_text()) for number in ranks]


def _ask(url: str, decoded: int, rounds: int, loop: Loop) -> None:
    for seed, context in enumerate(CONTEXTS * rounds):
        loop.sample(10)
        ids = [7 + (seed + position) % 97 for position in range(context)]
        is_first_round = seed < len(CONTEXTS)
        for tokens in (decoded, 1) if is_first_round else (decoded,):  # the second time the prompt is cached
            body = {"model": "m", "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
            httpx.post(url + "/v1/completions", json=body, timeout=300).raise_for_status()


def figures(ranks: list[dict[str, list[Row]]], context: int) -> Row:
    """Return medians of times and means of sizes, over the decode steps of a context.

    They are those of the lane that owns the request. The times of lanes that help are added, if any do.
    """
    decodes = [
        one
        for found in ranks
        for one in found["decodes"]
        if context + FIRST <= one["context"] <= context + DECODED
    ]
    here = [one for one in decodes if not one["helps"]]
    helping = [one for one in decodes if one["helps"]]
    admits = [one for one in ranks[0]["admits"] if one["context"] == context]
    first, cached = ([one["bytes"] for one in admits if one["is_cached"] == held] for held in (False, True))
    sizes = [one["bytes"] for one in here]
    row = dict(zip(TIMES, _times(here), strict=True))
    row |= dict(zip(SIZES, map(round, map(statistics.mean, (sizes, first, cached))), strict=True))
    if helping:
        row |= dict(zip((f"helper_{name}" for name in TIMES), _times(helping), strict=True))
    return row


def _times(here: list[Row]) -> tuple[int, int]:
    """Return medians in microseconds: between two steps, and of a step without its layers."""
    last = max(one["stage"] for one in here)  # the clock is the machine's: all processes read the same
    ends = {(one["id"], one["tensor"]): one["end"] for one in here if one["stage"] == last}
    starts = {(one["id"], one["tensor"]): one["start"] for one in here if one["stage"] == 0}
    gaps = [
        starts[id_ + 1, tensor] - end for (id_, tensor), end in ends.items() if (id_ + 1, tensor) in starts
    ]
    own = [one["own_seconds"] for one in here]
    return round(1e6 * statistics.median(gaps)), round(1e6 * statistics.median(own))


def claims(shape: str, found: dict[int, Row], loop: Loop) -> list[Row]:
    """Return claims that nothing grows with the context; `found` has one shape's figures by context."""
    claims: list[Row] = []

    def most(name: str, microseconds: float) -> None:
        value = loop.ratio(1e-6 * microseconds)
        claims.append(claim(f"{name}, {shape}", value, LOOPS, MOST_LOOPS, peer=loop.peer()))

    for field in (*TIMES, *SIZES):
        name, _, unit = field.replace("_", " ").rpartition(" ")
        is_time = field in TIMES
        if is_time:
            most(f"{name} at 256K", found[LONG][field])
        else:
            claims.append(claim(f"{name} at 256K, {shape}", found[LONG][field], unit, MOST_BYTES))
        peer = "1K with as many bytes read" if is_time else "1K"
        value = found[LONG][field] / found[COLD if is_time else SHORT][field]
        claims.append(claim(f"{name} at 256K over {peer}, {shape}", value, "x", MOST_GROWTH, peer=peer))
    for field in TIMES:
        if f"helper_{field}" in found[LONG]:
            name = field.replace("_", " ").removesuffix(" us")
            most(f"{name} at 256K on the lane that helps", found[LONG][f"helper_{field}"])
    return claims


def main() -> int:
    options = parser(__doc__, quick="one rank, fewer tokens", rounds=ROUNDS)
    options.add_argument("--shape", choices=SHAPES, action="append", help="only this one; may be repeated")
    options.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.rank:
        rank(arguments.rank[0], Path(arguments.rank[1]))
        return 0
    if arguments.serve:
        return serve(arguments.serve)
    claimed: list[Row] = []
    rows: list[Row] = []
    for shape in arguments.shape or (["1 rank"] if arguments.quick else list(SHAPES)):
        progress(shape)
        decoded, rounds = (DECODED // 2, 1) if arguments.quick else (DECODED, arguments.rounds)
        loop = Loop()
        ranks = measure(shape, decoded, rounds, loop)
        found = {context: figures(ranks, context) for context in CONTEXTS}
        for context, row in found.items():
            growth = {
                f"{field}_over_1k": round(row[field] / found[SHORT][field], 3) for field in (*TIMES, *SIZES)
            }
            read = LONG if context == COLD else context
            rows.append({"shape": shape, "context_tokens": context, "read_tokens": read} | row | growth)
        claimed += claims(shape, found, loop)
    columns = ("shape", "context_tokens", "read_tokens", *TIMES, *SIZES)
    table(columns, [[row[column] for column in columns] for row in rows])
    return report(claimed, arguments.json, {"rows": rows})


if __name__ == "__main__":
    exit_with(main)
