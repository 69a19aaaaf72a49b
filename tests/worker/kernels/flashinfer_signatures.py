"""Record the signatures of FlashInfer's functions that we call, in `flashinfer_signatures.json`, by version.

python tests/worker/kernels/flashinfer_signatures.py           # adds the installed version to the file
python tests/worker/kernels/flashinfer_signatures.py --check   # compares the installed version with the file
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("flashinfer_signatures.json")
CALLED = (
    "BatchPrefillWithPagedKVCacheWrapper.__init__",
    "BatchPrefillWithPagedKVCacheWrapper.plan",
    "BatchPrefillWithPagedKVCacheWrapper.run",
    "BatchDecodeWithPagedKVCacheWrapper.__init__",
    "BatchDecodeWithPagedKVCacheWrapper.plan",
    "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer",
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "fused_add_rmsnorm",
    "apply_rope_with_cos_sin_cache_inplace",
    "merge_state_in_place",
    "rmsnorm",
    "silu_and_mul",
)
"""The functions that the adapter calls."""


def installed(library: Any) -> dict[str, list[list[str]]]:
    """Return the parameters of each function: name, kind, and default ("" for none) as text."""
    found = {}
    for path in CALLED:
        function: Any = library
        for name in path.split("."):
            # From 0.7 on, decode's `plan` passes its keywords on to a method that names them.
            function = getattr(
                function, f"_{name}_impl" if name == "plan" and hasattr(function, "_plan_impl") else name
            )
        parameters = inspect.signature(function).parameters.values()
        found[path] = [
            [one.name, one.kind.name, "" if one.default is one.empty else repr(one.default)]
            for one in parameters
        ]
    return found


def recorded() -> dict[str, dict[str, inspect.Signature]]:
    """Return signatures by version and function."""
    versions: dict[str, dict[str, list[list[str]]]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return {
        version: {path: _signature(parameters) for path, parameters in functions.items()}
        for version, functions in versions.items()
    }


def _signature(parameters: list[list[str]]) -> inspect.Signature:
    """Return a signature whose defaults are text."""
    return inspect.Signature(
        [
            inspect.Parameter(
                name, getattr(inspect.Parameter, kind), default=default or inspect.Parameter.empty
            )
            for name, kind, default in parameters
        ]
    )


def differences(library: Any) -> list[str]:
    """Return what differs between an installed FlashInfer and the record of its version."""
    versions = json.loads(RECORDED.read_text(encoding="utf-8"))
    if library.__version__ not in versions:
        return [f"version {library.__version__} is not recorded: {', '.join(versions)} are"]
    kept = versions[library.__version__]
    return [path for path, parameters in installed(library).items() if kept.get(path) != parameters]


def main() -> int:
    library = importlib.import_module("flashinfer")
    if "--check" in sys.argv:
        found = differences(library)
        print(f"FlashInfer {library.__version__}: {', '.join(found) or 'all signatures are as recorded'}")
        return 1 if found else 0
    versions = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    versions[library.__version__] = installed(library)
    lines = []
    for version in sorted(versions):
        functions = [
            f'    "{path}": [\n'
            + ",\n".join(f"      {json.dumps(parameter)}" for parameter in parameters)
            + "\n    ]"
            for path, parameters in sorted(versions[version].items())
        ]
        lines.append(f'  "{version}": {{\n' + ",\n".join(functions) + "\n  }")
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
