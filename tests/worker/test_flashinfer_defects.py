"""Every defect in the list is found on a CPU, and by what the list says."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import medha_worker.kernels.flashinfer as right
from medha_worker.kernels.torch_rows import TorchRows

from .computing_device import on_device, on_host
from .flashinfer_cases import PACKAGE, adapter, assert_equals_torch, attended
from .flashinfer_defects import DEFECTS, STEPS, Defect
from .flashinfer_double import FlashInferDouble, Refused


def found_by(package: str) -> str:
    """Return what finds a defect in a copy of the adapter; "nothing" if nothing does."""
    try:
        results = [result for case in STEPS for result in _results(package, case)]
        compared = _rows(package)
    except Refused:
        return "double"
    except AssertionError:
        return "assertion"
    except RuntimeError as error:
        return "device" if "two devices" in str(error) else str(error)
    try:
        for case, result in results:
            assert_equals_torch(case, result)
        for found, wanted in compared:
            torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    except AssertionError:
        return "result"
    return "nothing"


def _results(package: str, case: Any) -> list[tuple[Any, Any]]:
    """Run a step twice; the second is planned when the first's plan, but not its kernels, must have been done."""
    double = FlashInferDouble()
    attention = adapter(case, double, package)
    results = []
    for _ in range(2):
        step = attention.plan(case.spans(), case.block_tokens, case.window_tokens)
        double.work.finish()
        results.append((case, attended(case, attention, step)))
        del step
    attention.plan(case.spans(), case.block_tokens, case.window_tokens)
    attention.plan(case.spans(), case.block_tokens, case.window_tokens)
    return results


def _rows(package: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = import_module(f"{package}.flashinfer_rows").FlashInferRows(FlashInferDouble(), TorchRows())
    heads, angles, wide = (torch.randn(shape).bfloat16() for shape in ((5, 3, 64), (5, 32), (5, 200)))
    turned = on_device(heads.clone())
    rows.rotate(turned, on_device(angles.cos()), on_device(angles.sin()))
    TorchRows().rotate(heads, angles.cos(), angles.sin())
    multiplied = rows.silu_multiply(on_device(wide)[:, :192])
    return [(on_host(turned), heads), (on_host(multiplied), TorchRows().silu_multiply(wide.clone()[:, :192]))]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Defect], str]:
    """Return a function that copies the adapter with a defect, and returns the copy's name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def plant(defect: Defect) -> str:
        name = "planted_" + re.sub(r"\W", "_", defect.name)
        (tmp_path / name).mkdir()
        for path in Path(str(right.__file__)).parent.glob("*.py"):
            text = path.read_text(encoding="utf-8")
            if path.name == defect.file:
                found = text.count(defect.right)
                assert found == 1, (
                    f"{defect.right!r} occurs {found} times in {path.name}: follow it with the defect"
                )
                text = text.replace(defect.right, defect.wrong)
            (tmp_path / name / path.name).write_text(text.replace(PACKAGE, name), encoding="utf-8")
        return name

    return plant


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_the_defect_is_found(defect: Defect, planted: Callable[[Defect], str]) -> None:
    assert found_by(planted(defect)) == defect.found_by


def test_without_a_defect_nothing_is_found(planted: Callable[[Defect], str]) -> None:
    assert (
        found_by(planted(Defect("none", "page_tables.py", "class PagedBatch:", "class PagedBatch:", "")))
        == "nothing"
    )
