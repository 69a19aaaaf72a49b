"""Run what does not fit CI (`make test-long`), and resume where the last run was stopped.

A row is a test marked `long`, or a seeded campaign: the property tests of a folder with 1,000 examples each and another
seed. `benchmarks/results/long.json` is written after each row, with the commit that the row ran on. A row that has passed
is not run again until a file that it reads has changed; comments and docstrings of Python files do not count. If such a file
has uncommitted changes, the row always runs.

The tests of a file run in one process, which is started again if it ends in one of them. With `--jobs 2`, two files run at a
time, but never two that start a Kubernetes. Both share the machine, so rows that fail then run once more at the end, one
after the other; a row that passes there has the field `alone`.

    python benchmarks/long.py --list
    python benchmarks/long.py --match tests/core tests/router --seeds 1
    python benchmarks/long.py --jobs 2
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from threading import Event, Lock
from typing import IO, Any

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
QUICK_RUN = re.compile(r"tests/contracts/test_benchmarks\.py::\w+\[(\w+)\]")
"""A row that runs a benchmark, with that benchmark's name."""
COMMANDS = (
    "listing", "model_shapes", "plan_command", "profile_command", "reference", "render_command", "replica_snapshot",
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
        "cli", "core", "examples", "router", "sim", "worker",
        *(f":(exclude)cli/medha_cli/{name}.py" for name in COMMANDS),
    ),
    "tests/worker": ("core", "worker"),
}  # fmt: skip
"""The further files that the rows of a folder read, as git's pathspecs; rows of other folders may read `ANYTHING`."""
RUN_BY_FEW = {
    "worker/medha_worker/checkpoints/tokenizer_files.py": (
        r"tokenizer|[Gg]rammar|draft_config|[Bb]undle|measured_kv|RankProcess|medha_worker\.(controller|rank)\.process"
    ),
}
"""Files of the worker that only some rows of tests/worker run, with a pattern.

A row depends on such a file if its tests or their helpers match the pattern.
"""
ANYTHING = (
    "charts", "cli", "core", "crds", "dashboards", "docs/chart-findings.md",
    "examples", "operator", "papers", "release", "router", "sim", "worker",
)  # fmt: skip
HELPERS = {
    r"(from|import) (campaign|chart|cluster)\b": ("tests/cluster",),
    r"(from|import) serving\.tier_leaks\b": ("tests/serving/tier_leaks.py",),
    r"\bdashboard_plot\b": ("dashboards", "tests/dashboard_plot.py"),
    r"\bfaulty_proxy\b": ("tests/faulty_proxy.py",),
    r"\bheld_points\b": ("tests/held_points.py", "tests/held_writes.c"),
    r"\bobject_store\b": ("tests/object_store.py", "tests/cluster/binaries.py", "tests/cluster/go/object-store"),
    r"\bsituations\b": ("tests/situations",),
    r"\bsmall_disk\b": ("tests/small_disk.py",),
}  # fmt: skip
"""Patterns that name helpers of tests outside their folders, and the files that rows read whose tests or benchmarks match."""
_IMPORT = re.compile(r"^ *(from \S+ import (?:\([^)]*\)|.*))", re.MULTILINE)


CLUSTERS = ("tests/campaign", "tests/chart", "tests/cluster", "tests/gateways")
"""Folders whose tests start a Kubernetes, of which a machine has one at a time."""
POLL_SECONDS = 0.5

Row = dict[str, Any]
Group = Mapping[str, tuple[str, ...]]
"""Rows with the arguments of pytest for each: the tests of a file, or a campaign."""


