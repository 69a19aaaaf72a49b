"""Needle in a haystack: recall over depth and length through the whole server, and the time of the prefill.

    python benchmarks/needle.py --quick
    python benchmarks/needle.py --shape KVP4 --length 262144 --json benchmarks/results/needle.json
    python benchmarks/needle.py --shape streamed --pool-tokens 65536 --length 131072 --json benchmarks/results/needle.json
    python benchmarks/needle.py --plot-only --json benchmarks/results/needle.json --html needle.html

For each length, one prompt holds 11 passkeys at even depths. It is computed once. Then a question after the prompt asks
for each passkey, over the cached KV and greedily (`docs/needle.md` explains how the model finds it). There are three
shapes: one rank with two threads, two stages (SPP2), and four lanes that hold a quarter of the text each (KVP4).

In a fourth shape, `streamed`, the pool of one rank holds a quarter of the text, or --pool-tokens, and the rest is streamed
from host memory (docs/kv-tiers.md). A text that the pool holds is not streamed. Streamed KV is not shared, so each question
computes the whole prompt. Beyond 32K tokens, only those at the depths 0, 50 and 100 % are asked, and the time of the
prefill is the mean of theirs.

Four more shapes have KV in FP8. Two serve the preset that is made for it, on one rank and on four lanes. Two serve the preset
for float32 on one rank, whose scores do not survive the rounding with scales that follow from the weights; in most texts,
they do with scales that `medha model kv-scales` measures (docs/needle.md).

The goal of recall is 1. There is no goal for the preset for float32 in FP8: its margins are not made for that rounding. The
goal of growth is an exponent of 2: twice the tokens have four times the (query, key) pairs. Growth is that of the ranks'
CPU time, which other load disturbs less than wall-clock time.

With --json, the file's rows are kept unless they are measured again, so a long campaign can be run in pieces (--length,
--shape). A run that was stopped between two questions about a long streamed text continues with the next question. --html
writes a page with the plot, which needs no network. --plot-only measures nothing.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import plotly.graph_objects as go
import psutil
from harness import claim, exit_with, parser, progress, report, revision, save, table
from plotly.subplots import make_subplots
from served import medha_up, served, write_manifest
from tokenizers import Tokenizer

from medha_worker.checkpoints.haystack import Haystack, make_haystack, question
from medha_worker.checkpoints.measured_kv_scales import measure_scales, random_sequences, write_scales
from medha_worker.checkpoints.presets import init_checkpoint

LENGTHS = [4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144]
STREAMED = "streamed"
OTHER_IN_FP8 = "needle in FP8"
MEASURED_IN_FP8 = "needle in FP8, measured scales"
SHAPES = {  # stages, lanes, threads of a rank
    "one rank": (1, 1, 2),
    "SPP2": (2, 1, 1),
    "KVP4": (1, 4, 1),
    STREAMED: (1, 1, 2),
    "FP8": (1, 1, 2),
    "FP8 on KVP4": (1, 4, 1),
    OTHER_IN_FP8: (1, 1, 2),
    MEASURED_IN_FP8: (1, 1, 2),
}
SCALED = "needle-scaled"
"""Folder of the preset for float32 with measured scales."""
IN_FP8 = {
    "FP8": "needle-fp8",
    "FP8 on KVP4": "needle-fp8",
    OTHER_IN_FP8: "needle",
    MEASURED_IN_FP8: SCALED,
}
"""The checkpoints of the shapes with KV in FP8."""
SCALE_TOKENS = 4096
"""Random tokens that scales are measured with: the default of `medha model kv-scales`."""
ALL_STREAMED = 32_768  # tokens up to which all questions are asked about a text that is streamed
QUICK_LENGTH = 4096
QUICK_SHAPES = ["one rank", "KVP4", STREAMED, "FP8"]
ROOM_TOKENS = 32  # for a question and its answer
KV_BYTES_PER_TOKEN = 1024
LEAST_POOL_TOKENS = 2**20 // KV_BYTES_PER_TOKEN
MODEL = "needle"

Row = dict[str, Any]


def main() -> int:
    options = parser(__doc__, quick=f"{QUICK_LENGTH} tokens in four of the shapes", seed=True)
    options.add_argument("--length", type=int, action="append", help="only this one, tokens; may be repeated")
    options.add_argument("--shape", choices=SHAPES, action="append", help="only this one; may be repeated")
    text = f"tokens whose KV the pool of the shape {STREAMED} holds (default: a quarter of the text)"
    options.add_argument("--pool-tokens", type=int, default=0, metavar="N", help=text)
    options.add_argument("--html", type=Path, metavar="FILE", help="write the plot there")
    options.add_argument("--plot-only", action="store_true", help="plot the rows of --json")
    arguments = options.parse_args()
    lengths = arguments.length or ([QUICK_LENGTH] if arguments.quick else LENGTHS)
    shapes = arguments.shape or (QUICK_SHAPES if arguments.quick else list(SHAPES))
    if arguments.pool_tokens and (STREAMED not in shapes or arguments.pool_tokens < LEAST_POOL_TOKENS):
        options.error(
            f"--pool-tokens {arguments.pool_tokens} must be at least {LEAST_POOL_TOKENS}, and go with --shape {STREAMED}"
        )

    rows: list[Row] = []
    if arguments.json and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())["rows"]
    if not arguments.plot_only:
        with tempfile.TemporaryDirectory() as scratch:
            for preset in ("needle", "needle-fp8"):
                init_checkpoint(Path(scratch) / preset, preset=preset, seed=0)
            if MEASURED_IN_FP8 in shapes:
                scaled = Path(shutil.copytree(Path(scratch) / "needle", Path(scratch) / SCALED))
                write_scales(scaled, measure_scales(scaled, random_sequences(scaled, SCALE_TOKENS, seed=0)))

            def keep(row: Row) -> None:
                rows[:] = [
                    one for one in rows if (one["shape"], one["length"]) != (row["shape"], row["length"])
                ]
                rows.append(row)
                rows.sort(key=lambda one: (list(SHAPES).index(one["shape"]), one["length"]))
                save(claims(rows), arguments.json, {"rows": rows})

            for length in lengths:
                for shape in shapes:
                    progress(f"{shape}, {length} tokens")
                    checkpoint = Path(scratch) / IN_FP8.get(shape, "needle")
                    spec = spec_of(checkpoint, shape, length, arguments.pool_tokens)
                    asked = shape, length, spec["kvCache"]["size"]
                    before = [one for one in rows if (one["shape"], one["length"], one.get("pool")) == asked]
                    if is_asked_one_by_one(shape, length):
                        ask_one_by_one(checkpoint, spec, length, arguments.seed, before, keep)
                    else:
                        keep(measure(checkpoint, spec, shape, length, arguments.seed))
    if arguments.html:
        arguments.html.write_text(page(rows), encoding="utf-8")
    columns = ("shape", "length", "recall", "prefill_seconds", "prefill_cpu_seconds", "seconds_per_question")
    table(columns, [[row[column] for column in columns] for row in rows])
    return report(claims(rows), None if arguments.plot_only else arguments.json, {"rows": rows})


def measure(checkpoint: Path, spec: Row, shape: str, length: int, seed: int) -> Row:
    """Serve the model in this shape, and ask for every passkey of a text that fills `length` tokens."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    haystack = make_haystack(tokenizer, length - ROOM_TOKENS, seed=seed + length)
    manifest = checkpoint.parent / "replica.yaml"
    url = write_manifest(manifest, MODEL, spec)
    with (
        served(medha_up(manifest), url) as process,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=7200) as client,
    ):
        supervisor = psutil.Process(process.pid)
        cpu_before, started = rank_cpu_seconds(supervisor), time.monotonic()
        client.completions.create(model=MODEL, prompt=haystack.text, max_tokens=1, temperature=0)
        prefill_seconds = time.monotonic() - started
        prefill_cpu_seconds = rank_cpu_seconds(supervisor) - cpu_before
        started = time.monotonic()
        answers = {name: ask(client, haystack, name) for name in asked_of(haystack, shape, length)}
        return {
            "shape": shape,
            "length": length,
            "pool": spec["kvCache"]["size"],
            "prompt_tokens": haystack.tokens,
            "recall": sum(right for right, _ in answers.values()) / len(answers),
            "found": [right for right, _ in answers.values()],
            "depths": [round(haystack.positions[name] / haystack.tokens, 1) for name in answers],
            "positions": [haystack.positions[name] for name in answers],
            "least_cached_tokens": min(cached for _, cached in answers.values()),
            "prefill_seconds": round(prefill_seconds, 3),
            "prefill_cpu_seconds": round(prefill_cpu_seconds, 3),
            "seconds_per_question": round((time.monotonic() - started) / len(answers), 4),
            "load_average": round(os.getloadavg()[0], 1),
            "revision": revision(),
        }


