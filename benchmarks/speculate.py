"""Measure what speculative decoding gains and costs: by prompt lookup, and with a draft model.

    python benchmarks/speculate.py --quick
    python benchmarks/speculate.py --json benchmarks/results/speculate.json

Three `medha up` serve a checkpoint of the preset `small` in float32: one without `scheduling.speculation`, one with prompt
lookup, and one with a draft model. They are measured in turn. A random model quotes no document. Therefore what its layers compute is multiplied by 0, at
the same cost, so that the next token depends on the last one alone: greedy output comes into a cycle of some tens of
tokens (`repeats`), and sampled output does not (`free`). Streams have long TPOT targets, so that deadlines do not
forbid guesses. The draft model is the served one with two of its layers, so it is always right, and takes a part of the time: what
is measured is the most that a draft of this size can gain, and that load is seen before it costs.

For 1, 8 and 32 streams at a time, it prints the output tokens per second with and without speculation, the guesses
that a step verified per token, and the share of them that was right. The claims are that nothing is slower than 0.95
of plain decoding, that one stream is faster where guesses are right, and that all texts are the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
from harness import Row, claim, exit_with, in_turn, parser, ratio, report, table
from safetensors.torch import load_file, save_file
from served import medha_up, served, write_manifest

from medha_cli.runs import Run
from medha_worker.checkpoints.presets import init_checkpoint

MODEL = "small"
STREAMS = (1, 8, 32)
WORKLOADS = {"repeats": 0.0, "free": 1.0}
"""Temperature of each workload."""
DRAFT_LAYERS = 2
LEAST_RATIO = 0.95
PROMPT_TOKENS = 64
COUNTERS = ("medha_drafted_tokens", "medha_accepted_draft_tokens")


@dataclass(frozen=True)
class Server:
    url: str
    run: Run

    def counters(self) -> list[float]:
        """Return the numbers of guesses that steps have verified, and that were right."""
        page = httpx.get(f"{self.run.telemetry_url()}/metrics").text
        return [float(re.findall(rf"^{name}_total (\S+)$", page, re.MULTILINE)[0]) for name in COUNTERS]


@dataclass(frozen=True)
class Measured:
    tokens_per_second: float
    texts: list[str]
    drafted: float
    accepted: float


async def texts(url: str, streams: int, tokens: int, temperature: float) -> list[str]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def text(number: int) -> str:
            body: Row = {
                "model": MODEL, "prompt": [300 + (number * 997 + place * 31) % 3000 for place in range(PROMPT_TOKENS)],
                "seed": number, "temperature": temperature, "max_tokens": tokens, "ignore_eos": True,
            }  # fmt: skip
            response = await client.post("/v1/completions", json=body)
            response.raise_for_status()
            answer = json.loads(response.text)
            assert answer["usage"]["completion_tokens"] == tokens
            return str(answer["choices"][0]["text"])

        return await asyncio.gather(*map(text, range(streams)))


def measure(server: Server, streams: int, tokens: int, temperature: float) -> Measured:
    before, began = server.counters(), time.perf_counter()
    found = asyncio.run(texts(server.url, streams, tokens, temperature))
    seconds = time.perf_counter() - began
    drafted, accepted = (after - one for after, one in zip(server.counters(), before, strict=True))
    return Measured(streams * tokens / seconds, found, drafted, accepted)


def forget_context(checkpoint: Path) -> None:
    """Multiply what layers add by 0, so that the next token depends on the last one alone."""
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        save_file(tensors, file, metadata={"format": "pt"})


def make_draft(checkpoint: Path, draft: Path) -> None:
    """Copy a checkpoint that forgets its context, with its first layers only: it writes the same texts."""
    shutil.copytree(checkpoint, draft)
    for file in draft.glob("*.safetensors"):
        kept = {
            name: tensor
            for name, tensor in load_file(file).items()
            if not name.startswith("model.layers.") or int(name.split(".")[2]) < DRAFT_LAYERS
        }
        save_file(kept, file, metadata={"format": "pt"})
    config = draft / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": DRAFT_LAYERS}))


def start(stack: ExitStack, folder: Path, name: str, speculation: Row) -> Server:
    spec = {
        "model": {"name": MODEL, "source": {"path": str(folder / MODEL)}, "maxModelLen": 4096},
        "kvCache": {"size": "512Mi", "prefixCaching": False},
        "scheduling": {"speculation": speculation},
        "serviceClasses": [{"name": "default", "tpotTargetSeconds": 5}],
        "threads": len(os.sched_getaffinity(0)),
    }
    manifest, run = folder / f"{name}.yaml", folder / f"run-{name}"
    url = write_manifest(manifest, name, spec)
    stack.enter_context(served(medha_up(manifest, "--run-dir", str(run)), url))
    return Server(url, Run(run, name, 0))


def row(method: str, workload: str, streams: int, plain: list[Measured], guessing: list[Measured]) -> Row:
    drafted, accepted = (sum(getattr(one, name) for one in guessing) for name in ("drafted", "accepted"))
    pairs = [
        pair for a, b in zip(plain, guessing, strict=True) for pair in zip(a.texts, b.texts, strict=True)
    ]
    return {
        "method": method,
        "workload": workload,
        "streams": streams,
        "plain_tokens_per_second": statistics.median(one.tokens_per_second for one in plain),
        "tokens_per_second": statistics.median(one.tokens_per_second for one in guessing),
        "ratio": ratio([one.tokens_per_second for one in guessing], [one.tokens_per_second for one in plain]),
        "drafted": drafted,
        "accepted_share": accepted / drafted if drafted else 0.0,
        "texts": len(pairs),
        "same_texts": sum(a == b for a, b in pairs),
    }


def claims(rows: list[Row]) -> list[Row]:
    found = []
    for one in rows:
        name = (
            f"{one['method']}, {one['workload']}, {one['streams']} streams: tokens/s against plain decoding"
        )
        peer = f"plain: {one['plain_tokens_per_second']:.0f} tokens/s; {100 * one['accepted_share']:.0f} % of guesses right"
        is_guessed = one["method"] == "draftModel" or one["workload"] == "repeats"
        goal = 1.0 if is_guessed and one["streams"] == 1 else LEAST_RATIO
        found.append(claim(name, one["ratio"], "ratio", goal, "more", peer))
    texts, same = (sum(one[name] for one in rows) for name in ("texts", "same_texts"))
    return [*found, claim("texts that are the same", 100 * same / texts, "%", 100, "more")]


def main() -> int:
    options = parser(__doc__, quick="8 streams of 192 tokens, one round", rounds=3)
    options.add_argument(
        "--draft-tokens", type=int, default=4, metavar="N", help="maxDraftTokens (default 4)"
    )
    arguments = options.parse_args()
    streams, tokens = ((8,), 192) if arguments.quick else (STREAMS, 256)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="speculate-") as name, ExitStack() as stack:
        folder = Path(name)
        init_checkpoint(folder / MODEL, preset=MODEL, seed=0)
        forget_context(folder / MODEL)
        make_draft(folder / MODEL, folder / "draft")
        most: Row = {"maxDraftTokens": arguments.draft_tokens}
        methods: dict[str, Row] = {
            "none": {"method": "none"},
            "promptLookup": {"method": "promptLookup"} | most,
            "draftModel": {"method": "draftModel", "draftModel": {"path": str(folder / "draft")}} | most,
        }
        servers = {name: start(stack, folder, name.lower(), guess) for name, guess in methods.items()}
        for workload, temperature in WORKLOADS.items():
            for count in streams:
                calls = {
                    name: lambda server=server, count=count, temperature=temperature: measure(  # type: ignore[misc]
                        server, count, tokens, temperature
                    )
                    for name, server in servers.items()
                }
                in_turn(1, calls)  # warms up
                found = in_turn(1 if arguments.quick else arguments.rounds, calls)
                plain = found.pop("none")
                rows += [row(method, workload, count, plain, one) for method, one in found.items()]
    names = (
        "method",
        "workload",
        "streams",
        "plain tokens/s",
        "tokens/s",
        "ratio",
        "drafted",
        "accepted",
        "same texts",
        "texts",
    )
    keys = (
        "method", "workload", "streams", "plain_tokens_per_second", "tokens_per_second", "ratio", "drafted", "accepted_share",
        "same_texts", "texts",
    )  # fmt: skip
    table(names, [[one[key] for key in keys] for one in rows])
    return report(claims(rows), arguments.json, {"draft_tokens": arguments.draft_tokens, "rows": rows})


if __name__ == "__main__":
    exit_with(main)
