"""Write the tables that come from runs on a GPU: `python benchmarks/gpu_page.py`, a part of `make gen`.

docs/gpu.md has what they proved, and docs/performance-gpu.md how long it took. Both are read from `results/gpu.json` and
`results/gpu_served.json`. Predicted times are those of the core's predictor for the same GPU, model and step: the scheduler
plans with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_sources import sources
from harness import ROOT, Row

from medha.cost.hardware import H100, H200, LLAMA3_8B, Hardware, profile_for
from medha.cost.predictor import Predictor, Work
from medha.topology import Topology

PROVED, TIMES = ROOT / "docs" / "gpu.md", ROOT / "docs" / "performance-gpu.md"
_ONE = Topology(1, 1, 1)
_POLICIES = {"convoy": "Default policy", "lars": "`policy: lars`", "fcfs": "`policy: fcfs`"}
"""Part of `gpu_served.json` -> the policy that served."""
_OF_TIERS = {"tiers": "batchInvariant", "tiers_best_effort": "bestEffort"}
"""Part of `gpu_served.json` -> `determinism` of the replica with a host tier."""
_GPUS = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}


def _results(name: str) -> Row:
    found: Row = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _model_rows(rows: Sequence[Row], name: str) -> list[list[str]]:
    return [
        [
            row[name],
            f"{row['error']:.3g}",
            f"{row['cpu_error']:.3g}",
            f"{row['error'] / row['cpu_error']:.2f}",
            row["kernels"],
        ]
        if "error" in row
        else [row[name], "failed", "", "", ""]
        for row in rows
    ]


def _proved(parts: dict[str, Row], proved: str, now: str) -> str:
    changed = "" if proved == now else " **The engine's sources have changed since that run.**"
    facts, numbers = parts["facts"], parts["numerics"]
    attention = numbers["attention"]
    worst = max(row["ours"] / row["torch"] for row in attention)
    found = [
        f"One {facts['name']} (driver {facts['driver']}, torch {facts['torch']}, Triton {facts['triton']}, FlashInfer "
        f"{facts['flashinfer-python']}) has run `make gpu-check`, for the sources with the digest `{proved}`." + changed,
        _table(
            ["What", "Result"],
            [
                ["Logits of four layers of Llama-3-8B's size, in chunks and captured decodes, against float32",
                 f"error {numbers['error']:.4f}; that of `transformers` in bfloat16 {numbers['transformers_error']:.4f}"],
                ["Attention of every kind of span against float64, FlashInfer over plain torch", f"at most {worst:.2f} times its error"],
                ["Tokens sampled with every option, against the CPU's", f"{parts['sampling']['differ']} of {parts['sampling']['samples']} differ"],
                ["Captured decodes against eager ones", f"largest difference {parts['graphs']['error']:g} in {parts['graphs']['replays']} replays"],
                ["Batch-invariant kernels", "refused" if "refused" in parts["determinism"] else "equal bits in every batch that a rank tries at its start"],
                ["Blocks that went to pinned memory and came back", f"{parts['tiers']['differ']} of {parts['tiers']['pools']} pools differ"],
                ["Values rounded to FP8 otherwise than on a CPU", f"{parts['fp8_kv']['rounded_otherwise']} of 1,048,576"],
                [f"NCCL with one rank{_of(parts['nccl'])}: a captured all-reduce, an exchange, an abort beside a captured step",
                 f"sum {parts['nccl']['sum']:g}, exchanged {_yes(parts['nccl']['exchanged'])}, abort ended {_yes(parts['nccl']['abort_ended'])}"],
                [f"compute-sanitizer over captured decodes of a small model{_of(parts['races'])}", "; ".join(f"{name}: {said}" for name, said in parts["races"].items() if name != "sources")],
            ],
        ),
        "A small model of each family and of each form of quantised weights, in bfloat16: the median error of a row against float32 on the CPU, "
        "beside that of bfloat16 on the CPU:",
        _table(["Family", "On the GPU", "On the CPU", "Ratio", "Kernels"], _model_rows(parts["families"]["models"], "architecture")),
        _table(["Weights", "On the GPU", "On the CPU", "Ratio", "Kernels"],
               _model_rows([row | {"form": f"{row['architecture']}, {row['quantisation']}"} for row in parts["quantised"]["models"]], "form")),
    ]  # fmt: skip
    return "\n\n".join(found)


def _of(part: Row) -> str:
    """Return a note if a part was run with other sources than the rest."""
    return f" (sources `{part['sources']}`)" if "sources" in part else ""


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _speeds(parts: dict[str, Row]) -> str:
    hardware: Hardware = _GPUS[parts["facts"]["name"]]
    top = parts["ceilings"]

    def predicted(layers: int, works: Sequence[Work]) -> float:
        model = replace(LLAMA3_8B, layers=layers)
        return Predictor(profile_for(model, hardware, _ONE), _ONE).latency_seconds(list(works))

    rows = []
    layers, chunk = parts["prefill"]["layers"], parts["prefill"]["chunk"]
    for row in parts["prefill"]["last_chunks"]:
        context = row["context"] - chunk if row["context"] > chunk else 0
        expected = predicted(layers, [Work(context, chunk)])
        rows.append([f"chunk of {chunk:,} behind {context:,}, {layers} layers", f"{1e3 * row['seconds']:.2f}", f"{1e3 * expected:.2f}",
                     f"{row['seconds'] / expected:.2f}", f"{100 * row['teraflops_per_second'] / top['teraflops']:.0f} % MFU"])  # fmt: skip
    layers = parts["decode"]["layers"]
    for row in parts["decode"]["steps"]:
        expected = predicted(layers, [Work(row["context"], 1)] * row["sequences"])
        what = f"{_several(row['sequences'], 'decode')} behind {row['context']:,}, {layers} layers"
        rows.append([what, f"{1e3 * row['seconds']:.2f}", f"{1e3 * expected:.2f}", f"{row['seconds'] / expected:.2f}",
                     f"{100 * row['gigabytes_per_second'] / top['gigabytes_per_second']:.0f} % MBU"])  # fmt: skip
    products = [row for row in parts["quantised"].get("products", []) if "fast_seconds" in row]
    fp8 = parts["fp8_kv"]["steps"]
    cost = parts["determinism"].get("steps", [])
    found = [
        f"Ceilings of that GPU in the same run: {top['teraflops']:.0f} TFLOP/s in a product of 8,192 x 8,192 x 8,192, and "
        f"{top['gigabytes_per_second']:,.0f} GB/s in a copy. MFU and MBU are shares of them.",
        _table(["Step of Llama-3-8B's layers", "ms", "Predicted ms", "Ratio", "Share"], rows),
        "\n".join(
            [
                *_chunk_lines(parts["chunks"]),
                f"- A captured step of {parts['overhead']['sequences']} decodes takes {1e3 * parts['overhead']['captured_seconds']:.2f} ms, of which "
                f"kernels take {1e3 * parts['overhead']['captured_busy_seconds']:.2f}: the next step is prepared beside it. Prepared and run one after the "
                f"other, it takes {1e3 * parts['overhead']['captured_alone_seconds']:.2f} ms.",
                f"- Over a pool of FP8, decodes take {min(r['fp8_seconds'] / r['seconds'] for r in fp8):.2f} to "
                f"{max(r['fp8_seconds'] / r['seconds'] for r in fp8):.2f} times the time of those over 16 bits: FP8 saves memory here, and no time.",
                *(
                    f"- `batchInvariant` takes {row['invariant_seconds'] / row['seconds']:.1f} times as long for {_several(row['rows'], 'row')} of "
                    f"{_several(row['sequences'], 'sequence')} behind {row['context']:,} tokens, without captures."
                    for row in cost
                ),
                f"- Blocks go to pinned host memory at {parts['tiers']['offloaded_gigabytes_per_second']:.0f} GB/s, and come back at "
                f"{parts['tiers']['fetched_gigabytes_per_second']:.0f} GB/s.",
                f"- A whole prefill of {parts['peers']['prompt']:,} tokens{_of(parts['peers'])} takes {parts['peers']['prefill_seconds'] / parts['peers']['transformers_prefill_seconds']:.2f} "
                f"of the time of `transformers`, and a decode step of {parts['peers']['sequences']} sequences "
                f"{parts['peers']['decode_seconds'] / parts['peers']['transformers_decode_seconds']:.2f} of it.",
            ]
        ),
        *([_table(["Product of rows with gate and up, quantised", "us", "Over numbers made for it", "Over 16 bits that are kept", "Error", "Used"],
                  [_product_line(row) for row in products])] if products else []),
    ]  # fmt: skip
    return "\n\n".join(found)


def _product_line(row: Row) -> list[str]:
    seconds = row["fast_seconds"]
    return [
        f"{row['form']}, {_several(row['rows'], 'row')}",
        f"{1e6 * seconds:.0f}",
        f"{seconds / row['numbers_seconds']:.2f}",
        f"{seconds / row['kept_seconds']:.2f}",
        f"{row['error']:.2g}",
        _yes(row["is_served"]),
    ]


def _chunk_lines(chunks: Row) -> list[str]:
    adaptive = next(row for row in chunks["prefills"] if row["chunks"] == "adaptive")
    largest = chunks["prefills"][-2]
    return [
        f"- Attention of a token in a chunk of 32 costs {100 * chunks['attention']['overhead']:.0f} % more than in one of 8,192, behind "
        '524,288 tokens: the small chunk runs on "fa2", and the large one on "fa3". Both on "fa2", it was 9 %.',
        f"- Beside 16 decodes, a prefill of 524,288 tokens whose steps stay within 50 ms takes {adaptive['seconds']:.0f} s, and one in "
        f"chunks of 8,192 {largest['seconds']:.0f} s, whose longest step takes {largest['longest_step']:.1f} s. No static size is as fast with steps as "
        "short. (Times of four layers, times eight.)",
    ]


def _served(found: Row, has_times: bool) -> str:
    """Return the table of `gpu_served.json`: the times of requests, or what their answers proved."""
    parts: dict[str, Any] = found["parts"]
    latest, rows = found["revision"], []

    def add(part: str, what: str, result: str, is_time: bool = True) -> None:
        if is_time is has_times:
            rows.append(
                [what if parts[part].get("revision", latest) == latest else f"{what} (earlier)", result]
            )

    if alone := parts.get("alone"):
        for one in alone["first_tokens"]:
            add(
                "alone",
                f"First token of {one['tokens']:,} tokens on an idle replica",
                f"{one['seconds']:.3f} s",
            )
        for one in alone["streams"]:
            add("alone", f"{_several(one['streams'], 'stream')}: a token of each",
                f"{1e3 * one['token_seconds']:.1f} ms")  # fmt: skip
        cached = alone["cached"]
        add("alone", f"{cached['tokens']:,} tokens that come again, from the prefix cache",
            f"{cached['again_seconds']:.3f} s instead of {cached['first_seconds']:.3f} s")  # fmt: skip
        add("alone", "An answer that has to match a JSON schema",
            "matches" if alone["schema"]["valid"] else "does not match", is_time=False)  # fmt: skip
    for name, policy in _POLICIES.items():
        if one := parts.get(name):
            longs = " and ".join(f"{seconds:.1f}" for seconds in one["document_first"])
            add(name, f"{policy}: first token of {one['shorts']} prompts of 64 to 512 tokens beside two documents of 131,072",
                f"p50 {one['short_first_p50']:.2f} s, p99 {one['short_first_p99']:.2f} s, worst {one['short_first_worst']:.2f} s")  # fmt: skip
            add(name, f"{policy}: first token of the documents; p99 of a stream's gaps meanwhile",
                f"{longs} s; {1e3 * one['stream_gap_p99']:.0f} ms")  # fmt: skip
    if one := parts.get("exact"):
        add("exact", "`batchInvariant`: texts beside others and a document, against those of an idle replica",
            f"{one['equal_beside_others']} of {one['texts']} equal", is_time=False)  # fmt: skip
        add("exact", "`batchInvariant`: text of a stream whose rank is killed by `kill -9`",
            f"{'equal' if one['killed_text_equal'] else 'differs'}; the stream paused for {one['recovered_seconds']:.0f} s", is_time=False)  # fmt: skip
    for name, determinism in _OF_TIERS.items():
        if one := parts.get(name):
            what = f"`{determinism}`: {one['documents']} documents of {one['tokens']:,} tokens, more than the pool holds, again from the host tier"
            add(
                name,
                what,
                f"first token {min(one['again_seconds']):.3f} s instead of {one['first_seconds']:.3f} s",
            )
            add(name, what, f"{one['texts_equal']} of {one['texts']} texts equal", is_time=False)
    head = f"`medha up` on one {found['device']}, with random weights of Llama-3-8B's shape in bfloat16 (`python benchmarks/gpu_served.py`):"
    foot = (
        'Rows marked "earlier" ran before large chunks were computed by FlashInfer\'s "fa3".'
        if any("(earlier)" in row[0] for row in rows)
        else ""
    )
    return "\n\n".join(filter(None, [head, _table(["What", "Result"], rows), foot]))


def page(path: Path) -> str:
    """Return one of the two pages with its tables of results as they have to be."""
    found, served = _results("gpu"), _results("gpu_served")
    parts, text = found["parts"], path.read_text(encoding="utf-8")
    sections = {
        PROVED: {
            "on a GPU": _proved(parts, found["sources"], sources()),
            "served": _served(served, has_times=False),
        },
        TIMES: {"served": _served(served, has_times=True), "speeds": _speeds(parts)},
    }
    for name, content in sections[path].items():
        section = re.compile(
            rf"(?<=<!-- {name}: written by `make gen` -->\n).*?(?=<!-- /{name} -->)", re.DOTALL
        )
        assert section.search(text), f"{path.name} has no section {name!r}"
        text = section.sub(lambda _, content=content: f"\n{content}\n\n", text, count=1)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    for path in (PROVED, TIMES):
        path.write_text(page(path), encoding="utf-8")
