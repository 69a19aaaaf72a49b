"""Every import contract is kept, and would be noticed if it were broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "worker", "router", "operator", "sim", "cli", "papers")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = [contract["name"] for contract in PROJECT["tool"]["importlinter"]["contracts"]]

LAYERS, CORE, NO_TORCH, TRACES, MODEL, KERNELS, LOOP, CORE_WINGS, WORKER_WINGS, PROCESS_WINGS, *OTHERS = (
    range(13)
)
OPERATOR_WINGS, SIMULATOR, PAPERS = OTHERS
VIOLATIONS = [
    (LAYERS, "core/medha/slo.py", "import medha_worker"),
    (LAYERS, "core/medha/wire/frames.py", "import medha_links"),
    (LAYERS, "core/medha_links/key_files.py", "import medha_router"),
    (LAYERS, "core/medha_process/watchdog.py", "import medha_links.key_files"),
    (LAYERS, "router/medha_router/replica_link.py", "import medha_worker.checkpoints.read_bundle"),
    (LAYERS, "worker/medha_worker/checkpoints/read_bundle.py", "import medha_cli"),
    (LAYERS, "operator/medha_operator/__init__.py", "import medha_sim"),
    (CORE, "core/medha/scheduler/policy.py", "import time"),
    (CORE, "core/medha/scheduler/controller.py", "from asyncio import Queue"),
    (CORE, "core/medha/scheduler/packer.py", "def late():\n    import torch"),
    (NO_TORCH, "router/medha_router/app.py", "import torch"),
    (NO_TORCH, "operator/medha_operator/__init__.py", "import torch.nn"),
    (NO_TORCH, "core/medha_process/launch.py", "import torch"),
    (NO_TORCH, "sim/medha_sim/__init__.py", "import transformers"),
    (NO_TORCH, "cli/medha_cli/up_command.py", "import medha_worker.rank.process"),
    (TRACES, "router/medha_router/app.py", "import opentelemetry.trace"),
    (TRACES, "core/medha_traces/sequence_spans.py", "def late():\n    import opentelemetry"),
    (MODEL, "worker/medha_worker/model/transformer.py", "import zmq"),
    (MODEL, "worker/medha_worker/model/kv_cache.py", "import psutil"),
    (MODEL, "worker/medha_worker/kernels/torch_attention.py", "import pydantic"),
    (KERNELS, "worker/medha_worker/model/spread.py", "import medha_worker.kernels.torch_attention"),
    (KERNELS, "worker/medha_worker/rank/engine.py", "import medha_worker.kernels.cpu.compiled_kernels"),
    (LOOP, "worker/medha_worker/controller/process.py", "import torch"),
    (LOOP, "worker/medha_worker/link.py", "import medha_worker.rank.executor"),
    (LAYERS, "cli/medha_cli/plan_command.py", "import medha_papers.claims"),
    (SIMULATOR, "sim/medha_sim/workloads.py", "import medha_sim.baselines.systems"),
    (PAPERS, "papers/medha_papers/claims.py", "import medha_worker.rank.executor"),
    (CORE_WINGS, "core/medha/kv/blocks.py", "import medha.scheduler.policy"),
    (CORE_WINGS, "core/medha/cost/cost_profile.py", "import medha.kv.blocks"),
    (WORKER_WINGS, "worker/medha_worker/model/rope.py", "import medha_worker.checkpoints.needle_model"),
    (WORKER_WINGS, "worker/medha_worker/kernels/torch_rows.py", "import medha_worker.model.rope"),
    (PROCESS_WINGS, "core/medha_process/watchdog.py", "import medha_process.supervision.heartbeat"),
    (OPERATOR_WINGS, "operator/medha_operator/kube/store.py", "import medha_operator.replica.plan"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages and pyproject.toml alone, to be changed at will."""
    copy = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", copy)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def lint_imports(tree: Path) -> tuple[int, str]:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=tree,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(tree / folder) for folder in FOLDERS),
            "COLUMNS": "400",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_all_contracts_are_kept(tree: Path) -> None:
    status, output = lint_imports(tree)
    assert status == 0, output
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in output


@pytest.mark.parametrize(("contract", "file", "violation"), VIOLATIONS)
def test_a_forbidden_import_breaks_its_contract(tree: Path, contract: int, file: str, violation: str) -> None:
    path = tree / file
    text = path.read_text(encoding="utf-8")
    path.write_text(f"{text}\n{violation}\n", encoding="utf-8")
    try:
        status, output = lint_imports(tree)
    finally:
        path.write_text(text, encoding="utf-8")
    assert status == 1, output
    assert f"{CONTRACTS[contract]} BROKEN" in output


def test_every_contract_is_seen_failing() -> None:
    assert {contract for contract, _, _ in VIOLATIONS} == set(range(len(CONTRACTS)))
