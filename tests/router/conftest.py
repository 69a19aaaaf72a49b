"""A real router process, a real tokenizer, and a scripted replica that speaks real ZeroMQ frames."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from forked_part import ROUTER, ForkedPart, has_environment_of_forks
from medha.wire.bundle_digest import bundle_digest
from medha.wire.frames import decode, encode, tokens_from_frame
from medha.wire.messages import (
    Announce,
    BundlePart,
    Cancel,
    Emit,
    Extent,
    FetchBundle,
    KvAsk,
    KvDone,
    KvTicket,
    Message,
    PromptLogprobs,
    Refused,
    ServiceClassTerms,
    Submit,
    TokenLogprob,
    Tokens,
    WatchProgress,
)
from medha_links.key_files import KeyFiles, KeyPair, read_public_key, read_tokens
from medha_links.sockets import Opened, connect
from medha_router.tokenizer_bundle import Bundle

MODEL = "tiny"
MAX_MODEL_LEN = 2048
TEXT = "The quick brown fox jumps over the lazy dog. Café, naïve, 日本語, emoji 🙂🚀! Stop here. "

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|bos|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<|system|>", "<|user|>", "<|assistant|>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def bundle_files() -> dict[str, bytes]:
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE}
    return {
        "tokenizer.json": byte_level_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": 1}).encode(),
    }


@pytest.fixture(scope="session")
def bundle(bundle_files: dict[str, bytes]) -> Bundle:
    return Bundle(bundle_files)


@dataclass
class Script:
    """What the replica answers to the next submissions."""

    tokens: tuple[int, ...] = ()
    finish: str = "length"
    per_message: int = 1
    logprobs: bool = False
    refuse: str | None = None
    hold: bool = False  # emit the tokens and leave the sequence open
    delay_seconds: float = 0.0
    cached_tokens: int = 0  # of the prompt, reported with the first token of each sequence
    is_earlier_release: bool = False  # it knows nothing of log-probabilities of prompts


@dataclass
class ScriptedReplica:
    """A test double of a replica's controller, at the wire: it emits what `script` says."""

    router: Router
    files: dict[str, bytes]
    name: str = "r0"
    script: Script = field(default_factory=Script)
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of its announcements that differ from the usual ones."""
    submits: list[Submit] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    watches: list[WatchProgress] = field(default_factory=list)
    about_kv: list[KvAsk | KvTicket | KvDone] = field(default_factory=list)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    salts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self._orders: list[tuple[str, Any]] = []
        self._stop = threading.Event()
        self.card = Announce(
            replica=self.name,
            model=MODEL,
            digest=bundle_digest(self.files),
            epoch=1,
            ready=True,
            draining=False,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=Tokenizer.from_buffer(self.files["tokenizer.json"]).get_vocab_size(),
            kv_tokens_total=100_000,
            kv_tokens_free=75_000,
            running=1,
            waiting=2,
            pending_prefill_seconds=0.5,
            longest_request_tokens=100_000,
            waiting_limit=1000,
            service_classes=(
                ServiceClassTerms("interactive", 2.0, 3.0, 0.05, 0.02, 4096),
                ServiceClassTerms("batch", 60.0, 3.0, 0.5, 0.1, 4096),
            ),
            follows_grammars=True,
        )
        self.card = replace(self.card, **self.fields)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def order(self, what: str, value: Any = None) -> None:
        """Have the replica's own thread `announce`, `send` a message, send `raw` frames, or `reconnect`."""
        self._orders.append((what, value))

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=20), "the replica never saw it"

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = KeyPair.of_token(read_tokens(self.router.keys.enrolment)[0])
        server = read_public_key(self.router.keys.router_public)

        def dial() -> list[Opened[zmq.Socket[bytes]]]:
            identity = (
                f"{self.name}/{secrets.token_hex(8)}".encode()
            )  # none is used twice, as by a controller
            endpoints = (self.router.control, self.router.tokens)
            return [connect(context, endpoint, identity, keys, server) for endpoint in endpoints]

        links: list[Opened[zmq.Socket[bytes]]] = []
        announced = 0.0
        while not self._stop.is_set():
            if not links:
                links = dial()
                control, tokens = (link.socket for link in links)
                poller = zmq.Poller()
                poller.register(control, zmq.POLLIN)
                poller.register(tokens, zmq.POLLIN)
                announced = 0.0
            while self._orders:
                what, value = self._orders.pop(0)
                if what == "reconnect":
                    for link in links:
                        link.close(0)
                    links = []
                    break
                if what == "raw tokens":
                    tokens.send_multipart(value)
                elif what == "announce":
                    self.card = replace(self.card, **value)
                    announced = 0.0
                else:
                    control.send_multipart(value if what == "raw" else encode(value))
            if not links:
                continue
            if time.monotonic() - announced > 0.5:
                announced = time.monotonic()
                for socket in (control, tokens):
                    socket.send_multipart(encode(self.card))
            ready = dict(poller.poll(5))
            if tokens in ready:
                self._take_tokens(tokens)
            if control in ready:
                self._take(control, tokens)
        for link in links:
            link.close(0)
        context.term()

    def _take_tokens(self, tokens: zmq.Socket[bytes]) -> None:
        while tokens.poll(0):
            message, payload = decode(tokens.recv_multipart())
            assert isinstance(message, Tokens)
            assert payload is not None
            ids = self.prompts.setdefault(message.prompt, [])
            assert len(ids) == message.offset
            self.salts[message.prompt] = message.cache_salt
            ids.extend(tokens_from_frame(payload).tolist())

    def _take(self, control: zmq.Socket[bytes], tokens: zmq.Socket[bytes]) -> None:
        message, _ = decode(control.recv_multipart())
        match message:
            case FetchBundle():
                for left, (name, content) in zip(
                    range(len(self.files) - 1, -1, -1), self.files.items(), strict=True
                ):
                    control.send_multipart(encode(BundlePart(message.digest, name, left), content))
            case Submit():
                deadline = time.monotonic() + 10
                while len(self.prompts.get(message.prompt, ())) < message.tokens:
                    assert time.monotonic() < deadline, "the prompt never came"
                    if tokens.poll(20):
                        self._take_tokens(tokens)
                with self.changed:
                    self.submits.append(message)
                    self.changed.notify_all()
                for answer in self._answers(message):
                    control.send_multipart(encode(answer))
                    if self.script.delay_seconds:
                        time.sleep(self.script.delay_seconds)
            case KvAsk() | KvTicket() | KvDone():
                with self.changed:
                    self.about_kv.append(message)
                    self.changed.notify_all()
            case WatchProgress():
                self.watches.append(message)
            case Cancel():
                with self.changed:
                    self.cancels.append(message.id)
                    self.changed.notify_all()

    def _answers(self, submit: Submit) -> Iterator[Message]:
        script = self.script
        if script.refuse is not None:
            yield Refused(submit.id, script.refuse, "as the script says")  # type: ignore[arg-type]
            return
        left = script.tokens[submit.tokens - submit.prompt_length :]
        for start in range(0, len(left), script.per_message):
            part = left[start : start + script.per_message]
            last = start + len(part) == len(left) and not script.hold
            top = ((7, -0.5), (8, -1.5), (9, float("-inf")))
            logprobs = tuple(TokenLogprob(-0.25, top) for _ in part) if script.logprobs else ()
            cached_tokens = script.cached_tokens if start == 0 else 0
            finish: Any = script.finish if last else None
            scored = self._scored(submit) if start == 0 and not script.is_earlier_release else None
            yield Emit(submit.id, part, finish, logprobs, cached_tokens, scored)

    @staticmethod
    def _scored(submit: Submit) -> PromptLogprobs | None:
        """Log-probabilities of the prompt's tokens: -1, -2, ..., each as the third; the two before it are tokens 7 and 8."""
        asked, count = submit.sampling.prompt_logprobs, submit.prompt_length - 1
        if asked is None:
            return None
        places = range(1, count + 1)
        return PromptLogprobs(
            (Extent(1, count),),
            tuple(-float(place) for place in places),
            (3,) * count,
            tuple(token for _ in places for token in (7, 8, 9)[:asked]),
            tuple(-0.25 * (rank + 1) for _ in places for rank in range(asked)),
        )