def is_asked_one_by_one(shape: str, length: int) -> bool:
    """Return whether each question computes the text, and is so long that its answer is kept at once."""
    return shape == STREAMED and length > ALL_STREAMED


def ask_one_by_one(
    checkpoint: Path, spec: Row, length: int, seed: int, before: list[Row], keep: Callable[[Row], None]
) -> None:
    """Serve the model in the shape `streamed`, and ask behind the last answer of a row that was not complete.

    `keep` gets the row with each answer.
    """
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    haystack = make_haystack(tokenizer, length - ROOM_TOKENS, seed=seed + length)
    names = asked_of(haystack, STREAMED, length)
    found, seconds, cpu_seconds = [], [], []
    if before and len(before[0]["found"]) < len(names):
        found = list(before[0]["found"])
        seconds = [before[0]["prefill_seconds"]] * len(found)
        cpu_seconds = [before[0]["prefill_cpu_seconds"]] * len(found)
    manifest = checkpoint.parent / "replica.yaml"
    url = write_manifest(manifest, MODEL, spec)
    with (
        served(medha_up(manifest), url) as process,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=7200) as client,
    ):
        supervisor = psutil.Process(process.pid)
        for name in names[len(found) :]:
            progress(f"  question {len(found) + 1} of {len(names)}")
            cpu_before, started = rank_cpu_seconds(supervisor), time.monotonic()
            right, cached = ask(client, haystack, name)
            found.append(right)
            seconds.append(time.monotonic() - started)
            cpu_seconds.append(rank_cpu_seconds(supervisor) - cpu_before)
            answered = names[: len(found)]
            keep({
                "shape": STREAMED,
                "length": length,
                "pool": spec["kvCache"]["size"],
                "prompt_tokens": haystack.tokens,
                "recall": sum(found) / len(found),
                "found": list(found),
                "depths": [round(haystack.positions[one] / haystack.tokens, 1) for one in answered],
                "positions": [haystack.positions[one] for one in answered],
                "least_cached_tokens": cached,
                "prefill_seconds": round(sum(seconds) / len(seconds), 3),
                "prefill_cpu_seconds": round(sum(cpu_seconds) / len(cpu_seconds), 3),
                "seconds_per_question": round(sum(seconds) / len(seconds), 4),
                "load_average": round(os.getloadavg()[0], 1),
                "revision": revision(),
            })  # fmt: skip


