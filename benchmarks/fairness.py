"""Measure how far one API key with 100 times the load of another moves the share of that other's requests that are on time.

    python benchmarks/fairness.py --quick
    python benchmarks/fairness.py --json benchmarks/results/fairness.json
    python benchmarks/fairness.py --skip served --policy edf

A request is on time if its first token comes within the TTFT target of its class. The requests of the small key are
sent alone, and then the same ones at the same times beside those of a large key, which sends 100 times the tokens.

* `simulated`  Router and replicas of the simulator: two A100 with Llama-3 8B, prompts and outputs as in ShareGPT.
               The replicas can serve both keys (`fits`), or half of what they send (`overload`), or they have KV for
               half of it (`kv`). Seeds are paired, and all requests of a scenario are counted together.
* `equal`      The price: the requests of `overload` by ten keys of the same load, and the same requests by one key.
* `served`     `medha up` with the `small` checkpoint on this machine, over HTTP with two keys. The small key sends one
               prompt of 200 tokens a second, and the large one ten of 2,000 tokens, which is more than two cores prefill.

A request over HTTP counts from the time when it was sent. How late the client sent it is shown: on a busy machine the
client waits, too. A request waits for two steps at most (the one in flight, and its own), each predicted to take up
to `maxStepSeconds`, 0.5. So it can be late where steps take about twice as long as predicted, however fair the turns.

The claims are that the small key loses 2 points at most in each, and so do ten equal keys.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import yaml
from harness import Row, claim, exit_with, in_turn, parser, progress, report, table
from served import medha_up, served, write_manifest

from medha.api.api_keys import hash_of
from medha.scheduler.policy import POLICIES
from medha.topology import Topology
from medha_sim.lengths import SHAREGPT
from medha_sim.run_summary import ttft_met
from medha_sim.scenario import Deployment
from medha_sim.simulation import Workload
from medha_sim.workloads import Mix, Part, generate
from medha_worker.checkpoints.presets import init_checkpoint

TIMES = 100  # load of the large key, as a multiple of the small one's
MOST_POINTS = 2.0
SMALL, LARGE = "small", "large"
DRAIN_SECONDS = 30.0  # after the last arrival, so that each request has met its target or missed it
MIX = Mix((Part("short", SHAREGPT, 1.0),))
TTFT_SECONDS = 2.0  # the floor of the default class, far above three times these prompts' prefill
SMALL_PROMPT_TOKENS, LARGE_PROMPT_TOKENS = 200, 2000
SMALL_PER_SECOND, LARGE_PER_SECOND = 1.0, 10.0
OUTPUT_TOKENS = 8


@dataclass(frozen=True)
class Scenario:
    """Arrivals of the small key a second, for so many seconds, with so many seeds."""

    name: str
    per_second: float
    seconds: float
    seeds: int
    kv_bytes: int | None = None  # of KV of each replica; None: what the weights leave

    def deployment(self, policy: str) -> Deployment:
        found = Deployment(topology=Topology(tensor=1), replicas=2, kv_bytes=self.kv_bytes)
        return found.with_policy(policy)


LITTLE_KV_BYTES = 2 * 2**30  # 16,384 tokens
SCENARIOS = (
    Scenario("fits", 0.06, 60.0, 40),
    Scenario("overload", 0.4, 40.0, 12),
    Scenario("kv", 0.2, 40.0, 12, LITTLE_KV_BYTES),
)
QUICK = (
    Scenario("fits", 0.06, 60.0, 1),
    Scenario("overload", 0.4, 12.0, 1),
    Scenario("kv", 0.2, 25.0, 1, LITTLE_KV_BYTES),
)
EQUAL_KEYS = 10


@dataclass(frozen=True)
class OnTime:
    """Requests of the small key alone and beside the large one, those of the large one, and how many were on time."""

    scenario: str
    alone: tuple[int, int]  # on time, of so many
    beside: tuple[int, int]
    large: tuple[int, int]

    @property
    def lost_points(self) -> float:
        return percent(self.alone) - percent(self.beside)


def percent(counts: tuple[int, int]) -> float:
    met, of = counts
    return 100 * met / of if of else 0.0


def counted(outcomes: Iterable[bool]) -> tuple[int, int]:
    found = list(outcomes)
    return sum(found), len(found)


def together(results: Sequence[OnTime]) -> OnTime:
    """Return the requests of all results of one scenario."""

    def total(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
        met, of = zip(*pairs, strict=True)
        return sum(met), sum(of)

    return OnTime(
        results[0].scenario,
        total(one.alone for one in results),
        total(one.beside for one in results),
        total(one.large for one in results),
    )


def workloads(scenario: Scenario, deployment: Deployment, seed: int) -> tuple[Workload, Workload]:
    """Return the arrivals of the small key, and the same ones among those of the large key."""

    def arrivals(owner: str, rate: float, seed: int) -> list[Any]:
        made = generate(
            MIX, deployment.targets(), rate=rate, duration_seconds=scenario.seconds, seed=seed
        ).arrivals
        return [replace(one, id=f"{owner}-{one.id}", owner=f"key:{owner}") for one in made]

    small = arrivals(SMALL, scenario.per_second, 2 * seed)
    large = arrivals(LARGE, TIMES * scenario.per_second, 2 * seed + 1)
    return Workload(small), Workload(sorted(small + large, key=lambda one: one.at_seconds))


def simulate(scenario: Scenario, policy: str, seed: int) -> OnTime:
    deployment = scenario.deployment(policy)
    found: list[dict[str, tuple[int, int]]] = []
    for workload in workloads(scenario, deployment, seed):
        log = deployment.simulation(workload, seed=seed).run(scenario.seconds + DRAIN_SECONDS)
        found.append(
            {
                owner: counted(
                    bool(ttft_met(record, log.window_seconds))
                    for record in log.requests.values()
                    if record.id.startswith(owner)
                )
                for owner in (SMALL, LARGE)
            }
        )
    alone, beside = found
    return OnTime(scenario.name, alone[SMALL], beside[SMALL], beside[LARGE])


def simulate_equal(scenario: Scenario, policy: str, seed: int) -> OnTime:
    """Return how many requests are on time if one key sends all, and if equal keys send them."""
    deployment = scenario.deployment(policy)
    rate = TIMES * scenario.per_second
    made = generate(
        MIX, deployment.targets(), rate=rate, duration_seconds=scenario.seconds, seed=seed
    ).arrivals
    found = []
    for keys in (1, EQUAL_KEYS):
        arrivals = [replace(one, owner=f"key:{index % keys}") for index, one in enumerate(made)]
        log = deployment.simulation(Workload(arrivals), seed=seed).run(scenario.seconds + DRAIN_SECONDS)
        found.append(counted(bool(ttft_met(one, log.window_seconds)) for one in log.requests.values()))
    return OnTime("equal", *found, large=(0, 0))


# --- over HTTP ------------------------------------------------------------------------------------


async def is_on_time(
    http: httpx.AsyncClient, key: str, prompt: list[int], at: float, delays: list[float]
) -> bool:
    """Send a prompt when it is due, and return whether its first token comes in time.

    The seconds by which it was sent too late are appended to `delays`.
    """
    await asyncio.sleep(at - time.monotonic())
    sent_at = time.monotonic()
    delays.append(sent_at - at)
    body = {
        "model": "small", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True, "ignore_eos": True
    }  # fmt: skip
    headers = {"authorization": f"Bearer {key}"}
    try:
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                return False
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    return "error" not in json.loads(line[6:]) and time.monotonic() - sent_at <= TTFT_SECONDS
    except httpx.HTTPError:
        pass
    return False


async def send(url: str, seconds: float, keys: Sequence[str], seed: int) -> dict[str, tuple[int, int]]:
    """Send the arrivals of some keys at random times, and return how many of each were on time."""
    delays: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=4 * TTFT_SECONDS, limits=limits) as http:
        begin = time.monotonic() + 0.5
        tasks: dict[str, list[asyncio.Task[bool]]] = {}
        for key in keys:
            dice = random.Random(f"{key} {seed}")
            rate, tokens = (
                (SMALL_PER_SECOND, SMALL_PROMPT_TOKENS)
                if key == SMALL
                else (LARGE_PER_SECOND, LARGE_PROMPT_TOKENS)
            )
            at, tasks[key] = dice.expovariate(rate), []
            while at < seconds:
                prompt = [dice.randrange(300, 4000) for _ in range(tokens)]
                tasks[key].append(asyncio.create_task(is_on_time(http, key, prompt, begin + at, delays)))
                at += dice.expovariate(rate)
        found = {key: counted(await asyncio.gather(*each)) for key, each in tasks.items()}
    if delays:
        progress(f"    the client sent its requests up to {max(delays):.2f} s late")
    return found


def serve(seconds: float, rounds: int) -> list[OnTime]:
    """Send both keys' requests to `medha up`, in turn with those of the small key alone."""
    with tempfile.TemporaryDirectory(prefix="fairness-") as name:
        folder = Path(name)
        init_checkpoint(folder / "small", preset="small", seed=0)
        spec = {
            "model": {"name": "small", "source": {"path": str(folder / "small")}, "maxModelLen": 8192},
            "kvCache": {"size": "1Gi"},
            "threads": 2,
        }
        url = write_manifest(folder / "fairness.yaml", "fairness", spec)
        keys = [{"name": key, "sha256": hash_of(key)} for key in (SMALL, LARGE)]
        (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
        command = medha_up(folder / "fairness.yaml", "--api-keys", str(folder / "keys.yaml"))
        with served(command, url):
            asyncio.run(send(url, 3.0, [SMALL], seed=-1))  # warms up
            numbers = {keys: count() for keys in (SMALL, f"{SMALL} {LARGE}")}

            def once(keys: str) -> dict[str, tuple[int, int]]:
                return asyncio.run(send(url, seconds, keys.split(), next(numbers[keys])))

            alone, beside = in_turn(rounds, {keys: partial(once, keys) for keys in numbers}).values()
    return [
        OnTime("served", one[SMALL], both[SMALL], both[LARGE])
        for one, both in zip(alone, beside, strict=True)
    ]


def claims(results: Sequence[OnTime]) -> list[Row]:
    found = []
    for one in results:
        if one.scenario == "equal":
            name = f"points that {EQUAL_KEYS} equal keys lose in overload against one key that sends the same"
            peer = f"one key: {percent(one.alone):.1f} % of {one.alone[1]}"
        else:
            name = f"{one.scenario}: points that a key loses beside one with {TIMES} times its load"
            peer = f"alone: {percent(one.alone):.1f} % of {one.alone[1]}; the large key: {percent(one.large):.1f} % of {one.large[1]}"
        found.append(claim(name, one.lost_points, "points", MOST_POINTS, peer=peer))
    return found


def arguments_of() -> argparse.Namespace:
    options = parser(__doc__, quick="one seed, shorter windows, and one round over HTTP", rounds=3)
    options.add_argument(
        "--policy", choices=POLICIES, default="guarded", help="of the simulated replicas (default guarded)"
    )
    options.add_argument("--skip", choices=("simulated", "served"), help="leave this part out")
    return options.parse_args()


def main() -> int:
    arguments = arguments_of()
    results: list[OnTime] = []
    spread: Row = {}
    scenarios = QUICK if arguments.quick else SCENARIOS
    simulated = [(simulate, one.name, one) for one in scenarios]
    simulated += [(simulate_equal, "equal", one) for one in scenarios if one.name == "overload"]
    for run, name, scenario in () if arguments.skip == "simulated" else simulated:
        each = []
        for seed in range(scenario.seeds):
            each.append(run(scenario, arguments.policy, seed))
            progress(f"  {name}, seed {seed}: {each[-1].lost_points:.1f} points")
        results.append(together(each))
        lost = [one.lost_points for one in each]
        spread[name] = {"points": lost, "deviation": statistics.stdev(lost) if len(lost) > 1 else None}
    if arguments.skip != "served":
        results.append(together(serve(*((6.0, 1) if arguments.quick else (60.0, arguments.rounds)))))
    head = ("scenario", "small alone (%)", "small beside (%)", "lost (points)", "large (%)", "small", "large")
    table(
        head,
        [
            (one.scenario, *map(percent, (one.alone, one.beside)), one.lost_points, percent(one.large), one.alone[1], one.large[1])
            for one in results
        ],
    )  # fmt: skip
    figures: Row = {"policy": arguments.policy, "rows": [asdict(one) for one in results], "by_seed": spread}
    return report(claims(results), arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
