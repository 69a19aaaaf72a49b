"""Dashboards are what Grafana's own types of a dashboard, its panels and their queries say: `@grafana/schema`, read by TypeScript."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from chart.helm import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PACKAGES = ("@grafana/schema@13.2.3", "typescript@7.0.2")
GENERATED = "@grafana/schema/dist/esm/raw/composable"
CHECK = f"""\
import type {{ Dashboard, DataQuery, GraphFieldConfig, Panel }} from "@grafana/schema";
import type {{ Options as StatOptions }} from "{GENERATED}/stat/panelcfg/x/StatPanelCfg_types.gen";
import type {{ Options as TimeSeriesOptions }} from "{GENERATED}/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// In JSON, a member of an enumeration is its text.
type Written<T> = T extends string ? `${{T}}`
    : T extends (infer One)[] ? Written<One>[]
    : T extends object ? {{ [Key in keyof T]: Written<T[Key]> }}
    : T;
type Partly<T> = T extends object ? {{ [Key in keyof T]?: Partly<T[Key]> }} : T;
type Query = DataQuery & {{ expr: string; legendFormat?: string }};

export const dashboard: Written<Dashboard> = %s;
export const panels: Written<Panel>[] = %s;
export const lines: Written<Partly<TimeSeriesOptions>>[] = %s;
export const styles: Written<Partly<GraphFieldConfig>>[] = %s;
export const numbers: Written<Partly<StatOptions>>[] = %s;
export const queries: Written<Query>[] = %s;
"""


@pytest.fixture(scope="session")
def types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages. Where they cannot be had, its tests are skipped."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm: install the packages nodejs and npm")
    folder = tmp_path_factory.mktemp("grafana")
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock", *PACKAGES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"npm installs nothing: {done.stderr[-300:]}")
    return folder


def complaints(types: Path, document: dict[str, Any]) -> str:
    """Return TypeScript's complaints about a dashboard; empty if it conforms to Grafana's types."""
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]

    def options(kind: str) -> list[Any]:
        return [panel["options"] for panel in panels if panel["type"] == kind]

    styles = [panel["fieldConfig"]["defaults"].get("custom", {}) for panel in panels]
    queries = [target for panel in panels for target in panel["targets"]]
    parts = (document, panels, options("timeseries"), styles, options("stat"), queries)
    (types / "dashboard.ts").write_text(CHECK % tuple(json.dumps(part, indent=1) for part in parts))
    options_of_compiler = [
        "--noEmit",
        "--strict",
        "--skipLibCheck",
        "--moduleResolution",
        "bundler",
        "--module",
        "esnext",
    ]
    done = subprocess.run(
        [types / "node_modules" / ".bin" / "tsc", *options_of_compiler, "--target", "es2022", "dashboard.ts"],
        cwd=types,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


DASHBOARDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "dashboards").glob("*.json"))
}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_one_by_grafanas_types(types: Path, name: str) -> None:
    assert complaints(types, DASHBOARDS[name]) == ""


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("refresh",), 30),
        (("nonsense",), True),
        (("panels", 1, "gridPos", "w"), "8"),
        (("panels", 1, "fieldConfig", "defaults", "thresholds", "mode"), "relative"),
        (("panels", 1, "options", "colorMode"), "rainbow"),
        (("panels", 3, "options", "legend", "displayMode"), "tree"),
        (("panels", 3, "fieldConfig", "defaults", "custom", "showPoints"), "sometimes"),
        (("panels", 3, "targets", 0, "expr"), None),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_what_grafana_does_not_know_is_noticed(types: Path, path: tuple[Any, ...], wrong: object) -> None:
    document = copy.deepcopy(DASHBOARDS["slo"])
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = wrong
    assert "error TS" in complaints(types, document)
