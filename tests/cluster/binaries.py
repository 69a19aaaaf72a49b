"""The programs of a cluster, built once from their Go modules and kept in the user's cache by content.

`build(names)` returns a path for each name. If `KUBEBUILDER_ASSETS` is set, programs in that folder (etcd,
kube-apiserver, kubectl) are used instead. The cache key covers everything that a program depends on: module
files, Go's version and flags.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

KUBERNETES = "1.35.4"
_GO = Path(__file__).parent / "go"
_VERSION = "k8s.io/component-base/version"
_MAJOR, _MINOR, _ = KUBERNETES.split(".")
_STAMPS = {  # without them the API server reports a version that no client can parse
    "gitVersion": f"v{KUBERNETES}",
    "gitMajor": _MAJOR,
    "gitMinor": _MINOR,
    "gitTreeState": "clean",
    "gitCommit": "unknown",
    "buildDate": "1970-01-01T00:00:00Z",
}
_HELM = "helm.sh/helm/v3/pkg/chartutil"  # without these, `helm template` assumes Kubernetes 1.20


@dataclass(frozen=True)
class Module:
    """A folder of `go/` with a pinned `go.mod`, and the commands that are built from it."""

    name: str
    commands: dict[str, str]
    """Program -> Go package."""
    stamps: tuple[str, ...] = ()
    """`-X` settings of the linker."""
    sources: tuple[str, ...] = ("go.mod", "go.sum")
    """Files on which the programs depend."""
    is_for_long_tests: bool = False
    """Only tests of `make test-long` use it, so nothing builds it before they do."""
    is_optimised: bool = False
    """Compile with optimisations. That takes a third more time, which tests save again in the programs that work most."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `go build`. Nobody debugs these programs, and debugging information takes an eighth of the time."""
        return ("-trimpath", "-gcflags=all=-dwarf=false" + ("" if self.is_optimised else " -N -l"))

    def key(self, go_version: str) -> str:
        """Return the digest of everything that the programs depend on."""
        folder = _GO / self.name
        made_of = [go_version, *self.flags, *self.stamps, *sorted(self.commands.values())]
        made_of += [(folder / name).read_text(encoding="utf-8") for name in self.sources]
        return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]


MODULES = (
    Module("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}, is_optimised=True),
    Module(
        "kubernetes",
        {
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver",
                "kubectl",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
            )
        },
        tuple(f"{_VERSION}.{name}={value}" for name, value in _STAMPS.items()),
        is_optimised=True,
    ),
    Module(
        "helm",
        {"helm": "helm.sh/helm/v3/cmd/helm"},
        (f"{_HELM}.k8sVersionMajor={_MAJOR}", f"{_HELM}.k8sVersionMinor={_MINOR}"),
    ),
    Module("kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"}),
    # Only with the plugins that the clusters use, which takes half the time.
    Module(
        "coredns", {"coredns": "medha.dev/tests/cluster/coredns"}, sources=("go.mod", "go.sum", "main.go")
    ),
    Module("kube-score", {"kube-score": "github.com/zegl/kube-score/cmd/kube-score"}),
    Module(
        "pod",
        {name: f"medha.dev/tests/cluster/pod/{name}" for name in ("pause", "hello")},
        sources=("go.mod", "pause/main.go", "hello/main.go"),
    ),
    Module(
        "collector",
        {"collector": "medha.dev/tests/cluster/collector"},
        sources=("go.mod", "go.sum", "main.go"),
        is_for_long_tests=True,
    ),
    # Three minutes of processor time, and 62 MB.
    Module(
        "prometheus-adapter",
        {"prometheus-adapter": "sigs.k8s.io/prometheus-adapter/cmd/adapter"},
        is_for_long_tests=True,
    ),
    # Ten minutes of processor time.
    Module(
        "keda",
        {
            "operator": "github.com/kedacore/keda/v2/cmd/operator",
            "adapter": "github.com/kedacore/keda/v2/cmd/adapter",
        },
        is_for_long_tests=True,
    ),
    # An S3-compatible service on a directory: two minutes of processor time.
    Module(
        "object-store",
        {"versitygw": "github.com/versity/versitygw/cmd/versitygw"},
        is_for_long_tests=True,
    ),
    Module("send", {"send": "medha.dev/tests/cluster/send"}, sources=("go.mod", "main.go")),
    # The last version of the extension that has a picker of its own, beside one for tests of gateways.
    Module(
        "endpoint-picker",
        {"epp": "sigs.k8s.io/gateway-api-inference-extension/cmd/epp"},
        is_for_long_tests=True,
    ),
    Module(
        "envoy-gateway",
        {"envoy-gateway": "github.com/envoyproxy/gateway/cmd/envoy-gateway"},
        is_for_long_tests=True,
    ),
)
CONTROL_PLANE = ("etcd", "kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler")


