"""`make test-long`: what does not fit CI, one process per row, resumed where it was stopped.

Rows are every test marked `long`, and seeded campaigns: all property tests with 1,000 examples each and another
seed. After each row `benchmarks/results/long-<commit>.json` is written; rows that have passed for this commit are
not run again. A tree with uncommitted changes is labelled `<commit>-dirty` and always starts anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CAMPAIGN = ("-m", "hypothesis and not long", "--hypothesis-profile=campaign", "--timeout=1800")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="campaigns to run, seeds 0 up to this (default 5)"
    )
    parser.add_argument("--match", default="", help="only rows whose name contains this")
    arguments = parser.parse_args()

    label, dirty = _commit()
    target = RESULTS / f"long-{label}.json"
    earlier: dict[str, Any] = (
        json.loads(target.read_text()) if target.exists() and not dirty else {"rows": {}}
    )
    result = {"commit": label, "python": sys.version.split()[0], "rows": earlier["rows"]}

    rows = {node: (node, "-m", "long", "--timeout=3600") for node in _long_tests()}
    rows |= {
        f"campaign seed {seed}": (*CAMPAIGN, f"--hypothesis-seed={seed}") for seed in range(arguments.seeds)
    }
    chosen = {name: argv for name, argv in rows.items() if arguments.match in name}
    print(f"{len(chosen)} rows for {label}; results in {target.relative_to(ROOT)}", flush=True)
    for number, (name, argv) in enumerate(chosen.items(), start=1):
        if result["rows"].get(name, {}).get("outcome") == "passed":
            print(f"[{number}/{len(chosen)}] {name}: passed before", flush=True)
            continue
        print(f"[{number}/{len(chosen)}] {name}", flush=True)
        result["rows"][name] = _run(argv)
        print(f"    {result['rows'][name]['outcome']}, {result['rows'][name]['seconds']} s", flush=True)
        _write(target, result)
    failed = [name for name in chosen if result["rows"][name]["outcome"] != "passed"]
    print(f"{len(chosen) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def _long_tests() -> list[str]:
    done = _pytest("--collect-only", "-q", "-m", "long")
    if done.returncode not in (0, 5):  # 5: there are none
        sys.exit(f"collecting the long tests failed:\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def _run(argv: tuple[str, ...]) -> dict[str, Any]:
    start = time.monotonic()
    done = _pytest("-q", *argv)
    row = {
        "outcome": "passed" if done.returncode == 0 else "failed",
        "seconds": round(time.monotonic() - start, 1),
    }
    if done.returncode != 0:
        row["output"] = (done.stdout + done.stderr)[-8000:]
        print(row["output"], flush=True)
    return row


def _pytest(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _write(target: Path, result: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.rename(target)


def _commit() -> tuple[str, bool]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    changes = ["git", "status", "--porcelain", "--", ".", ":!benchmarks/results"]
    dirty = bool(subprocess.run(changes, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    return commit.stdout.strip() + ("-dirty" if dirty else ""), dirty


if __name__ == "__main__":
    sys.exit(main())
