"""Needle in a haystack: recall over depth and length through the whole server, and what the prefill takes.

    python benchmarks/needle.py [--quick] [--json FILE] [--html FILE]

For each length one prompt holds 11 passkeys at even depths. It is computed once; then each passkey is asked for by a
question behind it, over the cached KV, greedily (`docs/needle.md` says how the model finds it). Three shapes: one rank
with two threads, two stages (SPP2), and four lanes that hold a quarter of the text each (KVP4). The limit of recall
is 1, and that of growth is 2: twice the tokens have four times the pairs. Growth is that of the ranks' CPU time, which
other load on the machine disturbs less than the clock.

With --json, rows that the file has already are kept unless they are measured anew: a long campaign can be run in
pieces (--length, --shape). With --html a page with the plot is written, which needs no network; with --plot-only
nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import plotly.graph_objects as go
import psutil
import yaml
from plotly.subplots import make_subplots
from revision import revision
from tokenizers import Tokenizer

from medha_worker.checkpoints.haystack import Haystack, make_haystack, question
from medha_worker.checkpoints.presets import init_checkpoint

LENGTHS = [4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144]
SHAPES = {"one rank": (1, 1, 2), "SPP2": (2, 1, 1), "KVP4": (1, 4, 1)}  # stages, lanes, threads of a rank
QUICK = 16_384
ROOM_TOKENS = 32  # for a question and its answer
KV_BYTES_PER_TOKEN = 1024
START_SECONDS = 120
MODEL = "needle"

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"up to {QUICK} tokens: about a minute")
    parser.add_argument("--length", type=int, action="append", help="only this one, tokens; may be repeated")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of texts and passkeys")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plot there")
    parser.add_argument("--plot-only", action="store_true", help="plot the rows of --json")
    arguments = parser.parse_args()
    lengths = arguments.length or [length for length in LENGTHS if not arguments.quick or length <= QUICK]
    shapes = arguments.shape or list(SHAPES)

    rows: list[Row] = []
    if arguments.json and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())["rows"]
    if not arguments.plot_only:
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint = Path(scratch) / "needle"
            init_checkpoint(checkpoint, preset="needle", seed=0)
            print(HEADER)
            for length in lengths:
                for shape in shapes:
                    row = measure(checkpoint, shape, length, arguments.seed)
                    print_row(row)
                    rows = [old for old in rows if (old["shape"], old["length"]) != (shape, length)] + [row]
                    rows.sort(key=lambda one: (list(SHAPES).index(one["shape"]), one["length"]))
                    if arguments.json:
                        result = {"claims": claims(rows), "rows": rows}
                        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    for claim in claims(rows):
        print(f"{claim['name']}: {claim['value']} (goal {claim['goal']})")
    if arguments.html:
        arguments.html.write_text(page(rows), encoding="utf-8")


def measure(checkpoint: Path, shape: str, length: int, seed: int) -> Row:
    """Serve the model in this shape, and ask for every passkey of a text that fills `length` tokens."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    haystack = make_haystack(tokenizer, length - ROOM_TOKENS, seed=seed + length)
    with (
        serving(checkpoint, shape, length) as (url, process),
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=7200) as client,
    ):
        cpu_before, started = rank_cpu_seconds(process), time.monotonic()
        client.completions.create(model=MODEL, prompt=haystack.text, max_tokens=1, temperature=0)
        prefill_seconds = time.monotonic() - started
        prefill_cpu_seconds = rank_cpu_seconds(process) - cpu_before
        started = time.monotonic()
        answers = {name: ask(client, haystack, name) for name in haystack.passkeys}
        return {
            "shape": shape,
            "length": length,
            "prompt_tokens": haystack.tokens,
            "recall": sum(right for right, _ in answers.values()) / len(answers),
            "found": [right for right, _ in answers.values()],
            "positions": list(haystack.positions.values()),
            "least_cached_tokens": min(cached for _, cached in answers.values()),
            "prefill_seconds": round(prefill_seconds, 3),
            "prefill_cpu_seconds": round(prefill_cpu_seconds, 3),
            "seconds_per_question": round((time.monotonic() - started) / len(answers), 4),
            "load_average": round(os.getloadavg()[0], 1),
            "revision": revision(),
        }


def ask(client: openai.OpenAI, haystack: Haystack, name: str) -> tuple[bool, int]:
    """Whether the passkey of `name` is the answer, and how many tokens of the prompt were cached."""
    prompt = haystack.text + question(name)
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
    details = answer.usage.prompt_tokens_details if answer.usage else None
    cached = details.cached_tokens if details else None
    return answer.choices[0].text == f" {haystack.passkeys[name]}", cached or 0


