"""`make gpu-check` runs on a machine without any package of ours, resumes, and refuses to prove something on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark import FOLDER, benchmark

ROOT = FOLDER.parent
gpu = benchmark("gpu")

# What a machine with a GPU may lack: everything but torch, numpy, safetensors and transformers.
WITHOUT_OURS = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pydantic", "zmq", "kopf", "kubernetes", "orjson"}:
            raise ImportError(f"no {name} here")

sys.meta_path.insert(0, Missing())
del sys.argv[0]
script = sys.argv[0]
sys.path.insert(0, script.rpartition("/")[0])
runpy.run_path(script, run_name="__main__")
"""


def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_OURS, str(FOLDER / "gpu.py"), *arguments]
    path = {
        "PYTHONPATH": f"{ROOT / 'core'}:{ROOT / 'worker'}",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=800, env=path)


@pytest.mark.parametrize(
    "part",
    [
        "numerics",
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in (
                "families",
                "quantised",
                "sampling",
                "graphs",
                "determinism",
                "chunks",
                "fp8_kv",
                "tiers",
                "peers",
            )
        ),
    ],
)
@pytest.mark.timeout(900)  # more than twenty models, on a busy machine
def test_a_part_runs_without_our_packages(part: str) -> None:
    found = json.loads(run("--inside", part, "--quick").stdout.splitlines()[-1])
    match part:
        case "numerics":
            assert found["error"] < 1e-4
            assert all(row["ours"] < 1e-5 for row in found["attention"])
        case "determinism":
            assert [row["rows"] for row in found["steps"]] == [128, 1, 8]
        case "sampling":
            assert (found["differ"], found["samples"] > 0) == (0, True)
        case "graphs":
            assert found["error"] == 0
        case "families" | "quantised":
            assert [row for row in found["models"] if row.get("error", 1.0) > 1.1 * row["cpu_error"]] == []
        case "fp8_kv":
            assert found["rounded_otherwise"] == 0
            assert all(row["ours"] < 1e-5 for row in found["attention"])
            assert all(row["fp8_seconds"] > 0 for row in found["steps"])
        case "tiers":
            assert (found["differ"], found["pools"]) == (0, 4)
        case "peers":
            assert all(found[key] > 0 for key in found)
        case "chunks":
            assert {row["chunks"] for row in found["prefills"]} == {"static 32", "static 128", "adaptive"}


def test_a_cpu_proves_nothing() -> None:
    refused = run("--part", "facts", check=False)
    assert refused.returncode == 1
    assert "torch sees no GPU here, so nothing can be proved" in refused.stderr


def test_parts_of_the_same_sources_are_kept_and_others_are_not(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    target.write_text(json.dumps({"sources": gpu.sources(), "parts": {"facts": {"device": "cuda:0"}}}))
    assert gpu._earlier(target)["parts"] == {"facts": {"device": "cuda:0"}}
    target.write_text(json.dumps({"sources": "0" * 12, "parts": {"facts": {"device": "cuda:0"}}}))
    assert gpu._earlier(target)["parts"] == {}


def mixed(seconds: dict[int, float]) -> list[dict[str, float]]:
    """Return measured steps whose time depends on the chunk alone, and doubles with the context."""
    return [
        {"context": context, "chunk": chunk, "seconds": taken * (1 + context / 1000)}
        for chunk, taken in seconds.items()
        for context in (0, 1000)
    ]


def test_a_prefill_is_summed_up_over_its_chunks() -> None:
    rows = {row["chunks"]: row for row in gpu.prefills(mixed({100: 0.02, 500: 0.04}), 1000, 1.0)}
    assert rows["static 500"]["seconds"] == pytest.approx(0.04 + 0.04 * 1.5)
    assert rows["static 500"]["longest_step"] == pytest.approx(0.06)
    # 500 tokens stay within 50 ms up to a context of 250 tokens.
    assert rows["adaptive"]["longest_step"] <= 0.05
    assert rows["adaptive"]["seconds"] < rows["static 100"]["seconds"]


def test_small_models_and_fp8_are_claimed_by_what_is_wrong() -> None:
    models = [
        {"error": 0.02, "cpu_error": 0.015},
        {"error": 0.04, "cpu_error": 0.015},
        {"failed": "RuntimeError: no kernel"},
    ]
    attention = [{"ours": 3e-3, "torch": 1e-3}]
    steps = [
        {"sequences": 1, "context": context, "seconds": 1.0, "fp8_seconds": 0.6}
        for context in (131_072, 1024)
    ]
    parts = {
        "facts": {"device": "cuda:0"},
        "families": {"models": models},
        "quantised": {"models": models[:1]},
        "fp8_kv": {"rounded_otherwise": 3, "attention": attention, "steps": steps},
        "tiers": {"differ": 2},
    }
    assert [claim["value"] for claim in gpu.claims_of(parts)] == [2, 2, 0, 3, pytest.approx(3.0), 0.6]


def test_claims_about_speed_come_from_a_gpu_alone() -> None:
    parts = {
        "ceilings": {"teraflops": 700.0, "gigabytes_per_second": 3000.0},
        "prefill": {"last_chunks": [{"context": 131_072, "teraflops_per_second": 350.0}]},
        "decode": {"steps": [{"sequences": 1, "context": 900_000, "gigabytes_per_second": 2850.0}]},
        "sampling": {"differ": 1},
    }
    assert [claim["value"] for claim in gpu.claims_of(parts)] == [1]
    values = {
        claim["name"]: claim["value"] for claim in gpu.claims_of({"facts": {"device": "cuda:0"}, **parts})
    }
    assert values["MFU of the last chunk of 131,072 tokens"] == 50
    assert values["MBU of 1 decodes behind 900,000 tokens"] == 95
