"""The table of docs/gpu.md about the files that `proved_results.py` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
_MASKING = ("without a mask", "causal", "by a mask")  # in the order of FlashInfer's numbers


def proved_table() -> str:
    """Return the table."""
    triton, launches = (_read(name) for name in ("triton_ir", "flashinfer_launches"))
    sizes = ", ".join(f"{one['rows']} x {one['vocab']:,}" for one in triton["compared"])
    winners = sum(one["winners"] for one in triton["compared"])
    largest = max(one["largest_difference"] for one in triton["compared"])
    equal = launches["equal"]
    kinds = [kind for one in equal for kind in one["masking"]]
    masking = ", ".join(f"{kinds.count(number)} {name}" for number, name in enumerate(_MASKING))
    merges = sum(one["launches_of_merges"] for one in equal)
    found = launches["defects_found_by"]
    modules = launches["modules"]
    rows = [
        ("triton_ir", triton,
         f"`{'`, `'.join(triton['kernels'])}`: the winners of {winners} rows ({sizes} tokens) are those of plain torch, with a largest "
         f"difference of {largest}; {len(triton['defects_found'])} planted defects found"),
        ("flashinfer_launches", launches,
         f"{len(modules)} modules for {launches['arch']}, {sum(one['bytes'] for one in modules) / 1e6:.1f} MB; {len(equal)} steps: "
         f"{len(kinds)} launches of attention ({masking}) and {merges} of merges are those needed; "
         f"{sum(one != 'nothing' for one in found.values())} of {len(found)} planted defects found"),
    ]  # fmt: skip
    lines = [
        f"| [{name}.json](../benchmarks/results/{name}.json) | {_versions(document)} | {compared} |"
        for name, document, compared in rows
    ]
    return "\n".join(["| File | With | Compared |", "|---|---|---|", *lines])


def _versions(document: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in document["packages"].items())


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document