def main() -> int:
    options = parser(__doc__, json=False)
    options.add_argument(
        "--seeds", type=int, default=5, help="campaigns to run, seeds 0 up to this (default 5)"
    )
    options.add_argument(
        "--match", nargs="+", default=[""], help="only rows whose name contains one of these"
    )
    options.add_argument(
        "--jobs", type=int, choices=(1, 2), default=1, help="files to run at a time (default 1)"
    )
    options.add_argument("--list", action="store_true", help="say what is left to run, and run nothing")
    arguments = options.parse_args()

    rows = {node: (node, "-m", "long", "--timeout=3600") for node in _long_tests()}
    for seed in range(arguments.seeds):
        for folder in folders_of_properties():
            rows[f"properties of {folder}, seed {seed}"] = (folder, *PROPERTIES, f"--hypothesis-seed={seed}")
    chosen = {name: argv for name, argv in rows.items() if any(part in name for part in arguments.match)}
    results = Results(rows)
    left = {name: argv for name, argv in chosen.items() if not _holds(results.kept.get(name), argv)}
    print(
        f"{len(chosen)} rows, {len(chosen) - len(left)} passed before; results in {RESULTS.relative_to(ROOT)}"
    )
    if arguments.list:
        print(*left, sep="\n")
        return 0
    results.run(groups(left), arguments.jobs)
    failed = [name for name in left if results.kept[name]["outcome"] == "failed"]
    if arguments.jobs > 1 and failed:
        print(f"{len(failed)} rows that failed beside others run once more, alone", flush=True)
        results.run([{name: left[name]} for name in failed], 1, alone=True)
    outcomes = {name: results.kept[name]["outcome"] for name in chosen}
    for outcome in ("failed", "skipped"):
        names = [name for name in outcomes if outcomes[name] == outcome]
        print(f"{len(names)} {outcome}", *names, sep="\n    ")
    print(f"{list(outcomes.values()).count('passed')} passed")
    return 1 if "failed" in outcomes.values() else 0


def groups(rows: Group) -> list[Group]:
    """Return the rows that run in one process each: those of a file together, a campaign alone."""

    def process(item: tuple[str, tuple[str, ...]]) -> str:
        name, argv = item
        return argv[0].partition("::")[0] if name == argv[0] else name

    return [dict(group) for _, group in itertools.groupby(rows.items(), key=process)]


class Results:
    """The file of results, and the runs that fill it."""

    def __init__(self, rows: Mapping[str, object]) -> None:
        """Read what is kept of these rows, and forget all others."""
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        self.kept: dict[str, Row] = {name: row for name, row in kept.items() if name in rows}
        self._lock, self._cluster, self._stopped = Lock(), Lock(), Event()

    def run(self, waiting: Sequence[Group], jobs: int, *, alone: bool = False) -> None:
        """Run groups of rows, so many at a time; a second job takes the last groups first."""
        left = deque(waiting)

        def job(number: int) -> None:
            while not self._stopped.is_set():
                with self._lock:
                    if not left:
                        return
                    group = left.pop() if number else left.popleft()
                    print(f"{next(iter(group))}: {len(group)} rows; {len(left)} groups wait", flush=True)
                self._run_group(group, alone)

        with ThreadPoolExecutor(jobs) as pool:
            try:
                for done in [pool.submit(job, number) for number in range(jobs)]:
                    done.result()
            except BaseException:
                self._stopped.set()
                raise

    def _run_group(self, group: Group, alone: bool) -> None:
        test = next(iter(group.values()))[0]
        commit = _commit(test)
        with self._cluster if test.startswith(CLUSTERS) else nullcontext():
            for name, row in _run(group, self._stopped):
                with self._lock:
                    self.kept[name] = {"argv": list(group[name]), "commit": commit} | row
                    self.kept[name] |= {"alone": True} if alone else {}
                    print(f"{name}\n    {row['outcome']}, {row['seconds']} s", flush=True)
                    print(row.get("output", ""), end="", flush=True)
                    write(RESULTS, self.kept)


def _long_tests() -> Iterator[str]:
    done = _pytest("--collect-only", "-q", "-m", "long")
    if done.returncode not in (0, 5):  # 5: no test was found
        sys.exit(f"collecting tests failed:\n{done.stdout}{done.stderr}")
    return (line for line in done.stdout.splitlines() if "::" in line)


def folders_of_properties() -> list[str]:
    """Return the folders of `tests` that have property tests, in themselves or in their wings."""
    tests = (
        path.relative_to(ROOT) for path in (ROOT / "tests").glob("*/**/test_*.py") if _has_properties(path)
    )
    return sorted({_folder(str(path)) for path in tests})


def _folder(name: str) -> str:
    """Return the folder of `tests` that a file or folder lies in or is: a package's folder, if the file is in a wing."""
    return str(Path(*Path(name).parts[:2]))


def _python_files(folder: str) -> set[Path]:
    """Return the Python files of a folder of `tests` and of its wings, which are the folders in it that have tests."""
    wings = {path.parent for path in (ROOT / folder).rglob("test_*.py")}
    return {path for wing in {ROOT / folder, *wings} for path in wing.glob("*.py")}


