"""Measure the cost of the KV ledger, prefix caching and the router's choice, in CPU time of one thread.

    python benchmarks/kv.py --quick
    python benchmarks/kv.py --json benchmarks/results/kv.json

Requests of 4,096 prompt tokens (16 to a block) are admitted, inserted to the prefix cache in eight chunks, and
released in random order. There are three cases: no prefix caching, room for all that is cached, and a pool in which
every admission has to evict. Then one prompt of a million tokens is measured, first cold and then cached, with its
hashes; and 10,000 sequences that wait in a router for 16 replicas.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from harness import LOOPS, Loop, Row, claim, exit_with, parser, progress, report, table

from medha.kv.pools import KvPools
from medha.kv.prefix_cache import PrefixHasher
from medha.routing.prefix_memory import MARK_BLOCK_TOKENS, marks
from medha.routing.router_core import RouterCore
from medha.routing.router_events import Arrive, BundleKnown, NewSequence, Received, Send
from medha.routing.routing_limits import RoutingLimits
from medha.wire.messages import Announce, Sampling, ServiceClassTerms

BLOCK_TOKENS = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 4096, 256
REQUESTS, RUNNING = 4000, 100
MILLION = 1_000_000

Figures = dict[str, float]


class Stopwatch:
    """Adds up CPU seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, call: Callable[[], object]) -> object:
        started = time.process_time()
        result = call()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - started
        return result


def pools_of(blocks: int, *, prefix_caching: bool = True) -> KvPools:
    return KvPools(
        lanes=1,
        kv_blocks=blocks,
        block_size_tokens=BLOCK_TOKENS,
        tokens_per_lane=2 * MILLION,
        prefix_caching=prefix_caching,
    )


def ledger(pools: KvPools, hashes: list[str]) -> Figures:
    """Return the microseconds of each operation per request of 4,096 prompt tokens."""
    random = np.random.default_rng(0)
    watch, running = Stopwatch(), list[str]()
    reserved = PROMPT_TOKENS + OUTPUT_TOKENS
    for index, one in enumerate(hashes):
        name = f"r{index}"
        placed = watch.time(
            "admit", lambda n=name, h=one: pools.admit(n, PROMPT_TOKENS, reserved, block_hashes=h)
        )
        assert placed is not None
        for done in range(512, PROMPT_TOKENS + 1, 512):
            watch.time("insert", lambda n=name, d=done: pools.computed(n, d))
        running.append(name)
        if len(running) > RUNNING:
            gone = running.pop(int(random.integers(len(running))))
            watch.time("release", lambda n=gone: pools.release(n))
        pools.take_inserts()
        pools.take_releases()
    return {name: 1e6 * seconds / len(hashes) for name, seconds in watch.seconds.items()}


def million(hasher: PrefixHasher) -> Figures:
    """Return the milliseconds of each operation for one prompt of a million tokens, in chunks of 2,048."""
    watch, pools = Stopwatch(), pools_of(140_000)
    ids = np.random.default_rng(0).integers(0, 128_000, MILLION).astype(np.int32)
    hasher.hashes(ids)  # draws the keys
    hashes = str(watch.time("hash", lambda: hasher.hashes(ids)))
    for kind in ("cold", "cached"):
        watch.time(
            f"admit {kind}", lambda k=kind: pools.admit(k, MILLION, MILLION + 4096, block_hashes=hashes)
        )
        for done in range(2048, MILLION + 2048, 2048):
            watch.time(f"insert {kind}", lambda k=kind, d=done: pools.computed(k, min(d, MILLION)))
        watch.time(f"release {kind}", lambda k=kind: pools.release(k))
        pools.take_inserts()
        pools.take_releases()
    return {name: 1e3 * seconds for name, seconds in watch.seconds.items()}


