"""Serve a model on this machine's GPU by `medha up`, and measure and prove whole requests there.

    python benchmarks/gpu_served.py --quick           a tiny model; without a GPU, on the CPU: shows that the script works
    python benchmarks/gpu_served.py --json benchmarks/results/gpu_served.json
    python benchmarks/gpu_served.py --part convoy --json benchmarks/results/gpu_served.json

The model has the shape of Llama-3-8B and random weights in bfloat16, which are written to memory first. It needs the extras
`router` and `worker`. Results are written after each part:

* alone: the time to the first token of prompts of several lengths on an idle replica, and of a token of one stream and of
  many; a prompt that comes again, from the prefix cache; an answer with a JSON schema;
* convoy: short prompts that arrive while documents are prefilled, and a stream beside them;
* fcfs: the same, first come, first served;
* exact: with `determinism: batchInvariant`, texts of prompts beside others and a document, and of one whose rank is killed
  while it streams, against texts of an idle replica;
* tiers: documents of more KV than the pool holds, which come back from the host's memory, against the first time, with
  `determinism: batchInvariant`, so that their texts have to be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from harness import Row, claim, exit_with, parser, progress, report, revision, save
from random_llama import DEVIATION, LLAMA3_8B, SMALL, LlamaShape, config_fields
from safetensors.torch import save_file
from served import medha_up, served, write_manifest
from tokenizers import Tokenizer

from medha_worker.checkpoints.presets import init_checkpoint

MODEL = "llama"
WORDS = 4096  # of the tokenizer; the model has a row for each of the shape's vocabulary
ORDINARY = (300, 4000)  # tokens that are words
REQUEST_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a run; lengths are in tokens, and memory is as a manifest has it."""

    shape: LlamaShape
    alone_tokens: tuple[int, ...]
    streams: tuple[int, ...]
    document_tokens: int
    documents: int
    shorts: int
    window_seconds: float
    output_tokens: int
    cached_tokens: int
    pool: str | None
    small_pool: str
    host_pool: str
    tier_tokens: int
    tier_documents: int


FULL = Sizes(
    shape=LLAMA3_8B, alone_tokens=(128, 2048, 16_384, 131_072), streams=(1, 32, 128), document_tokens=131_072,
    documents=2, shorts=60, window_seconds=20.0, output_tokens=16, cached_tokens=16_384, pool=None, small_pool="6Gi",
    host_pool="24Gi", tier_tokens=16_384, tier_documents=6,
)  # fmt: skip
QUICK = Sizes(
    shape=replace(SMALL, vocab=2 * WORDS), alone_tokens=(64, 512), streams=(1, 4), document_tokens=2048, documents=1, shorts=6, window_seconds=3.0,
    output_tokens=4, cached_tokens=512, pool="64Mi", small_pool="2Mi", host_pool="64Mi", tier_tokens=512, tier_documents=6,
)  # fmt: skip