@dataclass
class Router:
    """A running router process."""

    process: subprocess.Popen[bytes] | ForkedPart
    url: str
    control: str
    tokens: str
    http: httpx.Client
    metrics_http: httpx.Client  # of the port for metrics
    keys: KeyFiles
    log: Path  # what it wrote to stderr

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 30
        while self.http.get("/ready").status_code != 200:
            assert time.monotonic() < deadline, "never ready"
            time.sleep(0.02)

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def metric(self, line_start: str) -> float:
        lines = self.metrics_http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(line_start))


def start_router(
    folder: Path, *, file_limit: int | None = None, is_forked: bool = True, **settings: Any
) -> Router:
    """Start a router, if it `is_forked` without a new interpreter where that makes no difference to it.

    `file_limit`: hard limit on its open files; the soft one is half of that.
    """
    ready = folder / "ready.json"
    keys = KeyFiles.create(folder / "keys")
    given = {
        "port": 0,
        "ready_file": str(ready),
        "log_level": "warning",
        "key_file": str(keys.router),
        "enrolment_file": str(keys.enrolment),
        "poll_seconds": 0.1,
        **settings,
    }
    settings_file, log = folder / "settings.json", folder / "router.log"
    settings_file.write_text(json.dumps(given))
    process: subprocess.Popen[bytes] | ForkedPart
    if is_forked and file_limit is None and has_environment_of_forks(ROUTER):
        process = ForkedPart(ROUTER, settings_file, log)
    else:
        command = [sys.executable, "-m", "medha_router", "--settings", str(settings_file)]
        if file_limit is not None:
            limits = f'ulimit -Sn {file_limit // 2} && ulimit -Hn {file_limit} && exec "$@"'
            command = ["bash", "-c", limits, "-", *command]
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stderr=stderr)
    deadline = time.monotonic() + 30
    while not ready.exists():
        assert process.poll() is None, f"the router ended: {log.read_text()}"
        assert time.monotonic() < deadline, "the router did not start"
        time.sleep(0.02)
    bound = json.loads(ready.read_text())
    client = httpx.Client(base_url=bound["url"], timeout=30)
    metrics_client = httpx.Client(base_url=bound["metrics_url"].removesuffix("/metrics"), timeout=30)
    return Router(process, bound["url"], bound["control"], bound["tokens"], client, metrics_client, keys, log)


