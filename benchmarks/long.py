"""`make test-long`: what does not fit CI, one process per row, resumed where it was stopped.

Rows are every test marked `long`, and seeded campaigns: the property tests of each folder with 1,000 examples each and
another seed. After each row `benchmarks/results/long.json` is written, with a digest of the code that the row reads: rows
that have passed for this code are not run again. With uncommitted changes in it they always are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "long.json"
PROPERTIES = ("-m", "hypothesis and not long", "--hypothesis-profile=campaign", "--timeout=1800")
SHARED = ("constraints.txt", "pyproject.toml", "tests/benchmark.py", "tests/conftest.py", "tests/frames.py")
"""What any row may read, beside its own folder of tests."""
READ = {
    "tests/core": ("benchmarks/fit.py", "core", "sim/medha_sim/__init__.py", "sim/medha_sim/one_server.py"),
    "tests/reconcile": ("core", "operator"),
    "tests/router": ("core", "router"),
    "tests/worker": ("core", "worker"),
}
"""What the tests of a folder read besides; folders that are not named may read all parts, and the programs in benchmarks/."""
PARTS = ("cli", "core", "examples", "operator", "router", "sim", "worker")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="campaigns to run, seeds 0 up to this (default 5)"
    )
    parser.add_argument("--match", default="", help="only rows whose name contains this")
    parser.add_argument("--list", action="store_true", help="say what is left to run, and run nothing")
    arguments = parser.parse_args()

    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = {node: (node, "-m", "long", "--timeout=3600") for node in _tests("long")}
    folders = sorted({str(Path(node).parent) for node in _tests("hypothesis and not long")})
    for seed in range(arguments.seeds):
        for folder in folders:
            rows[f"properties of {folder}, seed {seed}"] = (folder, *PROPERTIES, f"--hypothesis-seed={seed}")
    chosen = {name: argv for name, argv in rows.items() if arguments.match in name}
    kept = {name: row for name, row in kept.items() if name in rows}
    code = {name: _digest(argv[0]) for name, argv in chosen.items()}
    left = [
        name
        for name in chosen
        if code[name] == "uncommitted"
        or (row := kept.get(name)) is None
        or (row["outcome"], row["code"]) != ("passed", code[name])
    ]
    print(
        f"{len(chosen)} rows, {len(chosen) - len(left)} passed before; results in {RESULTS.relative_to(ROOT)}"
    )
    if arguments.list:
        print(*left, sep="\n")
        return 0
    for number, name in enumerate(left, start=1):
        print(f"[{number}/{len(left)}] {name}", flush=True)
        kept[name] = {"code": code[name], "commit": _git("rev-parse", "--short=12", "HEAD").strip()} | _run(
            chosen[name]
        )
        print(f"    {kept[name]['outcome']}, {kept[name]['seconds']} s", flush=True)
        _write(kept)
    failed = [name for name in chosen if kept[name]["outcome"] != "passed"]
    print(f"{len(chosen) - len(failed)} passed, {len(failed)} failed", *failed, sep="\n")
    return 1 if failed else 0


def _tests(marks: str) -> Iterator[str]:
    done = _pytest("--collect-only", "-q", "-m", marks)
    if done.returncode not in (0, 5):  # 5: there are none
        sys.exit(f"collecting tests failed:\n{done.stdout}{done.stderr}")
    return (line for line in done.stdout.splitlines() if "::" in line)


def _digest(test: str) -> str:
    """Of the code that a test reads, as committed; "uncommitted" where there are changes to it."""
    paths = read_by(test)
    if _git("status", "--porcelain", "--", *paths):
        return "uncommitted"
    trees = _git("rev-parse", *(f"HEAD:{path}" for path in paths))
    return hashlib.sha256(trees.encode()).hexdigest()[:12]


def read_by(test: str) -> list[str]:
    """Files and folders that a row may read."""
    folder = test if "::" not in test else str(Path(test.partition("::")[0]).parent)
    if folder in READ:
        return [*SHARED, *READ[folder], folder]
    return [*SHARED, *PARTS, *_git("ls-files", "--", "benchmarks/*.py").split(), folder]


def _git(*argv: str) -> str:
    return subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=True).stdout


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


def _write(rows: dict[str, Any]) -> None:
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    partial.rename(RESULTS)


if __name__ == "__main__":
    sys.exit(main())