def routing(waiting: int, replicas: int) -> Figures:
    """Return the microseconds per sequence: to arrive while all replicas are full, and to be forwarded."""
    terms = (ServiceClassTerms("default", 2.0, 3.0, 0.05, 0.01, 4096),)
    points = ((1024, 0.05), (16_384, 1.0), (262_144, 40.0), (1_048_576, 400.0))
    card = Announce(
        "", "m", "d", 1, True, False, 2**20, 128_000, 2**22, 2**22, 0, 64, 0.0, 2**20, 64, terms, points
    )
    hasher = PrefixHasher(MARK_BLOCK_TOKENS, b"k")
    prefix = marks(hasher.hashes(np.arange(PROMPT_TOKENS, dtype=np.int32)))
    core = RouterCore(RoutingLimits(max_waiting=2 * waiting))
    core.handle(BundleKnown("d"), 0.0)
    for index in range(replicas):
        core.handle(Received(f"r{index}", replace(card, replica=f"r{index}")), 0.0)
    watch = Stopwatch()
    for index in range(waiting):
        new = NewSequence(f"s{index}", f"p{index}", PROMPT_TOKENS, 7, Sampling(max_tokens=50), prefix=prefix)
        watch.time("arrive", lambda n=new: core.handle(Arrive("m", "d", (n,)), 0.0))
    forwarded = 0
    while core.waiting:
        for index in range(replicas):
            room = replace(card, replica=f"r{index}", waiting=54)
            commands = watch.time("forward", lambda r=room: core.handle(Received(r.replica, r), 1.0))
            assert isinstance(commands, list)
            forwarded += sum(isinstance(command, Send) for command in commands)
    assert forwarded == waiting
    return {name: 1e6 * seconds / waiting for name, seconds in watch.seconds.items()}


def main() -> int:
    arguments = parser(__doc__, quick="a tenth of the requests").parse_args()
    hasher = PrefixHasher(BLOCK_TOKENS, b"secret")
    random = np.random.default_rng(1)
    hashes = [
        hasher.hashes(random.integers(0, 128_000, PROMPT_TOKENS).astype(np.int32))
        for _ in range(REQUESTS // 10 if arguments.quick else REQUESTS)
    ]
    measured: dict[str, Callable[[], Figures]] = {
        "4K, no prefix caching (us)": lambda: ledger(pools_of(70_000, prefix_caching=False), hashes),
        "4K, room for everything (us)": lambda: ledger(pools_of(1_200_000), hashes),
        "4K, each admission evicts (us)": lambda: ledger(pools_of(70_000), hashes),
        "1M (ms)": lambda: million(hasher),
        "router, 1,000 wait (us)": lambda: routing(1_000, 16),
        "router, 10,000 wait (us)": lambda: routing(10_000, 16),
    }
    loop, figures = Loop(), dict[str, Figures]()
    for title, measure in measured.items():
        progress(title)
        loop.sample()
        figures[title] = {name: round(value, 2) for name, value in measure().items()}
    table(("", "", "time"), ((title, *one) for title, row in figures.items() for one in row.items()))
    return report(claims(figures, loop), arguments.json, figures)


def claims(figures: dict[str, Figures], loop: Loop) -> list[Row]:
    """Return claims on the cost of a request, and on how the router's choice grows with its queue.

    A step has about a millisecond for all of its requests.
    """
    evicting = loop.ratio(1e-6 * sum(figures["4K, each admission evicts (us)"].values()))
    cold = loop.ratio(1e-3 * figures["1M (ms)"]["admit cold"])
    few, many = (figures[f"router, {waiting} wait (us)"]["forward"] for waiting in ("1,000", "10,000"))
    return [
        claim("a request of 4K tokens, each admission evicts", evicting, LOOPS, 0.5, peer=loop.peer()),
        claim("admission of 1M tokens, nothing cached", cold, LOOPS, 1.0, peer=loop.peer()),
        claim("a router's choice, 10,000 waiting over 1,000", many / few, "ratio", 1.5),
    ]


if __name__ == "__main__":
    exit_with(main)