def asked_of(haystack: Haystack, shape: str, length: int) -> list[str]:
    """Return the names whose passkeys are asked for, in the order of their depths."""
    names = list(haystack.passkeys)
    if shape != STREAMED or length <= ALL_STREAMED:
        return names
    return [names[0], names[len(names) // 2], names[-1]]


def ask(client: openai.OpenAI, haystack: Haystack, name: str) -> tuple[bool, int]:
    """Return whether the answer is the passkey of `name`, and how many prompt tokens were cached."""
    prompt = haystack.text + question(name)
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
    details = answer.usage.prompt_tokens_details if answer.usage else None
    cached = details.cached_tokens if details else None
    return answer.choices[0].text == f" {haystack.passkeys[name]}", cached or 0


def spec_of(checkpoint: Path, shape: str, length: int, pool_tokens: int = 0) -> Row:
    """Return the spec of a replica of this shape, with room for the KV of `length` tokens.

    `pool_tokens` are those whose KV the pool holds if the rest is streamed; 0: a quarter of the text.
    """
    stream, kv, threads = SHAPES[shape]
    size_mib = 2 * length * KV_BYTES_PER_TOKEN // (stream * kv * 2**20) + 4
    cache: dict[str, Any] = {"size": f"{size_mib}Mi"} | ({"tokensPerLane": length // kv} if kv > 1 else {})
    if shape in IN_FP8:
        cache["dtype"] = "fp8"
    if shape == STREAMED:
        text_mib = -(-length * KV_BYTES_PER_TOKEN // 2**20)
        pool_mib = pool_tokens * KV_BYTES_PER_TOKEN // 2**20 or text_mib // 4
        streamed_mib = max(text_mib - 4 * pool_mib // 5, 1)  # long requests do not get all of the pool
        cache = {"size": f"{pool_mib}Mi", "streaming": {"size": f"{streamed_mib}Mi"}}
    return {
        "model": {"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": length},
        "parallelism": {"stream": stream, "kv": kv},
        "kvCache": cache,
        "threads": threads,
    }


def rank_cpu_seconds(supervisor: psutil.Process) -> float:
    """Return the CPU time of all ranks so far."""
    ranks = [part for part in supervisor.children(recursive=True) if "medha_worker.rank" in part.cmdline()]
    return sum(times.user + times.system for times in (rank.cpu_times() for rank in ranks))


def claims(rows: list[Row]) -> list[dict[str, Any]]:
    """Return claims on the lowest recall of each shape, and on the growth of the ranks' time over the last doubling."""
    found: list[Row] = []
    for shape in SHAPES:
        of_shape = [row for row in rows if row["shape"] == shape]
        if not of_shape or shape in (OTHER_IN_FP8, MEASURED_IN_FP8):
            continue
        depths = min(len(row["found"]) for row in of_shape)
        name = f"{shape}: lowest recall, {depths} depths, {of_shape[0]['length']} to {of_shape[-1]['length']} tokens"
        worst = min(row["recall"] for row in of_shape)
        found.append(claim(name, worst, "ratio", 1.0, "more"))
        if len(of_shape) > 1 and shape not in IN_FP8:
            before, last = of_shape[-2:]
            ratio = last["prefill_cpu_seconds"] / before["prefill_cpu_seconds"]
            growth = math.log(ratio) / math.log(last["length"] / before["length"])
            name = (
                f"{shape}: exponent of the prefill's CPU time, {before['length']} to {last['length']} tokens"
            )
            found.append(claim(name, growth, "", 2.0))
    return found


def page(rows: list[Row]) -> str:
    """Return an HTML page with recall over depth and length for each shape, and the prefill's CPU time."""
    shapes = [shape for shape in SHAPES if any(row["shape"] == shape for row in rows)]
    titles = [f"{shape}: passkeys found" for shape in shapes] + ["CPU time of the prefill, all ranks"]
    figure = make_subplots(rows=len(titles), cols=1, subplot_titles=titles, vertical_spacing=0.08)
    for index, shape in enumerate(shapes, start=1):
        of_shape = [row for row in rows if row["shape"] == shape]
        names = [f"{row['length'] // 1024}K" for row in of_shape]
        depths = [depth / 10 for depth in range(11)]
        found = [dict(zip(row.get("depths", depths), row["found"], strict=True)) for row in of_shape]
        figure.add_trace(
            go.Heatmap(
                z=[[int(one[depth]) if depth in one else None for one in found] for depth in depths],
                x=names,
                y=[f"{depth:.0%}" for depth in depths],
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


if __name__ == "__main__":
    exit_with(main)
