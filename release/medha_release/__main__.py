"""`python -m medha_release make|check`: what `make release` and `make release-check` run.

python -m medha_release make --images operator,router,worker --torch cpu
python -m medha_release check dist/medha-0.1.0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from medha_release.contents import MANIFEST, problems_of
from medha_release.making import make, order_of
from medha_release.refusal import Refusal
from medha_release.versions import ROOT, present_version

_TARGETS = ("operator", "router", "worker", "worker-gpu")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a release, or check one.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="make the release of this commit in dist/")
    making.add_argument("--version", help="refuse to release another version than this")
    making.add_argument(
        "--images",
        type=_targets,
        default=_TARGETS[:3],
        help=f"of {', '.join(_TARGETS)}, with commas; `none`: no images (default: the first three)",
    )
    making.add_argument(
        "--torch", choices=("cpu", "pypi", "none"), default="cpu", help="which torch the worker holds"
    )
    making.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of releases (default: dist)")
    checking = commands.add_parser("check", help="compare a release's files with its manifest")
    checking.add_argument(
        "folder", type=Path, nargs="?", help="the release's folder (default: that of this version)"
    )
    options = parser.parse_args()
    try:
        return _check(options.folder) if options.command == "check" else _make(options)
    except Refusal as refusal:
        sys.stderr.write(f"{refusal}\n")
        return 2


def _targets(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.replace(",", " ").split() if name != "none")
    if unknown := set(names) - set(_TARGETS):
        raise argparse.ArgumentTypeError(f"no such image: {', '.join(sorted(unknown))}")
    return names


def _make(options: argparse.Namespace) -> int:
    order = order_of(ROOT, options.version, options.images, options.torch)
    folder = options.out / f"medha-{order.version}"
    _say(f"release {order.version} of commit {order.checkout.commit[:12]} in {folder}")
    _say(f"wrote {make(order, folder, _say)}")
    return 0


def _check(folder: Path | None) -> int:
    folder = folder or ROOT / "dist" / f"medha-{present_version()}"
    problems = problems_of(folder)
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if not problems:
        _say(f"{folder} is whole: every file is as {MANIFEST} says")
    return 1 if problems else 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
