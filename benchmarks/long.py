"""Run what does not fit CI (`make test-long`), one process per row, and resume where the last run was stopped.

A row is a test marked `long`, or a seeded campaign: the property tests of a folder with 1,000 examples each and another
seed. `benchmarks/results/long.json` is written after each row, with the commit that the row ran on. A row that has passed
is not run again until a file that it reads has changed. If such a file has uncommitted changes, the row always runs.

    python benchmarks/long.py --list
    python benchmarks/long.py --match tests/core --seeds 1
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import exit_with, parser, write

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "long.json"
PROPERTIES = ("-m", "hypothesis and not long", "--hypothesis-profile=campaign", "--timeout=1800")
UNCOMMITTED = "uncommitted"
SHARED = (
    "constraints.txt", "pyproject.toml", "tests/benchmark.py", "tests/conftest.py", "tests/core/recorded",
    "tests/forked_part.py", "tests/frames.py", "tests/otlp_collector.py",
)  # fmt: skip
"""The files that any row may read, beside its own folder of tests."""
HELPERS = ("benchmarks/harness.py", "benchmarks/served.py")
"""The files that a row reads if it reads any benchmark."""
COMMANDS = (
    "listing", "plan_command", "profile_command", "reference", "render_command", "replica_snapshot",
    "simulate_command", "top_command", "top_page", "trace_command",
)  # fmt: skip
"""Modules of `cli/medha_cli` that `medha up` does not load."""
READ = {
    "tests/clients": (
        "benchmarks/harness.py", "benchmarks/served.py", "cli", "core", "router", "worker",
        *(f":(exclude)cli/medha_cli/{name}.py" for name in COMMANDS),
    ),
    "tests/core": ("core", "papers/medha_papers/__init__.py", "papers/medha_papers/single_server.py"),
    "tests/gateways": ("charts", "core", "docs/gateways.md", "router", "tests/chart", "tests/cluster", "tests/router"),
    "tests/reconcile": ("core", "operator"),
    "tests/router": ("core", "router", "worker"),
    "tests/serving": (
        "cli", "core", "examples", "router", "sim", "worker", "tests/cluster/binaries.py", "tests/cluster/go/collector", "dashboards", "tests/dashboard_plot.py",
        "tests/situations", *(f":(exclude)cli/medha_cli/{name}.py" for name in COMMANDS),
    ),
    "tests/worker": ("core", "worker"),
}  # fmt: skip
"""The further files that the rows of a folder read, as git's pathspecs; rows of other folders may read `ANYTHING`."""
ANYTHING = (
    "benchmarks/*.py", "charts", "cli", "core", "crds", "dashboards", "docs/chart-findings.md", "examples", "operator", "papers",
    "release", "router", "sim", "tests/cluster", "worker",
)  # fmt: skip
_IMPORT = re.compile(r"^ *(from \S+ import (?:\([^)]*\)|.*))", re.MULTILINE)


def main() -> int:
    options = parser(__doc__, json=False)
    options.add_argument(
        "--seeds", type=int, default=5, help="campaigns to run, seeds 0 up to this (default 5)"
    )
    options.add_argument("--match", default="", help="only rows whose name contains this")
    options.add_argument("--list", action="store_true", help="say what is left to run, and run nothing")
    arguments = options.parse_args()

    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows = {node: (node, "-m", "long", "--timeout=3600") for node in _tests("long")}
    folders = sorted({str(Path(node).parent) for node in _tests("hypothesis and not long")})
    for seed in range(arguments.seeds):
        for folder in folders:
            rows[f"properties of {folder}, seed {seed}"] = (folder, *PROPERTIES, f"--hypothesis-seed={seed}")
    chosen = {name: argv for name, argv in rows.items() if arguments.match in name}
    kept = {name: row for name, row in kept.items() if name in rows}
    left = [name for name, argv in chosen.items() if not _holds(kept.get(name), argv)]
    print(
        f"{len(chosen)} rows, {len(chosen) - len(left)} passed before; results in {RESULTS.relative_to(ROOT)}"
    )
    if arguments.list:
        print(*left, sep="\n")
        return 0
    for number, name in enumerate(left, start=1):
        print(f"[{number}/{len(left)}] {name}", flush=True)
        row = chosen[name]
        kept[name] = {"argv": list(row), "commit": _commit(row[0])} | _run(row)
        print(f"    {kept[name]['outcome']}, {kept[name]['seconds']} s", flush=True)
        write(RESULTS, kept)
    failed = [name for name in chosen if kept[name]["outcome"] != "passed"]
    print(f"{len(chosen) - len(failed)} passed, {len(failed)} failed", *failed, sep="\n")
    return 1 if failed else 0


def _tests(marks: str) -> Iterator[str]:
    done = _pytest("--collect-only", "-q", "-m", marks)
    if done.returncode not in (0, 5):  # 5: no test was found
        sys.exit(f"collecting tests failed:\n{done.stdout}{done.stderr}")
    return (line for line in done.stdout.splitlines() if "::" in line)


def _holds(row: dict[str, Any] | None, argv: tuple[str, ...]) -> bool:
    """Return whether a row has passed with these arguments and the present files."""
    if row is None or (row["outcome"], row["argv"]) != ("passed", list(argv)):
        return False
    paths = read_by(argv[0])
    if row["commit"] == UNCOMMITTED or _git("status", "--porcelain", "--", *paths):
        return False
    unchanged = ["git", "diff", "--quiet", row["commit"], "HEAD", "--", *paths]
    return subprocess.run(unchanged, cwd=ROOT, capture_output=True, check=False).returncode == 0


def _commit(test: str) -> str:
    """Return the commit that a test runs on now; `UNCOMMITTED` if a file that it reads has changed since."""
    if _git("status", "--porcelain", "--", *read_by(test)):
        return UNCOMMITTED
    return _git("rev-parse", "--short=12", "HEAD").strip()


def read_by(test: str) -> list[str]:
    """Return pathspecs of the files that a row may read.

    Of the tests in its folder, these are its own and those from which they import; of the benchmarks, those that it names.
    """
    name = test.partition("::")[0]
    folder = name if name == test else str(Path(name).parent)
    files = set((ROOT / folder).glob("test_*.py"))
    # A row that is a folder runs its property tests.
    own = {ROOT / name} if name != test else {path for path in files if "hypothesis" in path.read_text()}
    others = [f":(exclude){path.relative_to(ROOT)}" for path in sorted(files - _named(own))]
    texts = [path.read_text() for path in _named(own)]
    benchmarks = [
        f"benchmarks/{path.name}"
        for path in sorted((ROOT / "benchmarks").glob("*.py"))
        if any(f'"{path.name}"' in text or f'benchmark("{path.stem}")' in text for text in texts)
    ]
    helpers = HELPERS if benchmarks else ()
    return [*SHARED, folder, *others, *benchmarks, *helpers, *READ.get(folder, ANYTHING)]


def _named(tests: set[Path]) -> set[Path]:
    """Return the files of `tests`, the tests from which they import, and so on."""
    found = new = set(tests)
    while new:
        named = {
            test.with_name(f"{name}.py")
            for test in new
            for statement in _IMPORT.findall(test.read_text())
            for name in re.findall(r"\btest_\w+", statement)
        }
        new = {path for path in named - found if path.exists()}
        found = found | new
    return found


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


if __name__ == "__main__":
    exit_with(main)
