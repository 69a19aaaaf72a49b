"""Measure how well a live replica predicts its steps while other programs use the machine.

    chrt -o 0 python benchmarks/step_predictions.py --json benchmarks/results/step_predictions.json
    python benchmarks/step_predictions.py --quick

A replica of one rank, and one of two stages with two ranks each, serve random requests while none, one and two busy
loops run beside them. The controller's record then gives the time of each step, and its prediction before any
correction. Two corrections are applied to the same steps, in the order in which they ran: Medha's
(`medha.cost.correction`), and, as the peer of all claims, one factor for all steps that each step moves by 5 % of the
difference, within 0.25 and 4. An error is |predicted / observed - 1|.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
from harness import Row, claim, exit_with, parser, progress, report, table
from served import medha_up, served, write_manifest

from medha.cost.correction import Correction, PartedSeconds
from medha.scheduler.controller import ReplicaController
from medha.wire.messages import Done, Step
from medha_sim.record_replay import read_record
from medha_worker.checkpoints.presets import init_checkpoint

MODEL = "small"
GRIDS = ((1, 1), (2, 2))  # tensor, stream
CLIENTS = 3
PAUSE_SECONDS = 0.3  # mean, between a client's requests
PROMPT_TOKENS = (32, 4096)  # log-uniform
OUTPUT_TOKENS = (8, 64)  # log-uniform
WITHOUT_DECODES = 0.3  # share of the requests that want a single token
KINDS = ("decode", "prefill", "mixed")


@dataclass(frozen=True)
class Measured:
    """The errors of a correction on the steps of one kind in a recorded run."""

    ranks: int
    busy_loops: int
    correction: str
    kind: str
    steps: int
    median_error: float
    p95_error: float
    median_ratio: float  # observed / predicted


class Corrector(Protocol):
    """A correction under test."""

    def predicted(self, step: PartedSeconds) -> float: ...

    def observe(self, step: PartedSeconds, predicted: float, observed: float) -> None: ...


class OneFactor:
    """The peer: one factor for all steps."""

    def __init__(self) -> None:
        self._factor = 1.0

    def predicted(self, step: PartedSeconds) -> float:
        return self._factor * step.whole

    def observe(self, step: PartedSeconds, predicted: float, observed: float) -> None:  # noqa: ARG002
        wanted = self._factor * observed / predicted
        self._factor += 0.05 * (min(4.0, max(0.25, wanted)) - self._factor)


class ByKind:
    """Medha's correction."""

    def __init__(self) -> None:
        self._correction = Correction()

    def predicted(self, step: PartedSeconds) -> float:
        return self._correction.seconds(step)

    def observe(self, step: PartedSeconds, predicted: float, observed: float) -> None:  # noqa: ARG002
        self._correction = self._correction.after(step, observed)


# --- the recorded run --------------------------------------------------------------------------------


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run endless loops beside the block, with the priority of this process."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def client(http: httpx.AsyncClient, rng: np.random.Generator, until: float) -> None:
    """Send random requests, one after the other, until a time of the monotonic clock."""

    def between(bounds: tuple[int, int]) -> int:
        return int(np.exp(rng.uniform(*np.log(bounds))))

    while time.monotonic() < until:
        await asyncio.sleep(rng.exponential(PAUSE_SECONDS))
        prompt = rng.integers(300, 4000, between(PROMPT_TOKENS)).tolist()
        tokens = 1 if rng.random() < WITHOUT_DECODES else between(OUTPUT_TOKENS)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        (await http.post("/v1/completions", json=body)).raise_for_status()


