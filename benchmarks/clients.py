"""Run clients of other projects, unchanged, against `medha up`, keep their reports, and write the page about them.

    python benchmarks/clients.py --json benchmarks/results/clients.json [--match NAME]
    python benchmarks/clients.py --page docs/clients.md

The clients are installed by pip and npm at their first run, in some 5 GB under `~/.cache/medha/clients`. vLLM is another
6 GB; MEDHA_CLIENT_VLLM may name an environment that has it. Each is driven by a test of `tests/clients`; a report is
written only if its test has passed. With --match, only tests whose name contains NAME run, and other reports are kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT, Row, claim, exit_with, parser, progress, report, revision, write

from medha_router.openai_requests import KINDS, is_known

RESULTS = ROOT / "benchmarks" / "results" / "clients.json"
REPORTS = "MEDHA_CLIENT_REPORTS"


def main() -> int:
    options = parser(__doc__, quick="run curl alone, which needs no installation")
    options.add_argument("--match", default="", metavar="NAME", help="only tests whose name contains this")
    options.add_argument(
        "--page", type=Path, metavar="FILE", help="write the page from the results, and run nothing"
    )
    arguments = options.parse_args()
    if arguments.page is not None:
        write(arguments.page, page(json.loads(RESULTS.read_text())["clients"]))
        return 0
    kept: dict[str, Row] = {}
    if arguments.match and arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())["clients"]
    with tempfile.TemporaryDirectory() as folder:
        passed = _run("curl" if arguments.quick else arguments.match, Path(folder))
        for path in sorted(Path(folder).glob("*.json")):
            kept[path.stem] = json.loads(path.read_text()) | {"revision": revision()}
    report(claims(kept), arguments.json, {"clients": dict(sorted(kept.items()))})
    return 0 if passed else 1


def _run(match: str, folder: Path) -> bool:
    argv = ["-m", "pytest", "-q", "-m", "long", "--timeout=3600", "tests/clients", "-k", match]
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env={**os.environ, REPORTS: str(folder)}, check=False,
        stdout=sys.stderr,
    )  # fmt: skip
    progress(f"pytest ended with {done.returncode}")
    return done.returncode == 0


def claims(clients: dict[str, Row]) -> list[Row]:
    """Return the claims: no request of a client fails on our side, and none has a field that nobody knows."""
    failed = sum(
        count
        for client in clients.values()
        for found in client["requests"].values()
        for status, count in found["statuses"].items()
        if status.startswith("5")
    )
    ignored = [(name, *one) for name, client in clients.items() for one in ignored_fields(client)]
    return [
        claim("requests of clients that fail on the server's side", failed, "requests", 0),
        claim(
            "fields that clients send and that are neither served nor refused by name",
            len(ignored),
            "fields",
            0,
        ),
    ]


def ignored_fields(client: Row) -> Iterator[tuple[str, str]]:
    """Yield path and name of each field of a client that the server does not know."""
    for asked, found in client["requests"].items():
        path = asked.partition(" ")[2]
        for field in found["fields"]:
            if path in KINDS and not is_known(KINDS[path], field):
                yield path, field


_INTRODUCTION = """# Clients

Written by `python benchmarks/clients.py --page docs/clients.md` from `benchmarks/results/clients.json`.

Clients of other projects run against `medha up` as their users have them: installed by pip or npm, each in an environment of its own, and
unchanged. They are driven by `tests/clients` (`make clients`, and each as a row of `make test-long`). What they ask for is read from a copy of
the bytes that they send. The whole reports, with those that the tools write themselves, are in `benchmarks/results/clients.json`. The model
is a tiny random one, so times in these reports say nothing about speed.

*Refused* lists the answers that name what Medha does not serve. Most of them are asked for on purpose, to see that the client shows them.
"""


def page(clients: dict[str, Row]) -> str:
    """Return the page in Markdown."""
    rows = [
        f"| [{name}](#{name}) | {client['version']} | {len(client['exercised'])} | {_total(client)} | "
        f"{', '.join(sorted(_refusals(client))) or 'nothing'} |"
        for name, client in clients.items()
    ]
    header = ["| Client | Version | Uses | Requests | Refused |", "|---" * 5 + "|"]
    sections = [part for name, client in clients.items() for part in ("", *_section(name, client))]
    return "\n".join([_INTRODUCTION, *header, *rows, *sections]) + "\n"


def _section(name: str, client: Row) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    yield f"`{client['install']}`"
    yield ""
    yield from (f"- {one}" for one in client["exercised"])
    yield ""
    yield "| Request | Fields | Answers |"
    yield "|---|---|---|"
    for asked, found in client["requests"].items():
        fields = ", ".join(f"`{field}`" for field in found["fields"])
        answers = ", ".join(f"{count} with {status}" for status, count in found["statuses"].items())
        yield f"| `{asked}` | {fields} | {answers} |"
    if client["refused"]:
        yield ""
        # An answer to HEAD has no body: the table has its status.
        yield from (f"- {one['status']}: {one['message']}" for one in client["refused"] if one["message"])


def _refusals(client: Row) -> set[str]:
    return {f"`{one['param'] or one['path']}`" for one in client["refused"]}


def _total(client: Row) -> int:
    return sum(int(found["count"]) for found in client["requests"].values())


if __name__ == "__main__":
    exit_with(main)