@dataclass(slots=True)
class Answer:
    """A streamed answer: when it was asked for and its texts came (monotonic seconds), and the text."""

    asked: float
    came: list[float] = field(default_factory=list)
    text: str = ""
    has_twenty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when twenty texts have come."""

    @property
    def first_seconds(self) -> float:
        return self.came[0] - self.asked

    @property
    def token_seconds(self) -> float:
        return (self.came[-1] - self.came[0]) / max(1, len(self.came) - 1)


# --- the model, and replicas of it ----------------------------------------------------------------------


def write_checkpoint(folder: Path, shape: LlamaShape) -> None:
    """Write random weights, in bfloat16 for a GPU, which then makes them; only words of the tokenizer are ever sampled."""
    has_gpu = torch.cuda.is_available()
    name, dtype = ("bfloat16", torch.bfloat16) if has_gpu else ("float32", torch.float32)
    init_checkpoint(folder, preset="small", seed=0, dtype=name)
    kept = json.loads((folder / "config.json").read_text())
    fields = config_fields(shape, shape.layers) | {"torch_dtype": name}
    (folder / "config.json").write_text(json.dumps(kept | fields))
    device = torch.device("cuda" if has_gpu else "cpu")
    torch.manual_seed(0)

    def new(*sizes: int, mean: float = 0.0) -> torch.Tensor:
        made = torch.empty(*sizes, dtype=dtype, device=device).normal_(mean, DEVIATION)
        return made.cpu()

    q, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    head = new(shape.vocab, shape.hidden)
    head[WORDS:] = 0  # never the largest
    head[: ORDINARY[0]] = 0
    weights = {"model.embed_tokens.weight": new(shape.vocab, shape.hidden), "lm_head.weight": head,
               "model.norm.weight": new(shape.hidden, mean=1.0)}  # fmt: skip
    for index in range(shape.layers):
        layer = {
            "self_attn.q_proj": new(q, shape.hidden), "self_attn.k_proj": new(kv, shape.hidden),
            "self_attn.v_proj": new(kv, shape.hidden), "self_attn.o_proj": new(shape.hidden, q),
            "mlp.gate_proj": new(shape.intermediate, shape.hidden), "mlp.up_proj": new(shape.intermediate, shape.hidden),
            "mlp.down_proj": new(shape.hidden, shape.intermediate),
            "input_layernorm": new(shape.hidden, mean=1.0), "post_attention_layernorm": new(shape.hidden, mean=1.0),
        }  # fmt: skip
        weights |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in layer.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint, its tokenizer, and the sizes of the run."""

    checkpoint: Path
    tokenizer: Tokenizer
    sizes: Sizes

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Return random words, about so many tokens."""
        words = np.random.default_rng(seed).integers(*ORDINARY, tokens).tolist()
        return [int(token) for token in words]

    @contextmanager
    def replica(
        self, found: Row, *, pool: str | None, longest: int | None = None, **spec: Any
    ) -> Iterator[Replica]:
        """Serve the model; `found` gets the seconds until it was ready."""
        kv_cache = dict(spec.pop("kvCache", {})) | ({} if pool is None else {"size": pool})
        whole = {
            "model": {"name": MODEL, "source": {"path": str(self.checkpoint)}, "maxModelLen": longest or 4 * self.sizes.document_tokens},
            "kvCache": kv_cache, **spec,
        }  # fmt: skip
        manifest = self.checkpoint.parent / "served.yaml"
        url = write_manifest(manifest, MODEL, whole)
        began = time.monotonic()
        with served(medha_up(manifest), url) as process:
            found["ready_seconds"] = round(time.monotonic() - began, 1)
            yield Replica(url, process.pid)


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that is ready: its URL, and the process that started it."""

    url: str
    pid: int

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=REQUEST_SECONDS, limits=limits)

    def kill_rank(self) -> None:
        """Kill the process that computes, as a lost machine would."""
        ranks = [
            one
            for one in psutil.Process(self.pid).children(recursive=True)
            if "medha_worker.rank" in " ".join(one.cmdline())
        ]
        assert len(ranks) == 1, [one.cmdline() for one in psutil.Process(self.pid).children(recursive=True)]
        ranks[0].send_signal(signal.SIGKILL)


async def ask(
    http: httpx.AsyncClient, prompt: Sequence[int], tokens: int, answer: Answer | None = None, **body: Any
) -> Answer:
    """Stream a completion; its texts are added to `answer` as they come."""
    answer = answer or Answer(time.monotonic())
    given = {"model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True,
             "ignore_eos": True, **body}  # fmt: skip
    async with http.stream("POST", "/v1/completions", json=given) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                if event.get("choices") and (text := event["choices"][0].get("text")):
                    answer.came.append(time.monotonic())
                    answer.text += text
                    if len(answer.came) == 20:
                        answer.has_twenty.set()
    if not answer.came:
        raise RuntimeError("the answer has no text")
    return answer


async def whole_answer(http: httpx.AsyncClient, prompt: Sequence[int], tokens: int) -> None:
    """Ask for a completion that is not streamed, so that a token costs this process nothing."""
    given = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await http.post("/v1/completions", json=given)
    answer.raise_for_status()


# --- parts ----------------------------------------------------------------------------------------------


def alone(place: Place) -> Row:
    found: Row = {}
    with place.replica(found, pool=place.sizes.pool) as replica:
        asyncio.run(_alone(place, replica, found))
    return found


