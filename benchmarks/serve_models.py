"""Measure how fast each family of models and each format of weights is served, and what memory it takes.

    python benchmarks/serve_models.py --quick
    python benchmarks/serve_models.py --json benchmarks/results/serve_models.json
    python benchmarks/serve_models.py --only gemma3_text --only llama:awq

Each row is a random checkpoint of the preset `small`, served by `medha up` on all cores. The peer of a family in float32 is
`transformers`' `generate`, in process, on the same checkpoint. The peer of a quantised checkpoint is the same model in
float32, served by another `medha up`, since `transformers` has no CPU kernels for most formats. Peers take turns.

For 1 and 8 streams of equal prompts, it prints the output tokens per second and their ratio to the peer's. It also
compares the bytes that the rank reports for weights and for a token's KV with the arithmetic of `medha plan`. With --json,
each model is saved when it ends, and the same command on the same commit goes on from there after a stop.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from harness import Row, claim, exit_with, in_turn, parser, progress, ratio, report, revision, save, table
from serve_engines import MODEL, Engine, generate_engine, http_engine, random_prompts
from served import SETTLE_SECONDS, medha_up, served, write_manifest

from medha.wire.frames import decode
from medha.wire.messages import RankReady
from medha_sim.plan import read_shape
from medha_worker.checkpoints.presets import init_checkpoint

FULL = "none"
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
FORMATS = (
    "w8a8", "w4a16", "w4a16-asym", "fp8", "fp8-tensor", "fp8-block", "awq", "gptq", "gptq-desc-act",
)  # fmt: skip
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Model:
    """A family of models, and the format of its weights."""

    family: str
    format: str = FULL

    @property
    def name(self) -> str:
        return self.family if self.format == FULL else f"{self.family}:{self.format}"

    def make(self, folder: Path) -> Path:
        """Make the checkpoint; return its folder."""
        target = folder / self.name.replace(":", "-")
        if not target.exists():
            init_checkpoint(
                target, preset="small", seed=0, architecture=self.family, quantisation=self.format
            )
        return target


MODELS = (
    *(Model(family) for family in FAMILIES),
    *(Model("llama", one) for one in FORMATS),
    Model("gpt_oss", "mxfp4"),
)
QUICK = (Model("llama", "awq"),)


@dataclass(frozen=True)
class Server:
    url: str
    record: Path

    def ready(self) -> RankReady:
        """Return the rank's report of its memory, which the record begins with."""
        message, _ = decode([self.record.read_bytes().splitlines()[1]])
        assert isinstance(message, RankReady)
        return message


