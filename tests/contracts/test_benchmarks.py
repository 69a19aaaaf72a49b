"""Every benchmark takes its arguments, claims and file from one harness, so that all can be run and read alike."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import FOLDER, benchmark

HELPERS = {
    "harness", "client_stream", "served", "serve_engines", "fleet", "random_llama", "autoscale_page", "convoy_page", "gpu_page", "models_page", "gpu_sources", "chaos_accounts", "convoy_trace", "convoy_llama",
    "scheduler_vllm", "gpu_vllm", "long_rows", "tier_rates",
}  # fmt: skip
"""Files that are not started by hand. `convoy.py`, `scheduler.py` and `gpu.py` start theirs in an interpreter that has the peer."""
SCRIPTS = sorted(script.stem for script in FOLDER.glob("*.py") if script.stem not in HELPERS)
WITHOUT_CLAIMS = {"campaign", "fit_lengths", "long"}
MEASURING = sorted(set(SCRIPTS) - WITHOUT_CLAIMS)
ELSEWHERE = {"argparse.ArgumentParser", "click.command", "json.dump", "signal.signal"}
"""Calls that belong to the harness."""
SHOW_HELP = """
import contextlib, io, json, runpy, sys
folder, *names = sys.argv[1:]
sys.path[0] = folder
said = {}
for name in names:
    sys.argv = [f"{folder}/{name}.py", "--help"]
    output, status = io.StringIO(), None
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    said[name] = (status, output.getvalue())
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[int, str]]:
    """Exit status and output of each script's `--help`: all in one process, which loads torch once."""
    command = [sys.executable, "-c", SHOW_HELP, str(FOLDER), *SCRIPTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_in_its_help_how_it_is_called(name: str, helps: dict[str, tuple[int, str]]) -> None:
    status, text = helps[name]
    assert status == 0
    options = text.partition("options:")[2]
    assert f"    python benchmarks/{name}.py" in text.partition("options:")[0]
    if name in MEASURING:
        assert "--quick" in options
        assert "--json FILE" in options


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(MEASURING) - {"gpu", "fit"}))
def test_a_quick_run_ends_and_writes_its_claims(name: str, tmp_path: Path) -> None:
    """`gpu.py` needs a GPU, and `test_gpu_check.py` runs its parts. `fit.py` needs measurements, and `test_fit.py` makes some."""
    target = tmp_path / "found.json"
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert json.loads(target.read_text(encoding="utf-8"))["claims"]


def calls(name: str) -> set[str]:
    """Calls of a script's own code, as they are written; of methods the name alone, behind a dot."""
    found = set()
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_leaves_arguments_results_and_ends_to_the_harness(name: str) -> None:
    called = calls(name)
    assert not ELSEWHERE & called
    assert {"parser", "exit_with"} <= called
    if name in MEASURING:
        assert "report" in called


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_writes_no_json_beside_the_harness(name: str) -> None:
    """Documents that it hands to its own processes are JSON, too: those go into its own scratch folder."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    writes = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".write_text")
    ]
    assert [call for call in writes if "arguments.json" in call or "RESULTS" in call] == []


RESULTS = sorted(name for name in SCRIPTS if (FOLDER / "results" / f"{name}.json").exists())


def test_there_are_results() -> None:
    assert {"parallel", "scheduler", "serve"} <= set(RESULTS)


@pytest.mark.parametrize("name", sorted(set(RESULTS) - WITHOUT_CLAIMS))
def test_a_result_holds_claims_with_a_value_and_a_goal(name: str) -> None:
    claims = json.loads((FOLDER / "results" / f"{name}.json").read_text(encoding="utf-8"))["claims"]
    assert claims
    for claim in claims:
        assert {"name", "value", "unit", "goal", "better"} <= set(claim)
        assert claim["better"] in ("less", "more")
        assert isinstance(claim["value"], float | int)
    assert len({claim["name"] for claim in claims}) == len(claims)


# --- the harness ------------------------------------------------------------------------------------------


def test_a_claim_holds_up_to_its_goal() -> None:
    harness = benchmark("harness")
    for value, better, holds in (
        (2.0, "less", True),
        (2.1, "less", False),
        (2.0, "more", True),
        (1.9, "more", False),
    ):
        assert harness.holds(harness.claim("a", value, "x", 2.0, better)) is holds


def test_a_report_is_written_whole_with_the_commit_and_without_paths_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = benchmark("harness")
    target = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", [str(FOLDER / "x.py"), "--quick", "--json", str(target)])
    claims = [harness.claim("one", 1.23456, "x", 1.0, peer="the peer"), harness.claim("two", 1, "x", 1.0)]
    assert harness.report(claims, target, {"rows": [1]}) == 0
    assert harness.report(claims, target, {"rows": [1]}, strict=True) == 1
    assert "FAILS: one: 1.235, at most 1 x; the peer\nholds: two: 1" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    found = json.loads(target.read_text())
    assert (found["rows"], found["command"]) == ([1], "python benchmarks/x.py --quick --json FILE")
    assert found["claims"][0]["value"] == 1.235
    assert set(found["machine"]) == {"cores", "python", "numpy", "load_average"}
    assert found["revision"]


def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = benchmark("harness").parser("A benchmark.", quick="less")
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", str(tmp_path / "no" / "found.json")])
    assert f"there is no folder {tmp_path / 'no'}" in capsys.readouterr().err
    assert parser.parse_args(["--json", str(tmp_path / "found.json")]).json == tmp_path / "found.json"


def test_what_is_measured_takes_turns() -> None:
    harness, order = benchmark("harness"), list[str]()
    found = harness.in_turn(2, {name: lambda name=name: order.append(name) or len(order) for name in "ab"})
    assert (order, found) == (["a", "b", "a", "b"], {"a": [1, 3], "b": [2, 4]})
    assert harness.ratio([1.0, 8.0, 9.0], [1.0, 2.0, 3.0]) == 3.0


def test_a_time_is_a_multiple_of_the_loops_median_and_names_its_spread() -> None:
    harness = benchmark("harness")
    loop = harness.Loop()
    loop.sample(5)
    assert len(loop.seconds) == 5
    assert min(loop.seconds) > 0
    loop.seconds = [0.001, 0.002, 0.009]
    assert loop.ratio(0.001) == 0.5
    assert loop.peer() == "calibrated loop in the same run: 2.00 ms (5 to 95 %: 1.10 to 8.30)"


def test_ctrl_c_ends_a_script_with_130_after_it_has_cleaned_up(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(
        "import os, signal, sys\n"
        f"sys.path.append({str(FOLDER)!r})\n"
        "from harness import exit_with\n"
        "def main():\n"
        "    try:\n"
        "        os.kill(os.getpid(), getattr(signal, sys.argv[1]))\n"
        "    finally:\n"
        "        print('cleaned up')\n"
        "exit_with(main)\n"
    )
    for name in ("SIGINT", "SIGTERM"):
        command = [sys.executable, str(tmp_path / "stopped.py"), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "stopped\n")