async def _alone(place: Place, replica: Replica, found: Row) -> None:
    sizes = place.sizes
    async with replica.client() as http:
        await ask(http, place.prompt(64, 1), 4)
        found["first_tokens"] = [
            {
                "tokens": tokens,
                "seconds": round((await ask(http, place.prompt(tokens, 100 + tokens), 2)).first_seconds, 4),
            }
            for tokens in sizes.alone_tokens
        ]
        found["streams"] = []
        for streams in sizes.streams:
            began = time.monotonic()
            answers = await asyncio.gather(
                *(ask(http, place.prompt(128, 1000 + one), 128) for one in range(streams))
            )
            whole = time.monotonic() - began
            began = time.monotonic()
            await asyncio.gather(
                *(whole_answer(http, place.prompt(128, 5000 + one), 128) for one in range(streams))
            )
            unstreamed = time.monotonic() - began
            found["streams"].append(
                {
                    "streams": streams,
                    "token_seconds": round(statistics.median(one.token_seconds for one in answers), 5),
                    "tokens_per_second": round(128 * streams / whole, 1),
                    "unstreamed_tokens_per_second": round(128 * streams / unstreamed, 1),
                }
            )
        prompt = place.prompt(sizes.cached_tokens, 7)
        cold, warm = [await ask(http, prompt, 8) for _ in range(2)]
        found["cached"] = {"tokens": sizes.cached_tokens, "first_seconds": round(cold.first_seconds, 4),
                           "again_seconds": round(warm.first_seconds, 4), "same_text": cold.text == warm.text}  # fmt: skip
        schema = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
                  "required": ["n", "ok"], "additionalProperties": False}  # fmt: skip
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        answer = await ask(http, place.prompt(64, 8), 200, response_format=form, ignore_eos=False)
        found["schema"] = {"text": answer.text, "valid": _is_valid(answer.text)}


def _is_valid(text: str) -> bool:
    with suppress(ValueError):
        value = json.loads(text)
        return (
            isinstance(value, dict) and isinstance(value.get("ok"), bool) and isinstance(value.get("n"), int)
        )
    return False


def convoy(place: Place) -> Row:
    return _served_convoy(place, "guarded")


def fcfs(place: Place) -> Row:
    return _served_convoy(place, "fcfs")


def _served_convoy(place: Place, policy: str) -> Row:
    found: Row = {}
    with place.replica(found, pool=place.sizes.pool, scheduling={"policy": policy}) as replica:
        asyncio.run(_convoy(place, replica, found))
    return found


async def _convoy(place: Place, replica: Replica, found: Row) -> None:
    sizes = place.sizes
    random = np.random.default_rng(3)
    dues = sorted(random.uniform(0.0, sizes.window_seconds, sizes.shorts).tolist())
    lengths = random.integers(64, 513, sizes.shorts).tolist()
    async with replica.client() as http:
        await ask(http, place.prompt(512, 1), 4)
        stream = Answer(time.monotonic())
        streaming = asyncio.create_task(ask(http, place.prompt(64, 2), 100_000, stream))
        await asyncio.sleep(1.0)
        start = time.monotonic()

        async def at(due: float, tokens: int, seed: int) -> Answer:
            await asyncio.sleep(start + due - time.monotonic())
            return await ask(http, place.prompt(tokens, seed), sizes.output_tokens, Answer(start + due))

        documents = [
            asyncio.create_task(at(0.5 * one, sizes.document_tokens, 50 + one))
            for one in range(sizes.documents)
        ]
        shorts = await asyncio.gather(
            *(
                at(due, int(tokens), 100 + one)
                for one, (due, tokens) in enumerate(zip(dues, lengths, strict=True))
            )
        )
        longs = await asyncio.gather(*documents)
        ended = time.monotonic()
        streaming.cancel()
    # Gaps while documents were prefilled.
    until = max(one.came[0] for one in longs)
    gaps = sorted(b - a for a, b in zip(stream.came, stream.came[1:], strict=False) if start < b <= until)
    # Those that arrived meanwhile; a tiny model's documents are done before.
    firsts = sorted(one.first_seconds for one in shorts if one.asked <= until or place.sizes is QUICK)
    found |= {
        "seconds": round(ended - start, 2), "shorts": len(firsts),
        "short_first_p50": round(statistics.median(firsts), 4), "short_first_p99": round(firsts[int(0.99 * (len(firsts) - 1))], 4),
        "short_first_worst": round(firsts[-1], 4),
        "stream_tokens": len(gaps), "stream_gap_p50": round(statistics.median(gaps), 5) if gaps else None,
        "stream_gap_p99": round(gaps[int(0.99 * (len(gaps) - 1))], 5) if gaps else None,
        "stream_gap_worst": round(gaps[-1], 4) if gaps else None,
        "document_first": [round(one.first_seconds, 3) for one in longs],
    }  # fmt: skip