def start(stack: ExitStack, checkpoint: Path) -> Server:
    """Serve the checkpoint with `medha up` until the stack is left."""
    spec = {
        "model": {"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 4096},
        "kvCache": {"size": "256Mi"},
        "threads": len(os.sched_getaffinity(0)),
    }
    manifest = checkpoint.with_suffix(".yaml")
    record = checkpoint.with_suffix(".jsonl")
    url = write_manifest(manifest, "benchmark", spec)
    stack.enter_context(served(medha_up(manifest, "--record", str(record)), url))
    return Server(url, record)


def memory(checkpoint: Path, ready: RankReady) -> Row:
    """Return the bytes of weights and of a token's KV: those of the rank, and those of the arithmetic."""
    shape = read_shape(checkpoint)
    return {
        "weights_bytes": ready.weights_bytes,
        "planned_weights_bytes": shape.weights_bytes,
        "kv_bytes_per_token": ready.kv_bytes / (ready.kv_blocks * ready.block_size_tokens),
        "planned_kv_bytes_per_token": shape.kv_bytes_per_token,
        "has_windows": shape.window_share > 0,
    }


def measure(model: Model, folder: Path, streams: tuple[int, ...], tokens: int, rounds: int) -> list[Row]:
    """Return a row for each number of streams."""
    progress(model.name)
    checkpoint = model.make(folder)
    with ExitStack() as stack:
        server = start(stack, checkpoint)
        engines: dict[str, Engine] = {"medha": http_engine("medha", server.url)}
        if model.format == FULL:
            engines["peer"] = generate_engine(checkpoint)
        else:
            dense = start(stack, Model(model.family).make(folder))
            engines["peer"] = http_engine("peer", dense.url)
        for engine in engines.values():
            engine(random_prompts(1, 64, 0), 4)  # warm-up
        rows = []
        for count in streams:

            def once(name: str, seeds: itertools.count[int], count: int = count) -> float:
                time.sleep(SETTLE_SECONDS)
                prompts = random_prompts(count, PROMPT_TOKENS, next(seeds))
                return engines[name](prompts, tokens).tokens_per_second

            found = in_turn(rounds, {name: partial(once, name, itertools.count()) for name in engines})
            rows.append({
                "model": model.name,
                "streams": count,
                "tokens_per_second": sorted(found["medha"])[rounds // 2],
                "peer_tokens_per_second": sorted(found["peer"])[rounds // 2],
                "ratio": ratio(found["medha"], found["peer"]),
                **memory(checkpoint, server.ready()),
            })  # fmt: skip
    return rows


def claims(rows: list[Row]) -> list[Row]:
    found = []
    for one in rows:
        peer = "Medha in float32" if ":" in one["model"] else "transformers generate"
        name = f"{one['model']}: tokens/s at {one['streams']} streams, ratio"
        found.append(claim(name, one["ratio"], "ratio", 1.0, "more", peer))
        if one["streams"] == rows[0]["streams"]:
            # Layers with windows have fewer blocks than others, so that a token of such a model has no fixed bytes.
            compared = ("weights_bytes",) if one["has_windows"] else ("weights_bytes", "kv_bytes_per_token")
            for what in compared:
                value = 100 * abs(one[what] / one[f"planned_{what}"] - 1)
                name = f"{one['model']}: {what.replace('_', ' ')}, distance from the plan's"
                found.append(claim(name, value, "%", 1.0, "less", f"medha plan: {one[f'planned_{what}']:,}"))
    return found


def measured_before(target: Path | None, settings: Row) -> list[Row]:
    """Return the rows of a run with these settings that was stopped; nothing if the file is of another run, or whole."""
    if target is None or not target.exists():
        return []
    found = json.loads(target.read_text(encoding="utf-8"))
    goes_on = not found.get("is_whole", True) and found["settings"] == settings
    return list(found["rows"]) if goes_on and found["revision"] == revision() else []


def main() -> int:
    options = parser(__doc__, quick="one model, 8 streams of 8 tokens, one round", rounds=3)
    text = "this family, or family:format, alone; may be repeated"
    names = {model.name: model for model in MODELS}
    options.add_argument("--only", action="append", choices=names, default=[], metavar="MODEL", help=text)
    options.add_argument("--output-tokens", type=int, default=64, metavar="N", help="(default 64)")
    arguments = options.parse_args()
    models = [names[name] for name in arguments.only] or (QUICK if arguments.quick else MODELS)
    streams, tokens, rounds = (1, 8), arguments.output_tokens, arguments.rounds
    if arguments.quick:
        streams, tokens, rounds = (8,), 8, 1
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    settings: Row = {"streams": list(streams), "output_tokens": tokens, "rounds": rounds}
    figures: Row = {"torch": torch.__version__, "settings": settings}
    rows = measured_before(arguments.json, settings)
    with tempfile.TemporaryDirectory(prefix="serve-models-") as name:
        for model in models:
            if not any(row["model"] == model.name for row in rows):
                rows += measure(model, Path(name), streams, tokens, rounds)
                save(claims(rows), arguments.json, {**figures, "rows": rows, "is_whole": False})
    columns = (
        "model",
        "streams",
        "tokens_per_second",
        "peer_tokens_per_second",
        "ratio",
        "weights_bytes",
        "kv_bytes_per_token",
    )
    table(columns, [[one[column] for column in columns] for one in rows])
    return report(claims(rows), arguments.json, {**figures, "rows": rows, "is_whole": True})


if __name__ == "__main__":
    exit_with(main)