class CannotBuild(Exception):
    """Programs are missing and cannot be built; the message names what is missing."""


def cache_folder() -> Path:
    """Return the folder of built programs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "medha" / "cluster"


def build(names: Iterable[str]) -> dict[str, Path]:
    """Return a path for each program of `names`, building those not cached yet; progress goes to stderr.

    Raises:
        CannotBuild: no Go, or a build failed.
    """
    wanted = set(names)
    found = _assets(wanted)
    for module in MODULES:
        missing = [name for name in module.commands if name in wanted - found.keys()]
        if missing:
            found |= _build(module, missing)
    unknown = wanted - found.keys()
    assert not unknown, unknown
    return found


def _assets(wanted: set[str]) -> dict[str, Path]:
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        return {}
    return {name: Path(folder) / name for name in wanted if (Path(folder) / name).is_file()}


def _build(module: Module, names: list[str]) -> dict[str, Path]:
    go = shutil.which("go")
    if go is None:
        raise CannotBuild(
            f"{', '.join(names)} must be built and Go is not installed; install Go 1.25 or newer, or set "
            "KUBEBUILDER_ASSETS to a folder that holds them"
        )
    version = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=True)
    folder = cache_folder() / f"{module.name}-{module.key(version.stdout.strip())}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits, and uses what the first has built
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            began = time.monotonic()
            _record_event(f"building {', '.join(absent)} (kept in {folder}) ...")
            _go_build(go, module, absent, folder)
            _record_event(f"built {', '.join(absent)} in {time.monotonic() - began:.0f} s")
    return {name: folder / name for name in names}


def _go_build(go: str, module: Module, names: list[str], folder: Path) -> None:
    stamps = " ".join(["-s", "-w", *(f"-X {stamp}" for stamp in module.stamps)])
    partial = folder / f".partial-{os.getpid()}"  # a program is never visible half-written
    packages = [module.commands[name] for name in names]
    target = partial / names[0] if len(names) == 1 else partial
    partial.mkdir()
    done = subprocess.run(
        [
            go,
            "build",
            *module.flags,
            "-ldflags",
            stamps,
            "-o",
            str(target) + ("" if len(names) == 1 else "/"),
            *packages,
        ],
        cwd=_GO / module.name,
        env=os.environ | {"CGO_ENABLED": "0"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        shutil.rmtree(partial)
        raise CannotBuild(f"building {', '.join(names)} failed:\n{done.stderr[-2000:]}")
    for name in names:
        (partial / name).rename(folder / name)
    partial.rmdir()


def _record_event(text: str) -> None:
    sys.stderr.write(f"cluster: {text}\n")
    sys.stderr.flush()


def main(names: list[str]) -> int:
    """Build `names` and print their paths, or build everything; a failed build is an error in CI, a message elsewhere."""
    every = [name for module in MODULES for name in module.commands if not module.is_for_long_tests]
    try:
        programs = build(names or every)
    except CannotBuild as error:
        _record_event(f"tests that need a cluster cannot run: {error}")
        return 1 if os.environ.get("CI") else 0
    for name in names:
        sys.stdout.write(f"{programs[name]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
