"""What stands between two steps on a rank, and what a step message weighs, at short and long contexts.

    python benchmarks/step.py [--quick] [--json FILE]

`medha up` serves the `tiny` preset on one rank and on two tensor ranks; one request after the other, of 1K, 32K and 256K
tokens in turns, is prefilled and decoded. Everything is real but the prefill, whose layers are left out: the KV pool holds random
numbers from the beginning. Measured on every rank, of steps that decode one token: the time from the end of a step to the
start of the next (answer, decision, message, and all bookkeeping in between), the part of a step that is not the model's
layers, and the bytes of the step's message. None of them may grow with the context.

A step over a long context leaves the processor's caches full of keys and values, and lets every other process sleep for
longer; whatever comes next then starts cold, were it the same instructions. So there is a peer: 1K of context, whose steps
read as many bytes as those at 256K do, and throw them away.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from rich.console import Console

from medha.messages import Step
from medha.wire import encode
from medha_cli.display import TerminalDisplay
from medha_cli.manifest import model_directory, read_manifest
from medha_cli.up import RunFiles, write_parts
from medha_worker import rank as rank_module
from medha_worker.checkpoint import init_checkpoint
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.transformer import Transformer
from medha_worker.process import free_port
from medha_worker.supervision.supervisor import Part, supervise

COLD = 1_500  # a prompt of this length has steps that read LONGEST tokens of the pool for nothing
CONTEXTS = (1_000, COLD, 32_000, 256_000)
LONGEST = 262_144
DECODED = 200
ROUNDS = 3  # over all contexts, because a shared machine changes its speed by the minute
FIRST = 20  # decode steps that are not counted
PEER = "1K whose steps read as many bytes"
PREFILL_ROWS = 64  # a step of more rows is prefill


def rank(settings: str, times_file: Path) -> None:
    """A rank whose prefills compute nothing, and which writes down when its steps began and ended."""
    steps: list[tuple[Step, float, float, float]] = []
    layers_seconds = 0.0
    serving = cold = False
    pools: list[torch.Tensor] = []
    run_step, forward, new_kv_cache = (
        rank_module.Rank._run_step,
        Transformer.forward,
        Transformer.new_kv_cache,
    )

    def timed_step(self: rank_module.Rank, engine: Any, step: Step) -> None:
        nonlocal layers_seconds, serving, cold
        serving, layers_seconds = True, 0.0
        cold = bool(step.entries) and COLD <= step.entries[0].extents[0].start <= COLD + DECODED
        started = time.perf_counter()
        run_step(self, engine, step)
        steps.append((step, started, time.perf_counter(), layers_seconds))

    def no_prefill(self: Transformer, batch: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal layers_seconds
        if serving and batch.shape[0] > PREFILL_ROWS:
            return torch.zeros(batch.shape[0], self.config.hidden_size, dtype=self.dtype)
        started = time.perf_counter()
        hidden = forward(self, batch, *arguments)
        if cold:
            for pool in pools:
                pool[:, :LONGEST].sum()
        layers_seconds += time.perf_counter() - started
        return hidden

    def random_cache(self: Transformer, num_blocks: int, block_tokens: int) -> KVCache:
        cache = new_kv_cache(self, num_blocks, block_tokens)
        for pool in (*cache.keys, *cache.values):
            pool.normal_()
            pools.append(pool)
        return cache

    rank_module.Rank._run_step = timed_step  # type: ignore[method-assign]
    Transformer.forward = no_prefill  # type: ignore[assignment, method-assign]
    Transformer.new_kv_cache = random_cache  # type: ignore[method-assign]
    try:
        rank_module.main(["--settings", settings])
    finally:
        rows = [
            {
                "id": step.step_id,
                "context": step.entries[0].extents[0].start,
                "bytes": len(encode(step)[0]),
                "start": started,
                "end": ended,
                "layers": layers,
            }
            for step, started, ended, layers in steps
            if len(step.entries) == 1 and step.entries[0].token_count == 1
        ]
        times_file.write_text(json.dumps(rows))


def serve(folder: Path) -> int:
    """`medha up` with such ranks."""
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
    state = supervise(
        (*groups[:-1], ranks),
        is_ready=files.is_ready,
        display=TerminalDisplay(Console(width=200), "step", lambda _: []),
        ready_seconds=120,
        drain_seconds=5,
    )
    return state.exit_status


def measure(tensor: int, decoded: int, rounds: int) -> list[list[dict[str, Any]]]:
    """What each rank has written down."""
    with tempfile.TemporaryDirectory(prefix="step-") as name:
        folder, port = Path(name), free_port("127.0.0.1")
        init_checkpoint(folder / "model", preset="tiny", seed=0)
        config = json.loads((folder / "model" / "config.json").read_text())
        config["max_position_embeddings"] = LONGEST
        (folder / "model" / "config.json").write_text(json.dumps(config))
        spec = {
            "model": {"name": "m", "source": {"path": str(folder / "model")}, "maxModelLen": LONGEST},
            "router": {"port": port},
            "threads": 1,
            "parallelism": {"tensor": tensor},
            "kvCache": {"size": "1Gi"},
        }
        kind = {"apiVersion": "medha.dev/v1alpha1", "kind": "MedhaReplica", "metadata": {"name": "step"}}
        (folder / "manifest.yaml").write_text(yaml.safe_dump({**kind, "spec": spec}))
        with (folder / "log").open("w") as log:
            command = [sys.executable, __file__, "--serve", str(folder)]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _ask(f"http://127.0.0.1:{port}", process, decoded, rounds)
        except BaseException:
            print((folder / "log").read_text()[-4000:])
            process.kill()
            raise
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        return [json.loads((folder / f"times-{number}.json").read_text()) for number in range(tensor)]


def _ask(url: str, process: subprocess.Popen[bytes], decoded: int, rounds: int) -> None:
    while process.poll() is None:
        try:
            if httpx.get(url + "/ready").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    for seed, context in enumerate(CONTEXTS * rounds):
        ids = [7 + (seed + position) % 97 for position in range(context)]
        body = {"model": "m", "prompt": ids, "max_tokens": decoded, "ignore_eos": True, "temperature": 0}
        httpx.post(url + "/v1/completions", json=body, timeout=300).raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one rank, fewer tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.rank[0], Path(arguments.rank[1]))
        return
    if arguments.serve:
        sys.exit(serve(arguments.serve))
    claims: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []

    def claim(name: str, value: float, unit: str, goal: float, peer: str = "") -> None:
        claims.append(
            {
                "name": name,
                "value": round(value, 3),
                "unit": unit,
                "goal": goal,
                "better": "less",
                "peer": peer,
            }
        )

    for tensor in (1,) if arguments.quick else (1, 2):
        ranks = measure(tensor, *((DECODED // 2, 1) if arguments.quick else (DECODED, ROUNDS)))
        found: dict[str, list[float]] = {}
        for context in CONTEXTS:
            gaps, own, sizes = [], [], []
            for steps in ranks:
                here = [one for one in steps if context + FIRST <= one["context"] <= context + DECODED]
                pairs = itertools.pairwise(here)
                gaps += [
                    after["start"] - before["end"]
                    for before, after in pairs
                    if after["id"] == before["id"] + 1
                ]
                own += [one["end"] - one["start"] - one["layers"] for one in here]
                sizes += [one["bytes"] for one in here]
            figures = (1e6 * statistics.median(gaps), 1e6 * statistics.median(own), statistics.mean(sizes))
            for name, figure in zip(
                ("between steps", "step without layers", "message"), figures, strict=True
            ):
                found.setdefault(name, []).append(figure)
            fields = ("between_steps_us", "step_without_layers_us", "message_bytes")
            rows.append(
                {"ranks": tensor, "context_tokens": context}
                | dict(zip(fields, map(round, figures), strict=True))
            )
            print(
                f"{tensor} ranks, context {context:>7}: {figures[0]:7.0f} us between steps, {figures[1]:6.0f} us of a "
                f"step beside its layers, {figures[2]:5.0f} bytes of message"
            )
        for name, values in found.items():
            unit = "bytes" if name == "message" else "us"
            claim(f"{name}, {tensor} ranks, at 256K", values[-1], unit, 1000 if unit == "bytes" else 2000)
            cold = values[CONTEXTS.index(COLD)]
            claim(f"{name}, {tensor} ranks, 256K over 1K", values[-1] / cold, "x", 1.25, PEER)
    if arguments.json:
        arguments.json.write_text(json.dumps({"claims": claims, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