def exact(place: Place) -> Row:
    found: Row = {}
    with place.replica(found, pool=place.sizes.pool, determinism="batchInvariant") as replica:
        asyncio.run(_exact(place, replica, found))
    return found


async def _exact(place: Place, replica: Replica, found: Row) -> None:
    sizes = place.sizes
    prompts = [place.prompt(tokens, 30 + tokens) for tokens in (40, 200, 333, 1000, 1500)]
    options: list[dict[str, Any]] = [
        {"seed": seed, "temperature": 0.8 if seed % 2 else 0.0} for seed in range(len(prompts))
    ]
    async with replica.client() as http:
        wanted = [
            await ask(http, prompt, 64, **option) for prompt, option in zip(prompts, options, strict=True)
        ]
        document = asyncio.create_task(ask(http, place.prompt(sizes.document_tokens // 4, 9), 4))
        beside = await asyncio.gather(
            *(ask(http, prompt, 64, **option) for prompt, option in zip(prompts, options, strict=True))
        )
        await document
        found |= {"texts": len(prompts), "equal_beside_others": sum(a.text == b.text for a, b in zip(wanted, beside, strict=True)),
                  "token_seconds": round(wanted[0].token_seconds, 5)}  # fmt: skip
        tokens = 4 * 64
        whole = await ask(http, prompts[1], tokens, **options[1])
        broken = Answer(time.monotonic())
        streaming = asyncio.create_task(ask(http, prompts[1], tokens, broken, **options[1]))
        await asyncio.wait(
            [streaming, asyncio.create_task(broken.has_twenty.wait())], return_when="FIRST_COMPLETED"
        )
        came_before = len(broken.came)
        replica.kill_rank()
        await streaming
        gaps = [b - a for a, b in zip(broken.came, broken.came[1:], strict=False)]
        found |= {"killed_after_tokens": came_before, "killed_text_equal": broken.text == whole.text,
                  "recovered_seconds": round(max(gaps), 2)}  # fmt: skip


def tiers(place: Place) -> Row:
    found: Row = {}
    tier = {"tiers": {"host": {"size": place.sizes.host_pool}}}
    with place.replica(
        found,
        pool=place.sizes.small_pool,
        longest=2 * place.sizes.tier_tokens,
        kvCache=tier,
        determinism="batchInvariant",
    ) as replica:
        asyncio.run(_tiers(place, replica, found))
    return found


async def _tiers(place: Place, replica: Replica, found: Row) -> None:
    sizes = place.sizes
    prompts = [place.prompt(sizes.tier_tokens, 70 + one) for one in range(sizes.tier_documents)]
    async with replica.client() as http:
        await ask(http, place.prompt(512, 1), 4)
        rounds = [[await ask(http, prompt, 8) for prompt in prompts] for _ in range(3)]
    first, *later = rounds
    found |= {
        "documents": len(prompts), "tokens": sizes.tier_tokens,
        "first_seconds": round(statistics.median(one.first_seconds for one in first), 4),
        "again_seconds": [round(statistics.median(one.first_seconds for one in again), 4) for again in later],
        "texts_equal": sum(a.text == b.text for again in later for a, b in zip(first, again, strict=True)),
        "texts": len(prompts) * len(later),
    }  # fmt: skip


PARTS: dict[str, Callable[[Place], Row]] = {
    part.__name__: part for part in (alone, convoy, fcfs, exact, tiers)
}


# --- claims ---------------------------------------------------------------------------------------------


def claims_of(parts: dict[str, Row]) -> list[Row]:
    """Return the claims that the finished parts allow."""
    found = []
    if "cached" in (one := parts.get("alone") or {}):
        found.append(
            claim(
                "answers that do not match their JSON schema", int(not one["schema"]["valid"]), "answers", 0
            )
        )
        again = one["cached"]["again_seconds"] / one["cached"]["first_seconds"]
        found.append(
            claim(
                "time to the first token of a prompt that comes again, over the first time",
                again,
                "ratio",
                0.5,
            )
        )
    if "shorts" in (ours := parts.get("convoy") or {}):
        found.append(
            claim(
                "shorts' time to the first token at p99 beside documents",
                ours["short_first_p99"],
                "seconds",
                2.0,
            )
        )
        if "shorts" in (theirs := parts.get("fcfs") or {}):
            found.append(claim("worst time to the first token of shorts beside documents, over first come, first served",
                               ours["short_first_worst"] / theirs["short_first_worst"], "ratio", 0.5,
                               peer="the same engine, first come, first served"))  # fmt: skip
    if "killed_text_equal" in (one := parts.get("exact") or {}):
        found.append(
            claim(
                "texts that differ beside other requests",
                one["texts"] - one["equal_beside_others"],
                "texts",
                0,
            )
        )
        found.append(
            claim(
                "texts that differ after kill -9 of the rank", int(not one["killed_text_equal"]), "texts", 0
            )
        )
    if "texts_equal" in (one := parts.get("tiers") or {}):
        found.append(
            claim(
                "texts that differ when KV comes back from the host",
                one["texts"] - one["texts_equal"],
                "texts",
                0,
            )
        )
        found.append(claim("time to the first token of documents that come back, over the first time",
                           min(one["again_seconds"]) / one["first_seconds"], "ratio", 0.5))  # fmt: skip
    return found


def main() -> int:
    options = parser(__doc__, quick="a tiny model, and on the CPU if there is no GPU")
    options.add_argument(
        "--part", action="append", choices=list(PARTS), help="only this part; may be repeated"
    )
    options.add_argument(
        "--folder", type=Path, help="where the model is written (default: memory, if it is there)"
    )
    arguments = options.parse_args()
    if not arguments.quick and not torch.cuda.is_available():
        sys.exit(
            "torch sees no GPU here, so nothing can be measured; --quick shows on the CPU that the script works"
        )
    shared = Path("/dev/shm")  # noqa: S108 - 16 GB are read back at once
    where = arguments.folder or (shared if shared.is_dir() and not arguments.quick else None)
    sizes = QUICK if arguments.quick else FULL
    results = _earlier(arguments)
    results["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    failed = False
    with tempfile.TemporaryDirectory(dir=where) as folder:
        checkpoint = Path(folder, "model")
        progress("writing the model ...")
        write_checkpoint(checkpoint, sizes.shape)
        place = Place(checkpoint, Tokenizer.from_file(str(checkpoint / "tokenizer.json")), sizes)
        for name in arguments.part or PARTS:
            progress(f"{name} ...")
            began = time.monotonic()
            try:
                results["parts"][name] = PARTS[name](place)
            except Exception as error:  # noqa: BLE001 - the other parts go on
                results["parts"][name] = {"error_text": f"{type(error).__name__}: {error}"[-1500:]}
                failed = True
            progress(f"{name}: {time.monotonic() - began:.0f} s {json.dumps(results['parts'][name])}")
            save(claims_of(results["parts"]), arguments.json, results)
    return report(claims_of(results["parts"]), arguments.json, results) or int(failed)


def _earlier(arguments: argparse.Namespace) -> Row:
    """Return the results of the same commit, to which parts are added."""
    if arguments.json is not None and arguments.json.is_file():
        found: Row = json.loads(arguments.json.read_text(encoding="utf-8"))
        if found.get("revision") == revision():
            return {"parts": found["parts"]}
    return {"parts": {}}


if __name__ == "__main__":
    exit_with(main)
