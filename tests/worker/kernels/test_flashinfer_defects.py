"""Every defect in the list is found on a CPU, and by what the list says."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from medha_worker.kernels.torch_rows import TorchRows

from .computing_device import on_device, on_host
from .flashinfer_cases import adapter, assert_equals_torch, attended
from .flashinfer_defects import DEFECTS, PAGE, STEPS, Defect, page_with_table, planted
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
    weight, hidden, part = (torch.randn(shape).bfloat16() for shape in ((64,), (5, 64), (5, 64)))
    sums = on_device(hidden.clone())
    normed = rows.add_rms_norm(sums, on_device(part.clone()), on_device(weight), 1e-5)
    return [
        (on_host(turned), heads),
        (on_host(multiplied), TorchRows().silu_multiply(wide.clone()[:, :192])),
        (on_host(sums), hidden + part),
        (on_host(normed), TorchRows().rms_norm(hidden + part, weight, 1e-5)),
    ]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_the_defect_is_found(defect: Defect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert found_by(planted(defect, tmp_path)) == defect.found_by


def test_without_a_defect_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    none = Defect("none", "page_tables.py", "class PagedBatch:", "class PagedBatch:", "", "")
    assert found_by(planted(none, tmp_path)) == "nothing"


def test_the_page_on_gpus_lists_the_defects() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_table(), "run `make gen`"
    assert all(f"| {defect.name} | " in page for defect in DEFECTS)