def _has_properties(path: Path) -> bool:
    """Return whether a file has property tests, by its imports: to collect all tests would take a minute."""
    return re.search(r"^(from|import) hypothesis\b", path.read_text(), re.MULTILINE) is not None


def _holds(row: dict[str, Any] | None, argv: tuple[str, ...]) -> bool:
    """Return whether a row has passed with these arguments and the present files."""
    if row is None or (row["outcome"], row["argv"]) != ("passed", list(argv)):
        return False
    paths = read_by(argv[0])
    if row["commit"] == UNCOMMITTED or _git("status", "--porcelain", "--", *paths):
        return False
    differ = ["git", "diff", "--name-only", "--no-renames", row["commit"], "HEAD", "--", *paths]
    changed = subprocess.run(differ, cwd=ROOT, capture_output=True, text=True, check=False)
    return changed.returncode == 0 and all(
        _has_same_code(path, row["commit"]) for path in changed.stdout.splitlines()
    )


@cache
def _has_same_code(path: str, commit: str) -> bool:
    """Return whether a file is Python that differs from a commit's in comments, docstrings and layout alone."""
    if not path.endswith(".py"):
        return False
    texts = [
        subprocess.run(
            ["git", "show", f"{at}:{path}"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout
        for at in (commit, "HEAD")
    ]
    return all(texts) and len({code_of(text) for text in texts}) == 1


def code_of(source: str) -> str:
    """Return the syntax tree of Python source as text, which has no comments and no layout; docstrings are left out."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_docstring(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_docstring(statement: ast.stmt) -> bool:
    """Return whether a statement is a string alone, as docstrings of attributes are, too."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _commit(test: str) -> str:
    """Return the commit that a test runs on now; `UNCOMMITTED` if a file that it reads has changed since."""
    if _git("status", "--porcelain", "--", *read_by(test)):
        return UNCOMMITTED
    return _git("rev-parse", "--short=12", "HEAD").strip()


def read_by(test: str) -> list[str]:
    """Return pathspecs of the files that a row may read.

    Of the Python files in its folder and in all wings of that, these are its own tests and what they need; of the
    benchmarks, those that they run or name.
    """
    name = test.partition("::")[0]
    folder = _folder(name)
    beside = _python_files(folder)
    # A row that is a folder runs its property tests.
    own = (
        {path for path in beside if _is_test(path) and _has_properties(path)}
        if name == test
        else {ROOT / name}
    )
    needed = _needed(own, beside)
    others = [f":(exclude){path.relative_to(ROOT)}" for path in sorted(beside - needed)]
    benchmarks = _benchmarks(test, [path.read_text() for path in needed if _is_test(path)])
    texts = [path.read_text() for path in needed | benchmarks]
    helpers = [
        path
        for pattern, paths in HELPERS.items()
        if any(re.search(pattern, text) for text in texts)
        for path in paths
    ]
    if folder == "tests/worker":
        others += [
            f":(exclude){path}"
            for path, pattern in RUN_BY_FEW.items()
            if not any(re.search(pattern, text) for text in texts)
        ]
    named = [f"benchmarks/{path.name}" for path in sorted(benchmarks)]
    return [*SHARED, folder, *others, *named, *helpers, *READ.get(folder, ANYTHING)]


def _benchmarks(test: str, texts: Iterable[str]) -> set[Path]:
    """Return the benchmark that a row runs, those that its tests name in `texts`, and what these import or name."""
    every = set((ROOT / "benchmarks").glob("*.py"))
    if quick := QUICK_RUN.fullmatch(test):
        found = new = {path for path in every if path.stem == quick[1]}
    else:
        found = new = {
            path
            for path in every
            if any(f'"{path.name}"' in text or f'benchmark("{path.stem}")' in text for text in texts)
        }
    while new:
        texts = [path.read_text() for path in new]
        new = {path for path in every - found if any(_names(text, path) for text in texts)}
        found = found | new
    return found


def _names(text: str, benchmark: Path) -> bool:
    """Return whether a benchmark's text imports another, or names its file."""
    pattern = rf'^(from|import) {benchmark.stem}\b|"{re.escape(benchmark.name)}"'
    return re.search(pattern, text, re.MULTILINE) is not None


def _needed(tests: set[Path], beside: set[Path]) -> set[Path]:
    """Return tests and what they need of the files `beside` them, directly or not.

    A test is needed where something is imported from it. Any other module is needed where its name occurs.
    """
    found = new = tests | {path for path in beside if path.name in ("__init__.py", "conftest.py")}
    while new:
        texts = [path.read_text() for path in new]
        imports = " ".join(statement for text in texts for statement in _IMPORT.findall(text))
        words = {word for text in texts for word in re.findall(r"\w+", text)}
        tests_named = set(re.findall(r"\btest_\w+", imports))
        new = {path for path in beside - found if path.stem in (tests_named if _is_test(path) else words)}
        found = found | new
    return found


def _is_test(path: Path) -> bool:
    return path.name.startswith("test_")


def _git(*argv: str) -> str:
    return subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _run(group: Group, stopped: Event) -> Iterator[tuple[str, Row]]:
    """Run the rows of one process; yield each with its outcome, as soon as that is known."""
    [name], argv = list(group)[:1], next(iter(group.values()))
    if argv[0] != name:
        yield name, _run_campaign(argv)
        return
    left = list(group)
    while left and not stopped.is_set():
        ended = False
        for found, row in _run_tests(left, argv[1:], stopped):
            left.remove(found)
            yield found, row
            ended = True
        if not ended and not stopped.is_set():  # what ends the process before any test ends it again
            yield from ((one, {"outcome": "failed", "seconds": 0.0, "output": "not run\n"}) for one in left)
            return


def _run_tests(tests: Sequence[str], options: Sequence[str], stopped: Event) -> Iterator[tuple[str, Row]]:
    with tempfile.TemporaryDirectory(prefix="medha-long-") as folder:
        reports, printed = Path(folder) / "reports", Path(folder) / "printed"
        reports.touch()
        command = [
            sys.executable,
            "-P",  # else modules of this folder hide folders of tests of the same name
            str(Path(__file__).with_name("long_rows.py")),
            str(reports),
            *tests,
            *options,
        ]
        with printed.open("w") as target, reports.open() as lines:
            process = subprocess.Popen(command, cwd=ROOT, stdout=target, stderr=subprocess.STDOUT)
            phases: list[Row] = []
            alive = True
            while alive:
                alive = process.poll() is None
                for line in _whole_lines(lines):
                    phases.append(json.loads(line))
                    if phases[-1]["phase"] == "teardown":
                        yield phases[0]["test"], outcome_of(phases)
                        phases = []
                if alive:
                    time.sleep(POLL_SECONDS)
        if stopped.is_set():
            return
        if phases or process.returncode not in (0, 1):  # 1: a test failed, which its reports say
            print(printed.read_text()[-8000:], flush=True)
        if phases:  # the process ended in this test
            output = f"the process ended with status {process.returncode}\n{printed.read_text()[-8000:]}"
            yield phases[0]["test"], {"outcome": "failed", "seconds": 0.0, "output": output}


def _whole_lines(file: IO[str]) -> Iterator[str]:
    """Yield the lines that another process has written by now, without one that it still writes."""
    while True:
        before, line = file.tell(), file.readline()
        if not line.endswith("\n"):
            file.seek(before)
            return
        yield line


def outcome_of(phases: Sequence[Row]) -> Row:
    """Return the outcome of a test from its reports (`long_rows.py`)."""
    ended = [phase for phase in phases if phase["phase"] != "start"]
    outcomes = {phase["outcome"] for phase in ended}
    outcome = next((one for one in ("failed", "skipped") if one in outcomes), "passed")
    row: Row = {"outcome": outcome, "seconds": round(sum(phase["seconds"] for phase in ended), 1)}
    # Results are committed, so they name no folder of this machine.
    output = "\n".join(phase["output"] for phase in ended if phase["output"]).replace(f"{ROOT}/", "")
    return row | ({"output": f"{output}\n"} if output else {})


def _run_campaign(argv: Sequence[str]) -> Row:
    start = time.monotonic()
    done = _pytest("-q", *argv)
    row: Row = {
        "outcome": "passed" if done.returncode == 0 else "failed",
        "seconds": round(time.monotonic() - start, 1),
    }
    return row if done.returncode == 0 else row | {"output": (done.stdout + done.stderr)[-8000:]}


def _pytest(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    exit_with(main)
