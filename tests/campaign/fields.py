"""All of campaign (f): `PYTHONPATH=tests python -m campaign.fields [--json FILE]`; what stands in the file is not run again."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from campaign.mutations import Mutation
from campaign.results import Results
from campaign.schema import SchemaCampaign, make_ground, trials
from cluster.api import Api, PlayedKubelets
from cluster.control_plane import control_plane
from cluster.definitions import define
from cluster.operator_process import operator
from medha_operator.operator_settings import OperatorSettings


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaign.fields", description=__doc__)
    parser.add_argument("--json", type=Path, help="where results are written, and read to go on")
    parser.add_argument("--field", default="", help="only those whose path begins so")
    asked = parser.parse_args()
    results = Results(asked.json)
    chosen = [one for one in trials() if one.path.startswith(asked.field) and _name(one) not in results.rows]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="medha-fields-") as name:
        folder = Path(name)
        with control_plane(folder, scheduler=False) as plane, Api(plane) as api, PlayedKubelets(api):
            define(plane)
            make_ground(api, "fields")
            with operator(folder, plane.kubeconfig, lease_namespace="fields", namespaces=["fields"]):
                campaign = SchemaCampaign(api, "fields", OperatorSettings())
                for mutation, words in campaign.run(chosen):
                    row = {
                        "valid": list(mutation.valid),
                        "refused": [str(value)[:80] for value in mutation.invalid],
                        "wrong": words[:2000],
                    }
                    results.add(_name(mutation), row)
                    sys.stdout.write(f"{_name(mutation)}: {words[:600] or 'well'}\n")
                    sys.stdout.flush()
    failed = results.failed
    sys.stdout.write(
        f"{len(results.rows)} fields, {campaign.changes} specs applied and {campaign.refusals} refused in "
        f"{time.monotonic() - began:.0f} s; {len(failed)} failed: {failed}\n"
    )
    return 1 if failed else 0


def _name(mutation: Mutation) -> str:
    return f"{mutation.kind}.{mutation.path}"


if __name__ == "__main__":
    sys.exit(main())
