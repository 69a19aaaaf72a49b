"""Write the computed tables of three pages: `python benchmarks/models_page.py`, a part of `make gen`.

The pages are docs/models.md, docs/performance-speculation.md and docs/performance-models.md. Step times of latent attention on GPUs are
those of the planner (`medha plan`); those of a CPU are read from `results/latents.json`. Rates of served models come from
`results/serve_models.json`, those of guesses from `results/speculate.json`, and what experts on lanes would cost from
`results/experts.json`. The files that a family touches are those that name it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import ROOT, Row

from medha.cost.cost_profile import Operation
from medha.cost.hardware import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    H100,
    H200,
    QWEN3_30B_A3B,
    Hardware,
    ModelShape,
    profile_for,
)
from medha.topology import Topology
from medha_sim.plan import Wish, rate

CONTEXTS = (16_384, 65_536, 262_144, 1_048_576)
BYTES_FP8 = 1 + 4 / 128**2
"""Bytes of a weight in FP8, in blocks of 128 x 128 with a scale in float32, as DeepSeek-V3 is published."""
LATENT_GRIDS: Sequence[tuple[ModelShape, Sequence[Hardware], Sequence[Topology]]] = (
    (
        DEEPSEEK_V2_LITE,
        (H100, H200),
        (Topology(1, 1, 1), Topology(8, 1, 1), Topology(4, 1, 2), Topology(2, 1, 4), Topology(1, 1, 8)),
    ),
    (
        replace(
            DEEPSEEK_V3,
            name="DeepSeek-V3 in FP8",
            layer_weight_bytes=BYTES_FP8,
            expert_weight_bytes=BYTES_FP8,
        ),
        (H200,),
        (Topology(8, 1, 1), Topology(8, 2, 1), Topology(8, 1, 2), Topology(8, 8, 1), Topology(8, 1, 8)),
    ),
)
EXPERT_ROWS = (8, 32, 512)
EXPERT_RANKS = 8
FAMILY = re.compile(r"qwen3_?moe", re.IGNORECASE)
"""The names of the last family that needed declarations alone."""
DECLARED_IN = "worker/medha_worker/model/families/qwen3_moe.py"
SOURCES = ("core", "worker", "sim", "cli")
LONGEST_LINE = 110  # characters that are shown
TESTS = ("tests/worker/model/test_model_transformer.py", "tests/worker/replicas/test_exactness.py")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"{indent}| " + " | ".join(line) + " |" for line in lines)


def _results(name: str) -> Row:
    found: Row = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def decode_milliseconds(
    model: ModelShape, hardware: Hardware, topology: Topology, context: int
) -> float | None:
    """Return the predicted time of a token of one request behind `context` tokens; None if memory does not suffice."""
    wish = Wish(context, output_tokens=1, tpot_seconds=1e-9)  # within which no batch decodes
    rating = rate(model, hardware, topology, wish)
    return None if "memory" in rating.misses else 1e3 * rating.tpot_seconds


def _latents() -> str:
    rows = []
    for model, devices, grids in LATENT_GRIDS:
        for hardware in devices:
            for grid in grids:
                found = [decode_milliseconds(model, hardware, grid, context) for context in CONTEXTS]
                shown = ["does not fit" if one is None else f"{one:.1f}" for one in found]
                shape = f"{grid.tensor} x {grid.stream} x {grid.kv}"
                rows.append([model.name, hardware.name, shape, *shown])
    head = [
        "Model",
        "GPUs",
        "TP x SPP x KVP",
        *(f"{context // 1024}K" if context < 2**20 else "1M" for context in CONTEXTS),
    ]
    return _table(head, rows)


def _latents_here() -> str:
    rows = [
        [
            f"{row['context'] // 1024}K" if row["context"] < 2**20 else "1M",
            str(row["ranks"]),
            f"{row['tensor_ms']:.1f}",
            f"{row['lane_ms']:.1f}",
        ]
        for row in _results("latents")["rows"]
    ]
    return _table(["Context", "Ranks", "a tensor rank, ms", "a lane, ms"], rows)


def _experts() -> str:
    rows = [
        [
            row["family"],
            str(row["rows"]),
            f"{row['busiest']:.2f}",
            f"{100 * row['whole_share']:.0f} %",
            f"{100 * row['divided_share']:.1f} %",
            f"{1e3 * row['whole_seconds']:.2f}",
            f"{1e3 * row['divided_seconds']:.2f}",
            f"{1e3 * row['tensor_seconds']:.2f}",
        ]
        for row in _results("experts")["results"]
        if row["lanes"] == EXPERT_RANKS
    ]
    head = [
        "Routers of",
        "Rows",
        "busiest lane / mean",
        "read: whole",
        "divided",
        "ms: whole",
        "divided",
        "a part of the width",
    ]
    return _table(head, rows)


def expert_milliseconds(operations: Iterable[Operation], layers: int, rows: int) -> float:
    """Return the predicted time of the experts of all layers of a step, on one rank."""
    experts = [one for one in operations if one.name.startswith("expert_")]
    return 1e3 * layers * sum(float(one.seconds(np.array([rows]))[0]) for one in experts)


def _experts_on_gpus() -> str:
    model, hardware, ranks = QWEN3_30B_A3B, H100, EXPERT_RANKS
    assert model.experts is not None
    lane = profile_for(model, hardware, Topology(1, 1, 1))
    tensor = profile_for(model, hardware, Topology(ranks, 1, 1))
    divided = [
        replace(
            one,
            fixed_seconds=one.fixed_seconds / ranks,
            memory_seconds_per_row=one.memory_seconds_per_row / ranks,
            experts=max(1, one.experts // ranks),
            experts_per_row=max(1, one.experts_per_row // ranks),
        )
        for one in lane.linear
    ]
    busiest = {
        row["rows"]: row["busiest"]
        for row in _results("experts")["results"]
        if row["family"] == "qwen3_moe" and row["lanes"] == ranks
    }
    rows = [
        [
            str(count),
            f"{expert_milliseconds(lane.linear, model.layers, count // ranks):.2f}",
            f"{expert_milliseconds(divided, model.layers, round(count * busiest[count])):.2f}",
            f"{expert_milliseconds(tensor.linear, model.layers, count):.2f}",
        ]
        for count in EXPERT_ROWS
    ]
    held = model.expert_parameters * model.expert_bytes / 1e9
    head = ["Rows", "each lane holds all", "divided over lanes", f"TP{ranks}"]
    last = ["GB of experts on a GPU", f"{held:.1f}", f"{held / ranks:.1f}", f"{held / ranks:.1f}"]
    return _table(head, [*rows, last])


def _served() -> str:
    rows = []
    for row in _results("serve_models")["rows"]:
        weights = f"{row['weights_bytes'] / 2**20:.1f}"
        if rows and rows[-1][0] == row["model"]:
            rows[-1][-1] = f"{row['ratio']:.2f}"
        else:
            rows.append(
                [
                    row["model"],
                    "Medha in float32" if ":" in row["model"] else "`transformers`",
                    weights,
                    f"{row['ratio']:.2f}",
                    "",
                ]
            )
    return _table(["Model", "beside", "MiB of weights", "1 stream", "8 streams"], rows)


def _guesses() -> str:
    rows = []
    names = {"promptLookup": "prompt lookup", "draftModel": "draft model", "vLLM ngram": "vLLM, n-grams"}
    last: tuple[str, int] | None = None
    for row in _results("speculate")["rows"]:
        case = (row["workload"], row["streams"])
        verified = f"{100 * row['accepted_share']:.0f} % of {row['drafted']:,.0f}"
        rows.append(
            [
                f"`{case[0]}`" if case != last else "",
                str(case[1]) if case != last else "",
                names[row["method"]],
                f"{row['plain_tokens_per_second']:,.0f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['ratio']:.2f}",
                verified if row["drafted"] else "none verified",
            ]
        )
        last = case
    head = ["Workload", "Streams", "Guesses", "Plain, tokens/s", "Tokens/s", "Factor", "Guesses right"]
    return _table(head, rows)


def family_lines() -> dict[str, list[str]]:
    """Return lines by file: all lines of the family's own file, and those of other sources and tests that name it."""
    found = {DECLARED_IN: (ROOT / DECLARED_IN).read_text(encoding="utf-8").splitlines()}
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in [*files, *(ROOT / name for name in TESTS)]:
        name = path.relative_to(ROOT).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        named = [line.strip() for line in lines if FAMILY.search(line)]
        if named and name not in found:
            found[name] = named
    return found


