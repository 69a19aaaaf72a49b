"""Section of docs/reproduction.md on prefill and decode replicas, from the file that `benchmarks/roles.py` writes.

The papers argue that mixing prefill and decode in one replica need not cost latency. The section says at which loads and mixes
replicas with roles serve more requests on time than as many that do both, with Medha's scheduler in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

ROLES_FILE = "benchmarks/results/roles.json"

_TEXT = """## Prefill and decode replicas, or mixed ones?

**At which loads and mixes does disaggregation beat mixing, for Medha's scheduler?** {answer}

From `{file}` (`{command}`, code of commit `{commit}`):
Llama-3-70B on four replicas of eight H100 each. All of them do both, or some only prefill and the others only decode: `1+3` is one for prefill and three for decode. A load of 1 is what all four can prefill
if they do nothing else. Reads of KV take 25 GiB a second for each rank, which needs RDMA. By default, Medha reads over TCP; with
[`peers.plane: nixl`](kv-tiers.md#nixl) it can read over RDMA, which nobody has run. So this is an upper bound of what roles bring. The table has the share of requests whose TTFT and TPOT meet their targets, in percent. Behind it is the
difference from four that do both, in points, with its 95 % interval over {seeds} paired seeds; it is bold where the interval excludes 0.

{table}
With a tight TPOT target, a step of a mixed replica has little time for prefill beside its decodes, so prompts wait. A decode replica has
no prefill, and a prefill replica needs no small steps. With a loose target, there is time for both, and each prompt can use any replica.
A wrong split costs more than roles bring: too few prefill replicas miss TTFT targets, and too few decode replicas TPOT targets. The pause at
a move is {pause_seconds:.1f} s at most for 99 of 100 requests. [performance-kv-tiers.md](performance-kv-tiers.md#simulated) has
two replicas, and slow reads.
"""


def section(found: dict[str, Any]) -> str:
    """Return the section, in Markdown, for the contents of the file of roles."""
    rows = [row for row in found["rows"] if row["count"] == 4]
    points = [list(group) for _, group in groupby(rows, _point)]
    splits = [row["replicas"] for row in points[0][1:]]
    head = ("Requests", "TPOT target", "Load", points[0][0]["replicas"], *splits)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cells(point)) + " |" for point in points]
    return _TEXT.format(
        answer=_answer(points),
        file=ROLES_FILE,
        command=found["command"],
        commit=found["revision"],
        seeds=found["seeds"],
        table="\n".join(lines) + "\n",
        pause_seconds=max(row["p99_pause_seconds"] for point in points for row in point[1:]),
    )


def _point(row: dict[str, Any]) -> tuple[str, float, float]:
    return row["mix"], row["tpot_seconds"], row["load"]


def _cells(point: Sequence[dict[str, Any]]) -> list[str]:
    both, *splits = point
    mix, tpot_seconds, load = _point(both)
    return [
        mix, f"{1e3 * tpot_seconds:.0f} ms", f"{load:g}", f"{both['on_time_percent']:.0f}", *map(_compared, splits)
    ]  # fmt: skip


def _compared(row: dict[str, Any]) -> str:
    more, half = row["more_on_time_points"], row["half_interval_points"]
    difference = f"{round(more):+d} ± {half:.0f}"
    if abs(more) > half:
        difference = f"**{difference}**"
    return f"{row['on_time_percent']:.0f} ({difference})"


def _answer(points: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return which points a split wins, which ones all splits lose, and how the others end."""
    won, lost = [], []
    for both, *splits in points:
        best = max(splits, key=lambda row: row["more_on_time_points"] - row["half_interval_points"])
        mix, tpot_seconds, load = _point(both)
        where = f"{mix} at {1e3 * tpot_seconds:.0f} ms and load {load:g}"
        if best["more_on_time_points"] > best["half_interval_points"]:
            won.append(f"{where} (`{best['replicas']}`: {round(best['more_on_time_points']):+d} points)")
        elif all(-row["more_on_time_points"] > row["half_interval_points"] for row in splits):
            lost.append(where)
    parts = [f"A split wins at {len(won)} of {len(points)} points"]
    parts.append(": " + "; ".join(won) + "." if won else ".")
    if lost:
        parts.append(f" Every split loses at {len(lost)}: " + "; ".join(lost) + ".")
    parts.append(" At the others, the best split is not certainly better or worse than mixing.")
    return "".join(parts)
