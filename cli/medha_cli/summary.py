"""The summary of a replica that has become ready: one table, and two examples to paste."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from medha.api.replica import MedhaReplica
from medha.api.speculation_spec import PredictionHeadSpec
from medha.wire.messages import RankReady, Readiness


def summary(
    replica: MedhaReplica,
    url: str,
    metrics_url: str,
    dtype: str,
    readiness: Readiness,
    process_ids: dict[str, int],
    *,
    needs_key: bool,
) -> list[RenderableType]:
    """Return the start table and the examples; `readiness` names at least one rank."""
    return [
        Text(),
        start_table(replica, url, metrics_url, dtype, readiness, process_ids),
        Text(),
        Text(examples(url, replica, needs_key=needs_key)),
    ]


def start_table(
    replica: MedhaReplica,
    url: str,
    metrics_url: str,
    dtype: str,
    readiness: Readiness,
    process_ids: dict[str, int],
) -> Table:
    """Return the table of the replica's address, configuration and capacity. Bytes are those of the fullest rank."""
    spec, shape, ranks = replica.spec, replica.spec.parallelism, readiness.ranks
    pool_tokens = min(rank.kv_blocks * rank.block_size_tokens for rank in ranks)
    context_tokens = min(rank.max_model_len for rank in ranks)
    draft, head = spec.scheduling.speculation.draft_model, spec.scheduling.speculation.prediction_head
    table = Table(title=f"{replica.metadata.name} is ready", title_justify="left", show_header=False)
    table.add_column("what", style="bold")
    table.add_column("value")
    for what, value in (
        ("URL", url),
        ("Model", f"{spec.model.name} ({spec.model.source.path})"),
        *([] if draft is None else [("Draft model", f"{draft.path}")]),
        *([] if head is None else [("Prediction head", _head(head))]),
        (
            "Shape",
            f"tensor {shape.tensor} x stream {shape.stream} x kv {shape.kv} on {_devices(ranks)}",
        ),
        ("Data type", dtype),
        ("Context", f"{context_tokens:,} tokens"),
        ("KV pool", f"{pool_tokens:,} tokens, in blocks of {ranks[0].block_size_tokens}"),
        ("Longest request", f"{min(pool_tokens, context_tokens):,} tokens, prompt and output together"),
        (
            "Memory",
            f"weights {_bytes(max(rank.weights_bytes for rank in ranks))}, "
            f"activations {_bytes(max(rank.activation_bytes for rank in ranks))}, "
            f"KV {_bytes(max(rank.kv_bytes for rank in ranks))}",
        ),
        ("Page", f"{metrics_url.removesuffix('/metrics')}/ui"),
        ("Metrics", f"{metrics_url} (requests)\n{readiness.metrics_url} (scheduling)"),
        ("Processes", ", ".join(f"{part} {pid}" for part, pid in process_ids.items())),
    ):
        table.add_row(Text(what), Text(value))
    return table


def _head(head: PredictionHeadSpec) -> str:
    return head.kind if head.source is None else f"{head.kind} ({head.source.path})"


def examples(url: str, replica: MedhaReplica, *, needs_key: bool) -> str:
    """Return the same chat through curl and through the openai client, ready to paste.

    An API key is taken from OPENAI_API_KEY, as the client does by itself.
    """
    header = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if needs_key else ""
    argument = "" if needs_key else ', api_key="none"'
    name = replica.spec.model.name
    body = json.dumps(
        {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32, "stream": True}
    )
    return f"""\
curl -N {url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'

python3 - <<'PY'
from openai import OpenAI
client = OpenAI(base_url="{url}/v1"{argument})
messages = [{{"role": "user", "content": "Hello!"}}]
for chunk in client.chat.completions.create(model={name!r}, messages=messages, max_tokens=32, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
PY

Ctrl-C drains and stops everything."""


def checkpoint_dtype(directory: Path, wanted: str) -> str:
    """Return the data type served: the manifest's, or with `auto` that of the checkpoint."""
    if wanted != "auto":
        return wanted
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _devices(ranks: Sequence[RankReady]) -> str:
    devices = sorted({rank.device for rank in ranks})
    return f"{len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'} ({', '.join(devices)})"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