def stop_router(router: Router) -> int:
    router.http.close()
    router.metrics_http.close()
    router.process.terminate()
    return router.process.wait(timeout=20)


@contextmanager
def running_router(folder: Path, **settings: Any) -> Iterator[Router]:
    """A router that must end well."""
    router = start_router(folder, **settings)
    try:
        yield router
    finally:
        status = stop_router(router)
    assert status == 0


@pytest.fixture(scope="session")
def shared_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    router = start_router(
        tmp_path_factory.mktemp("router"),
        max_body_bytes=2**20,
        large_body_bytes=200_000,
        drain_seconds=1,
        tokenize_seconds=5,
    )
    yield router
    assert stop_router(router) == 0


@pytest.fixture(scope="session")
def shared_replica(shared_router: Router, bundle_files: dict[str, bytes]) -> Iterator[ScriptedReplica]:
    replica = ScriptedReplica(shared_router, bundle_files)
    shared_router.wait_ready()
    yield replica
    replica.stop()


@pytest.fixture
def replica(shared_replica: ScriptedReplica, bundle: Bundle) -> ScriptedReplica:
    """The shared replica with a fresh script: it says TEXT and ends with `length`."""
    shared_replica.script = Script(tokens=say(bundle, TEXT))
    shared_replica.submits.clear()
    shared_replica.cancels.clear()
    return shared_replica


@pytest.fixture
def router(shared_router: Router, replica: ScriptedReplica) -> Router:
    return shared_router


def say(bundle: Bundle, text: str) -> tuple[int, ...]:
    return tuple(np.asarray(bundle.encode(text, add_special_tokens=False)).tolist())


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