async def drive(url: str, seconds: float, seed: int) -> None:
    """Send the requests of all clients for a while."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        until = time.monotonic() + seconds
        rngs = [np.random.default_rng((seed, index)) for index in range(CLIENTS)]
        await asyncio.gather(*(client(http, rng, until) for rng in rngs))


def record(
    folder: Path, grid: tuple[int, int], loops: int, seconds: float, seed: int
) -> list[tuple[int, PartedSeconds | float]]:
    """Serve and record; return what happened, in order: launches with predictions, and ends with times."""
    tensor, stream = grid
    spec: dict[str, Any] = {
        "model": {"name": MODEL, "source": {"path": str(folder / MODEL)}, "maxModelLen": 8192},
        "kvCache": {"size": "512Mi"},
        "threads": 1,
        "parallelism": {"tensor": tensor, "stream": stream, "kv": 1},
    }
    log, manifest = folder / "events.jsonl", folder / "replica.yaml"
    log.unlink(missing_ok=True)
    url = write_manifest(manifest, "predictions", spec)
    with served(medha_up(manifest, "--record", str(log)), url), busy_loops(loops):
        asyncio.run(drive(url, seconds, seed))
    return happened(log)


def happened(log: Path) -> list[tuple[int, PartedSeconds | float]]:
    """Return the steps of a record: (id, uncorrected prediction) at a launch, (id, seconds) at an end."""
    recorded = read_record(log)
    controller = ReplicaController(recorded.config(), recorded.profile)
    found: list[tuple[int, PartedSeconds | float]] = []
    for line in recorded.events:
        if isinstance(line.event, Done):
            found.append((line.event.step_id, line.event.compute_seconds))
        found += [
            (command.step_id, controller.packed(command).uncorrected)
            for command in controller.handle(line.event, line.now)
            if isinstance(command, Step) and command.entries
        ]
    return found


# --- the errors --------------------------------------------------------------------------------------


def kind(step: PartedSeconds) -> str:
    """Return whether a step has decodes, prefills or both."""
    if step.decodes == 0:
        return "prefill"
    return "mixed" if step.whole - step.decodes > 1e-9 * step.whole else "decode"


def predictions(
    events: Sequence[tuple[int, PartedSeconds | float]], corrector: Corrector
) -> list[tuple[str, float, float]]:
    """Return (kind, predicted, observed seconds) of each step, as `corrector` predicts it when it is launched."""
    open_steps: dict[int, tuple[PartedSeconds, float]] = {}
    found = []
    for step_id, what in events:
        if isinstance(what, PartedSeconds):
            open_steps[step_id] = (what, corrector.predicted(what))
        elif step_id in open_steps and what > 0:
            step, predicted = open_steps.pop(step_id)
            found.append((kind(step), predicted, what))
            corrector.observe(step, predicted, what)
    return found


def errors(steps: Sequence[tuple[str, float, float]], wanted: str) -> tuple[int, float, float, float]:
    """Return the number of steps of a kind (or `all`), the median and p95 error, and the median of observed / predicted."""
    pairs = [(predicted, observed) for one, predicted, observed in steps if wanted in ("all", one)]
    if not pairs:
        return 0, 0.0, 0.0, 1.0
    predicted, observed = np.array(pairs).T
    error = np.abs(predicted / observed - 1)
    ratio = float(np.median(observed / predicted))
    return len(pairs), float(np.median(error)), float(np.quantile(error, 0.95)), ratio


def main() -> int:
    options = parser(__doc__, quick="one rank, no busy loop, 10 seconds", seed=True)
    text = "how long each of the six runs is (default 60)"
    options.add_argument("--seconds", type=float, default=60.0, metavar="N", help=text)
    arguments = options.parse_args()
    grids, loops, seconds = GRIDS, (0, 1, 2), arguments.seconds
    if arguments.quick:
        grids, loops, seconds = GRIDS[:1], (0,), 10.0
    results: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="medha-predictions-") as name:
        folder = Path(name)
        init_checkpoint(folder / MODEL, preset=MODEL, seed=arguments.seed)
        for grid in grids:
            for count in loops:
                ranks = grid[0] * grid[1]
                progress(f"{ranks} ranks, {count} busy loops")
                events = record(folder, grid, count, seconds, arguments.seed)
                for label, corrector in (("one factor", OneFactor()), ("by kind", ByKind())):
                    steps = predictions(events, corrector)
                    results += [
                        Measured(ranks, count, label, one, *errors(steps, one)) for one in ("all", *KINDS)
                    ]
    columns = list(asdict(results[0]))
    table(columns, [list(asdict(result).values()) for result in results])
    claims: list[Row] = []
    for ranks in dict.fromkeys(result.ranks for result in results):
        for field in ("median_error", "p95_error"):
            ours, peers = (
                [
                    getattr(one, field)
                    for one in results
                    if (one.ranks, one.correction, one.kind) == (ranks, label, "all")
                ]
                for label in ("by kind", "one factor")
            )
            value = statistics.mean(a / b for a, b in zip(ours, peers, strict=True))
            what = field.replace("_", " ")
            claims.append(claim(f"{what} of {ranks} ranks, ratio", value, "ratio", 1.0, peer="one factor"))
    return report(claims, arguments.json, {"results": [asdict(result) for result in results]})


if __name__ == "__main__":
    exit_with(main)
