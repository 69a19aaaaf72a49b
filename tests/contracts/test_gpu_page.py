"""Figures of docs/gpu.md and docs/performance-gpu.md are those of the results files, and the tests that they name exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmark import benchmark

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
TIMES = (ROOT / "docs" / "performance-gpu.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "gpu_arithmetic.json").read_text(encoding="utf-8"))

GPU_RESULTS = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text(encoding="utf-8"))


def test_predictions_are_those_of_the_results_file() -> None:
    expected = {
        step["step"].replace("1 decodes", "1 decode"): (
            f"{step['launches']} | {step['gigabytes']:.1f} | {step['teraflops']:.3g} | {step['predicted_ms']:.1f} | "
            f"{100 * step['mfu']:.0f} % | {100 * step['mbu']:.0f} %"
        )
        for step in RESULTS["steps"]
    }
    found = re.findall(r"^\| (Llama[^|]+) \| (.+) \|$", TIMES, re.MULTILINE)
    assert len(found) >= 5
    assert dict(found) == {name: expected[name] for name, _ in found}
    for graph in RESULTS["graphs"]:
        assert f"{graph['megabytes']:.0f} MB" in TIMES


def test_the_time_and_size_of_compiled_modules_are_those_of_the_results_file() -> None:
    found = json.loads(
        (ROOT / "benchmarks" / "results" / "flashinfer_modules.json").read_text(encoding="utf-8")
    )
    modules = found["modules"].values()
    minutes, megabytes = (
        sum(one["seconds"] for one in modules) / 60,
        sum(one["bytes"] for one in modules) / 1e6,
    )
    assert len(modules) == 7
    assert f"seven of them for {found['arch'].removesuffix('a')}a" in PAGE
    assert f"{minutes:.0f} minutes\nand {megabytes:.1f} MB together" in PAGE


def test_tests_and_commands_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`(?:python )?((?:tests|benchmarks)/[\w/.]+\.py)`", PAGE + TIMES))
    assert len(named) >= 8
    assert [path for path in named if not (ROOT / path).is_file()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", PAGE + TIMES)) <= targets


def test_tables_of_results_on_a_gpu_are_those_of_the_results_files() -> None:
    script = benchmark("gpu_page")
    assert script.page(script.PROVED) == PAGE, "run `make gen`"
    assert script.page(script.TIMES) == TIMES, "run `make gen`"


def test_the_page_says_if_the_engine_has_changed_since_a_gpu_ran_it() -> None:
    is_proved = GPU_RESULTS["sources"] == benchmark("gpu_sources").sources()
    assert ("**The engine's sources have changed since that run.**" in PAGE) is not is_proved, (
        "run `make gen`"
    )


def test_outside_of_kernels_only_the_device_interface_names_a_device() -> None:
    worker = ROOT / "worker" / "medha_worker"
    naming = {"device.py", "cuda_device.py", "device_choice.py"}
    found = [
        f"{path.relative_to(worker)}: {line.strip()}"
        for path in sorted(worker.rglob("*.py"))
        if path.relative_to(worker).parts[0] not in naming | {"kernels"}
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"torch\.cuda|\.cuda\(|[\"'](cpu|cuda)(:\d)?[\"']", line)
    ]
    assert found == []