@contextmanager
def serving(checkpoint: Path, shape: str, length: int) -> Iterator[tuple[str, psutil.Process]]:
    """`medha up` in this shape, with room for the KV of `length` tokens: its URL and its supervisor."""
    stream, kv, threads = SHAPES[shape]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    size_mib = 2 * length * KV_BYTES_PER_TOKEN // (stream * kv * 2**20) + 4
    spec = {
        "model": {"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": length},
        "parallelism": {"stream": stream, "kv": kv},
        "kvCache": {"size": f"{size_mib}Mi"} | ({"tokensPerLane": length // kv} if kv > 1 else {}),
        "router": {"port": port},
        "threads": threads,
    }
    manifest = checkpoint.parent / "replica.yaml"
    header = {"apiVersion": "medha.dev/v1alpha1", "kind": "MedhaReplica", "metadata": {"name": "needle"}}
    manifest.write_text(yaml.safe_dump(header | {"spec": spec}))
    log = checkpoint.parent / "medha.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "medha_cli.main", "up", str(manifest)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        url = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + START_SECONDS
            while not is_ready(url):
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit(f"medha up did not become ready:\n{log.read_text()}")
                time.sleep(0.2)
            yield url, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def rank_cpu_seconds(supervisor: psutil.Process) -> float:
    """CPU time of all ranks so far."""
    ranks = [part for part in supervisor.children(recursive=True) if "medha_worker.rank" in part.cmdline()]
    return sum(times.user + times.system for times in (rank.cpu_times() for rank in ranks))


def claims(rows: list[Row]) -> list[dict[str, Any]]:
    """Recall of each shape at its worst, and how the ranks' time grows over the last doubling."""
    found: list[dict[str, Any]] = []
    for shape in SHAPES:
        of_shape = [row for row in rows if row["shape"] == shape]
        if not of_shape:
            continue
        name = (
            f"{shape}: lowest recall, 11 depths, {of_shape[0]['length']} to {of_shape[-1]['length']} tokens"
        )
        worst = min(row["recall"] for row in of_shape)
        found.append({"name": name, "value": worst, "unit": "ratio", "goal": 1.0, "better": "more"})
        if len(of_shape) > 1:
            before, last = of_shape[-2:]
            ratio = last["prefill_cpu_seconds"] / before["prefill_cpu_seconds"]
            growth = math.log(ratio) / math.log(last["length"] / before["length"])
            name = (
                f"{shape}: exponent of the prefill's CPU time, {before['length']} to {last['length']} tokens"
            )
            found.append({"name": name, "value": round(growth, 2), "unit": "", "goal": 2.0, "better": "less"})
    return found


def page(rows: list[Row]) -> str:
    """Recall over depth and length for each shape, and the prefill's CPU time, as one HTML page."""
    shapes = [shape for shape in SHAPES if any(row["shape"] == shape for row in rows)]
    titles = [f"{shape}: passkeys found" for shape in shapes] + ["CPU time of the prefill, all ranks"]
    figure = make_subplots(rows=len(titles), cols=1, subplot_titles=titles, vertical_spacing=0.08)
    for index, shape in enumerate(shapes, start=1):
        of_shape = [row for row in rows if row["shape"] == shape]
        names = [f"{row['length'] // 1024}K" for row in of_shape]
        depths = [f"{10 * depth} %" for depth in range(len(of_shape[0]["found"]))]
        figure.add_trace(
            go.Heatmap(
                z=[[int(row["found"][depth]) for row in of_shape] for depth in range(len(depths))],
                x=names,
                y=depths,
                zmin=0,
                zmax=1,
                colorscale=[[0, "#c0392b"], [1, "#2e8b57"]],
                showscale=False,
                xgap=2,
                ygap=2,
            ),
            row=index,
            col=1,
        )
        figure.update_yaxes(title="depth", autorange="reversed", row=index, col=1)
        figure.add_trace(
            go.Scatter(
                x=[row["length"] for row in of_shape],
                y=[row["prefill_cpu_seconds"] for row in of_shape],
                name=shape,
                mode="lines+markers",
            ),
            row=len(titles),
            col=1,
        )
    figure.update_xaxes(type="log", title="tokens", row=len(titles), col=1)
    figure.update_yaxes(type="log", title="seconds", row=len(titles), col=1)
    figure.update_layout(title="Needle in a haystack", template="plotly_white", height=380 * len(titles))
    return str(figure.to_html(include_plotlyjs=True, full_html=True))


HEADER = f"{'shape':<9} {'tokens':>7} {'recall':>7} {'prefill s':>10} {'CPU s':>8} {'question s':>11}"


def print_row(row: Row) -> None:
    times = f"{row['prefill_seconds']:>10.2f} {row['prefill_cpu_seconds']:>8.2f} {row['seconds_per_question']:>11.3f}"
    print(f"{row['shape']:<9} {row['length']:>7} {row['recall']:>7.3f} {times}", flush=True)


if __name__ == "__main__":
    main()
