"""Measure the serving speed of one replica beside `transformers` on the same checkpoint, torch and threads.

    python benchmarks/serve.py --quick
    python benchmarks/serve.py --json benchmarks/results/serve.json
    python benchmarks/serve.py --peer vllm --vllm-command "PATH/vllm"

Engines take turns within each round, so that a noisy machine affects all of them. Three things are measured:

* `streams`  1, 8 and 32 concurrent streams of equal prompts: TTFT, TPOT and output tokens per second;
* `length`   one prompt alone, from 1K to 32K tokens: TTFT, and how it grows;
* `steps`    the share of Medha's wall time in which its rank is inside a step, from the controller's record.

The peers are `transformers`' padded `generate` and its continuous batching. They run in process, without the HTTP and
streaming that Medha pays for. A claim is a ratio Medha / peer, to the faster of the two. For one prompt alone, the peers
are `generate` and, if measured, vLLM.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from harness import Row, claim, exit_with, in_turn, parser, progress, report, table
from serve_engines import (
    MODEL,
    Engine,
    Timing,
    continuous_engine,
    generate_engine,
    http_engine,
    median_timing,
    random_prompts,
)
from served import SETTLE_SECONDS, medha_up, served, vllm_serve, write_manifest

from medha_worker.checkpoints.presets import init_checkpoint

LENGTHS = (1024, 4096, 8192, 16384, 32768)
"""Tokens of the prompts that are measured alone."""


def medha_server(stack: ExitStack, checkpoint: Path, threads: int) -> str:
    """Serve the checkpoint with `medha up`; return its URL."""
    spec = {
        "model": {"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 65536},
        "kvCache": {"size": "2Gi"},
        "threads": threads,
    }
    manifest = checkpoint.parent / "serve.yaml"
    url = write_manifest(manifest, "benchmark", spec)
    stack.enter_context(served(medha_up(manifest, "--record", str(record_file(checkpoint))), url))
    return url


def vllm_server(stack: ExitStack, command: str, checkpoint: Path, threads: int) -> str:
    """Serve the checkpoint with vLLM's CPU build; return its URL.

    `--long-prefill-token-threshold` keeps vLLM's default, off: prompts that run together are equally long here, so that
    none has to leave a part of the step to shorter ones.
    """
    options = ("--enforce-eager", "--max-num-batched-tokens", "2048")
    server, url, environment = vllm_serve(
        command, checkpoint, name=MODEL, threads=threads, kv_gib=2, options=options
    )
    stack.enter_context(served(server, url, "/health", environment))
    return url


def faster(timings: list[Timing], key: str, *, more: bool) -> Timing:
    values = sorted(timings, key=lambda timing: float(getattr(timing, key)))
    return values[-1] if more else values[0]


def record_file(checkpoint: Path) -> Path:
    return checkpoint.parent / "events.jsonl"


def computed_seconds(checkpoint: Path) -> float:
    """Return the time that the rank has spent inside steps so far."""
    total = 0.0
    for line in record_file(checkpoint).read_text(encoding="utf-8").splitlines()[2:]:
        if '"type":"Done"' in line:
            total += json.loads(line)["event"]["body"].get("compute_seconds", 0.0)
    return total


def main() -> int:
    options = parser(__doc__, quick="1 and 8 streams, one prompt of 1K, one round", rounds=3, seed=True)
    text = "CPU threads of every engine (default: one for each core)"
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help=text)
    options.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="(default 256)")
    options.add_argument("--output-tokens", type=int, default=64, metavar="N", help="(default 64)")
    text = "leave out longer prompts of `length` (default 32768)"
    options.add_argument("--longest-prompt", type=int, default=LENGTHS[-1], metavar="N", help=text)
    options.add_argument("--peer", choices=["vllm"], action="append", default=[], help="measure it as well")
    text = "how vLLM's CPU build is called (default vllm)"
    options.add_argument("--vllm-command", default="vllm", metavar="COMMAND", help=text)
    arguments = options.parse_args()
    threads, rounds, outputs = arguments.threads, arguments.rounds, arguments.output_tokens
    torch.set_num_threads(threads)
    streams = [1, 8] if arguments.quick else [1, 8, 32]
    lengths = (
        [1024] if arguments.quick else [length for length in LENGTHS if length <= arguments.longest_prompt]
    )
    if arguments.quick:
        rounds, outputs = 1, 8
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="medha-serve-")))
        checkpoint = folder / MODEL
        init_checkpoint(checkpoint, preset="small", seed=arguments.seed)
        progress("starting the engines")
        engines: dict[str, Engine] = {
            "medha": http_engine("medha", medha_server(stack, checkpoint, threads)),
            "transformers generate": generate_engine(checkpoint),
            "transformers continuous": continuous_engine(checkpoint),
        }
        if "vllm" in arguments.peer:
            vllm = vllm_server(stack, arguments.vllm_command, checkpoint, threads)
            engines["vllm"] = http_engine("vllm", vllm)
        for engine in engines.values():
            engine(random_prompts(1, 64, arguments.seed), 4)  # warm-up

        results: list[Timing] = []
        claims: list[Row] = []

        def measure(
            count: int, tokens: int, outputs: int, names: list[str], repeats: int
        ) -> dict[str, Timing]:
            """Return the median round of each engine; all of them get the same prompts within a round."""

            def once(name: str, seeds: Iterator[int]) -> Timing:
                prompts = random_prompts(count, tokens, next(seeds))
                time.sleep(SETTLE_SECONDS)
                return engines[name](prompts, outputs)

            progress(f"{count} prompts of {tokens} tokens")
            found = in_turn(
                repeats, {name: partial(once, name, itertools.count(arguments.seed)) for name in names}
            )
            medians = {name: median_timing(timings) for name, timings in found.items()}
            results.extend(medians.values())
            return medians

        def compare(name: str, key: str, ours: Timing, peers: list[Timing], *, more: bool = False) -> None:
            best = faster(peers, key, more=more)
            value = getattr(ours, key) / getattr(best, key)
            claims.append(claim(name, value, "ratio", 1.0, "more" if more else "less", best.engine))

        before = computed_seconds(checkpoint)
        medha_seconds = 0.0
        for count in streams:
            medians = measure(count, arguments.prompt_tokens, outputs, list(engines), rounds)
            ours = medians["medha"]
            medha_seconds += rounds * ours.streams * ours.output_tokens / ours.tokens_per_second
            others = [timing for name, timing in medians.items() if name.startswith("transformers")]
            for key, more in (("ttft_seconds", False), ("tpot_seconds", False), ("tokens_per_second", True)):
                name = f"{key.removesuffix('_seconds')} at {count} streams, ratio"
                compare(name, key, ours, others, more=more)
        share = (computed_seconds(checkpoint) - before) / medha_seconds
        names = ["medha", "transformers generate", *(["vllm"] if "vllm" in engines else [])]
        for length in lengths:
            medians = measure(1, length, 2, names, 1)
            others = [timing for name, timing in medians.items() if name != "medha"]
            name = f"ttft of one prompt of {length} tokens, ratio"
            compare(name, "ttft_seconds", medians["medha"], others)
    columns = ("engine", "streams", "prompt_tokens", "ttft_seconds", "tpot_seconds", "tokens_per_second")
    table(columns, [[getattr(result, column) for column in columns] for result in results])
    print(f"Ranks were inside a step for {share:.0%} of Medha's wall time.")
    figures = {
        "torch": torch.__version__,
        "threads": threads,
        "step_share_of_wall_time": share,
        "timings": [asdict(result) for result in results],
    }
    return report(claims, arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