def _family() -> str:
    found = family_lines()
    diff = []
    for name, lines in found.items():
        if name not in TESTS:
            diff += [f"+++ {name}", *(f"+{line[:LONGEST_LINE]}" for line in lines)]
    tests = " and ".join(f"{len(found[name])} lines of `{name}`" for name in TESTS)
    return "\n".join(["```diff", *diff, "```", "", f"Beside these, {tests} name it."])


PAGES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    ROOT / "docs" / "models.md": {"a family": _family},
    ROOT / "docs" / "performance-speculation.md": {"guesses on a CPU": _guesses},
    ROOT / "docs" / "performance-models.md": {
        "served models": _served,
        "latents on GPUs": _latents,
        "latents on a CPU": _latents_here,
        "experts on a CPU": _experts,
        "experts on GPUs": _experts_on_gpus,
    },
}
"""Page -> its computed sections by name."""


def page(path: Path, text: str | None = None) -> str:
    """Return a page with its computed sections as they have to be; `text` is what it has now."""
    text = path.read_text(encoding="utf-8") if text is None else text
    for name, content in PAGES[path].items():
        section = re.compile(
            rf"(?<=<!-- {name}: written by `make gen` -->\n).*?(?=<!-- /{name} -->)", re.DOTALL
        )
        assert section.search(text), f"{path.name} has no section {name!r}"
        made = f"\n{content()}\n\n"
        text = section.sub(lambda _, made=made: made, text, count=1)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path), encoding="utf-8")
