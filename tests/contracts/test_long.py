"""`make test-long` runs a row again when anything has changed that the row reads."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from benchmark import benchmark

ROOT = Path(__file__).resolve().parents[2]
LONG = vars(benchmark("long"))
PARTS = {
    "medha": "core", "medha_links": "core", "medha_cli": "cli", "medha_operator": "operator", "medha_router": "router",
    "medha_papers": "papers", "medha_process": "core", "medha_sim": "sim", "medha_traces": "core", "medha_worker": "worker",
}  # fmt: skip


QUICK = "tests/contracts/test_benchmarks.py::test_a_quick_run_ends_and_writes_its_claims"


@pytest.mark.parametrize(
    "path",
    [
        "benchmarks/recovery.py",
        "examples/needle.yaml",
        "pyproject.toml",
        "worker/medha_worker/rank/process.py",
        "tests/serving",
    ],
)
def test_a_row_depends_on_the_programs_examples_and_settings_that_its_tests_use(path: str) -> None:
    read = files_read_by("tests/serving/test_recovery.py::test")
    assert any(Path(one).is_relative_to(path) for one in read)
    assert "benchmarks/results/long.json" not in read


@pytest.mark.parametrize(
    ("test", "path"),
    [
        ("tests/router", "tests/core/recorded/wire_v1.jsonl"),
        ("tests/campaign/test_sample.py::test", "tests/cluster/api.py"),
        ("tests/chart/test_findings.py::test", "charts/medha/values.yaml"),
        ("tests/chart/test_findings.py::test", "docs/chart-findings.md"),
        ("tests/worker/rank/test_store_faults.py::test", "tests/cluster/binaries.py"),
        ("tests/worker/rank/test_store_faults.py::test", "tests/held_writes.c"),
        ("tests/serving/test_real_collector.py::test", "tests/cluster/go/collector/main.go"),
        (f"{QUICK}[operator_scale]", "tests/cluster/binaries.py"),
    ],
)
def test_a_row_depends_on_what_lies_in_other_folders_of_tests_and_beside_the_code(
    test: str, path: str
) -> None:
    assert path in files_read_by(test)


@pytest.mark.parametrize("test", ["tests/serving/test_links.py::test", f"{QUICK}[convoy]"])
def test_a_row_reads_no_cluster_if_its_tests_and_benchmarks_import_none(test: str) -> None:
    assert not any(path.startswith("tests/cluster/") for path in files_read_by(test))


@pytest.mark.parametrize("folder", LONG["READ"])
def test_tests_of_a_folder_that_reads_few_parts_name_no_other(folder: str) -> None:
    """What those parts stand on is the core alone: import-linter sees to that."""
    texts = [path.read_text() for path in (ROOT / folder).rglob("*.py")]
    named = {
        PARTS[name] for text in texts for name in re.findall(r"\bmedha(?:_[a-z]+)?\b", text) if name in PARTS
    }
    assert named
    assert named <= {path.partition("/")[0] for path in LONG["read_by"](folder)}


TOKENIZERS = "worker/medha_worker/checkpoints/tokenizer_files.py"


@pytest.mark.parametrize(
    ("test", "reads"),
    [
        ("tests/worker/controller/test_router_gone.py::test", True),
        ("tests/worker/rank/test_grammar_masks.py::test", True),
        ("tests/worker/rank/test_rank.py::test", True),
        ("tests/worker/replicas/test_exactness.py::test", False),
        ("tests/worker", True),
        ("tests/serving/test_recovery.py::test", True),
    ],
)
def test_a_row_of_the_worker_depends_on_tokenizer_files_only_if_its_tests_may_run_them(
    test: str, reads: bool
) -> None:
    assert (TOKENIZERS in files_read_by(test)) == reads


def test_tokenizers_are_read_where_the_pattern_of_their_rows_expects_it() -> None:
    """A further caller may need a further word in `RUN_BY_FEW`."""
    imported = "from medha_worker.checkpoints.tokenizer_files import"
    callers = {path.stem for path in (ROOT / "worker").rglob("*.py") if imported in path.read_text()}
    assert callers == {
        "draft_checkpoint", "fetch_model", "grammar_masks", "measured_kv_scales", "read_bundle",
    }  # fmt: skip


def test_of_the_papers_study_the_cores_tests_read_one_module_that_stands_on_the_core_alone() -> None:
    texts = [path.read_text() for path in (ROOT / "tests" / "core").rglob("*.py")]
    assert {name for text in texts for name in re.findall(r"\bmedha_papers[.\w]*", text)} == {
        "medha_papers.single_server"
    }
    tree = ast.parse((ROOT / "papers" / "medha_papers" / "single_server.py").read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("medha_") for name in modules)


def test_a_replica_on_one_machine_loads_none_of_the_commands_that_its_rows_do_not_read() -> None:
    show = "import sys, medha_cli.up_command; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True).stdout
    ours = {name for name in loaded.split() if name.startswith("medha_")}
    assert "medha_cli.manifest" in ours
    assert not ours & {f"medha_cli.{name}" for name in LONG["COMMANDS"]}
    assert not any(name.startswith(("medha_sim", "medha_operator")) for name in ours)


@pytest.mark.parametrize(
    ("test", "reads", "leaves"),
    [
        (
            "tests/serving/test_links.py::test",
            ["test_links.py", "test_failures.py", "conftest.py"],
            ["test_mesh.py", "test_recovery.py"],
        ),
        (
            "tests/serving/test_recovery.py::test",
            ["test_recovery.py", "recovery.py", "harness.py"],
            ["test_links.py"],
        ),
        ("tests/serving/test_needle.py::test", ["test_needle.py"], ["recovery.py", "test_recovery.py"]),
        ("tests/worker/test_foreign.py::test", ["test_controller.py", "test_rank.py"], ["test_mesh.py"]),
        ("tests/worker", ["test_exactness.py", "test_model_transformer.py"], ["test_engine_load.py"]),
        ("tests/core", ["test_replica_controller_machine.py", "replayed.py"], ["test_run_ahead.py"]),
        (
            "tests/core/kv/test_disk_tier.py::test",
            ["conftest.py", "drafted.py", "test_store_kv.py", "pools.py", "single_server.py"],
            ["replayed.py", "test_pools.py", "test_guarded.py", "process.py"],
        ),
        (
            "tests/worker/replicas/test_controlled.py::test",
            ["ranks.py", "quantised_models.py"],
            ["eagle3_reference.py"],
        ),
        (
            "tests/worker/replicas/test_drawn_models.py::test",
            ["quantised_models.py", "test_exactness.py"],
            ["eagle3_reference.py"],
        ),
    ],
)
def test_a_row_reads_of_its_folder_what_its_own_tests_need(
    test: str, reads: list[str], leaves: list[str]
) -> None:
    names = {Path(path).name for path in files_read_by(test)}
    assert set(reads) <= names
    assert not set(leaves) & names


def test_a_quick_run_reads_its_benchmark_and_what_that_needs_and_no_other() -> None:
    read = files_read_by(f"{QUICK}[convoy]")
    benchmarks = {Path(path).stem for path in read if path.startswith("benchmarks/")}
    assert benchmarks == {"convoy", "convoy_llama", "convoy_trace", "harness", "served"}
    assert "worker/medha_worker/rank/process.py" in read


@pytest.mark.parametrize(
    ("edited", "text", "holds_until_commit", "holds"),
    [
        ("README.md", "two\n", True, True),
        ("tests/worker/rank/test_rank.py", "TWO = 2\n", False, False),
        ("tests/worker/test_plain.py", "TWO = 2\n", True, True),
        ("core/medha/wire/frames.py", "TWO = 2\n", False, False),
        ("core/medha/wire/frames.py", "# a comment\n\n", False, True),
        ("core/medha/wire/frames.py", '"""The last number."""\n', False, True),
        ("core/medha/wire/frames.txt", "# a comment\n", False, False),
    ],
)
def test_a_row_holds_until_something_that_it_reads_is_committed_anew(
    edited: str, text: str, holds_until_commit: bool, holds: bool, tmp_path: Path
) -> None:
    def git(*argv: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *who, *argv], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    argv = ("tests/worker", "-q")
    paths = {
        "README.md": "one\n",
        "tests/worker/rank/test_rank.py": "import hypothesis\n",
        "tests/worker/test_plain.py": "import pytest\n",
        "core/medha/wire/frames.py": "ONE = 1\n",
        "core/medha/wire/frames.txt": "one\n",
        "benchmarks/long.py": "",
    }
    git("init", "-q")
    for path, first in paths.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(first)
    (tmp_path / "benchmarks" / "long.py").write_text((ROOT / "benchmarks" / "long.py").read_text())
    git("add", "-A")
    git("commit", "-qm", "one")

    def held(row: dict[str, object], argv: tuple[str, ...]) -> bool:
        found: bool = runpy.run_path(str(tmp_path / "benchmarks" / "long.py"))["_holds"](row, argv)
        return found

    row = {"outcome": "passed", "argv": list(argv), "commit": git("rev-parse", "HEAD")}
    assert held(row, argv)
    assert not held(row, (*argv, "--hypothesis-seed=1"))
    assert not held(row | {"commit": "0123456789ab"}, argv)
    with (tmp_path / edited).open("a") as file:
        file.write(text)
    assert held(row, argv) is holds_until_commit
    git("commit", "-qam", "two")
    assert held(row, argv) is holds


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ('def f(x):\n    """Other."""\n    return  x  # so\n', True),
        ("def f(x):\n    return x\n", True),
        ('def f(x):\n    """One."""\n    return x + 1\n', False),
        ('"""A module."""\ndef f(x):\n    """One."""\n    return "x"\n', False),
    ],
)
def test_comments_docstrings_and_layout_are_no_part_of_code(changed: str, is_same: bool) -> None:
    first = 'def f(x):\n    """One."""\n    return x\n'
    assert (LONG["code_of"](first) == LONG["code_of"](changed)) is is_same


def test_a_campaign_runs_the_property_tests_of_a_package_in_all_of_its_wings() -> None:
    tests = [
        path.relative_to(ROOT).parts for path in (ROOT / "tests").rglob("test_*.py") if uses_hypothesis(path)
    ]
    assert {"core", "worker"} <= {parts[1] for parts in tests if len(parts) == 4}
    assert LONG["folders_of_properties"]() == sorted({f"tests/{parts[1]}" for parts in tests})


def test_rows_of_a_file_run_together_and_a_campaign_alone() -> None:
    rows = {
        "tests/core/test_a.py::one": ("tests/core/test_a.py::one", "-m", "long"),
        "tests/core/test_a.py::two": ("tests/core/test_a.py::two", "-m", "long"),
        "tests/core/test_b.py::one": ("tests/core/test_b.py::one", "-m", "long"),
        "properties of tests/core, seed 0": ("tests/core", "--hypothesis-seed=0"),
        "properties of tests/core, seed 1": ("tests/core", "--hypothesis-seed=1"),
    }
    assert [len(group) for group in LONG["groups"](rows)] == [2, 1, 1, 1]


def test_each_test_of_a_process_has_its_own_outcome_also_the_one_that_ends_the_process(
    tmp_path: Path,
) -> None:
    path = tmp_path / "test_four.py"
    path.write_text(
        "import os, pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 1 == 2\n"
        "def test_unasked(): pytest.skip('no device')\n"
        "def test_fatal(): os._exit(7)\n"
        "def test_after(): pass\n"
    )
    found = dict(LONG["_run_tests"]([str(path)], (), Event()))
    by_name = {name.partition("::")[2]: row for name, row in found.items()}
    assert {name: row["outcome"] for name, row in by_name.items()} == {
        "test_right": "passed", "test_wrong": "failed", "test_unasked": "skipped", "test_fatal": "failed",
    }  # fmt: skip
    assert "assert 1 == 2" in by_name["test_wrong"]["output"]
    assert "no device" in by_name["test_unasked"]["output"]
    assert "ended with status 7" in by_name["test_fatal"]["output"]


def test_a_process_of_rows_finds_the_folders_of_tests_before_benchmarks_of_the_same_name(
    tmp_path: Path,
) -> None:
    path = tmp_path / "test_folder.py"
    path.write_text("def test_right():\n    import campaign.runner\n")
    [(_, row)] = LONG["_run_tests"](
        [str(path), "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")], (), Event()
    )
    assert row["outcome"] == "passed", row


def files_read_by(test: str) -> list[str]:
    listed = ["git", "ls-files", "--", *LONG["read_by"](test)]
    return subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def uses_hypothesis(path: Path) -> bool:
    return re.search(r"^(from|import) hypothesis", path.read_text(), re.MULTILINE) is not None
