"""The choice of the GPU that a rank computes on, or the reason why it cannot: a replica that asks for one never
computes on the CPU instead.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from medha.errors import AcceleratorMissing
from medha_worker.nvml import is_slice

_MAKER = "nvidia.com/"
_FIELD = "spec.resources.accelerator"
_MOST_QUOTED = 120  # characters of an error of the driver's; an operator shows the end of the whole text
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
_NO_DEVICE = (
    "check the node's driver, its device plugin and spec.resources.runtimeClassName, or set accelerator none "
    "to compute on the CPU"
)
_DRIVER_FIXES = (
    ("Found no NVIDIA driver", _NO_DEVICE),
    ("too old", "update the node's driver, or use an image with an older CUDA"),
    ("No CUDA GPUs", _NO_DEVICE),
    ("Error 802", "start the node's fabric manager, which GPUs behind NVSwitch need"),
    ("forward compatibility", "update the node's driver, or use an image with an older CUDA"),
)
"""Words in an error of the driver's, and the fix; the first that matches counts."""


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """The state of CUDA as this process sees it."""

    torch_version: str
    cuda_version: str | None
    """Version of CUDA that torch is built for; None if it is built without."""
    architectures: tuple[str, ...]
    """Architectures that torch has kernels for, as `sm_90`, or code to be compiled for, as `compute_120`."""
    is_complete: bool
    """True if torch has what only a GPU needs; the image for CPUs leaves that out, Triton among it."""
    is_available: bool
    """True if CUDA has started, and has a device."""
    devices: int
    """Number of devices; drivers may count some though CUDA does not start."""
    capability: tuple[int, int] | None
    """Compute capability of the device that is asked about; None if there is none."""
    device_name: str
    """Model of that device, as CUDA names it; empty if there is none."""
    driver_error: str
    """Text of the error with which CUDA does not start; empty if it does."""
    visible_devices: str | None
    """Value of `CUDA_VISIBLE_DEVICES`; None if it is not set."""


def cuda_facts(index: int) -> CudaFacts:
    """Return what this process sees of CUDA, and of the device `index`. It starts CUDA if that is possible."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the driver's error is part of the result
        is_available, devices = torch.cuda.is_available(), torch.cuda.device_count()
    error = ""
    if not is_available:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as failed:  # an AssertionError if torch is built without CUDA
            error = str(failed)
    has_device = is_available and index < devices
    return CudaFacts(
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda,
        architectures=tuple(torch.cuda.get_arch_list()),
        is_complete=find_spec("triton") is not None,
        is_available=is_available,
        devices=devices,
        capability=torch.cuda.get_device_capability(index) if has_device else None,
        device_name=torch.cuda.get_device_name(index) if has_device else "",
        driver_error=error,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def choose_gpu(accelerator: str, index: int, ranks: int, replica_ranks: int, cuda: CudaFacts) -> int:
    """Return the index of the GPU for one of `ranks` ranks on this host, each of which takes its own.

    `accelerator` is the name of a device resource. `index` is the rank's place among them, from 0, and `cuda`
    has the facts of that device. The replica has `replica_ranks` ranks on all hosts.

    Raises:
        AcceleratorMissing: there is none for it, or torch cannot use it.
    """
    if not accelerator.startswith(_MAKER):
        raise AcceleratorMissing(
            f"{_FIELD} is {accelerator}, and this build computes on NVIDIA's GPUs alone: name {_MAKER}gpu, "
            "or none for the CPU"
        )
    asked = f"{_FIELD} is {accelerator}, but"
    if cuda.cuda_version is None or not cuda.is_complete:
        lacks = (
            "is built without CUDA"
            if cuda.cuda_version is None
            else "lacks what only a GPU needs, as in the image for CPUs"
        )
        raise AcceleratorMissing(
            f"{asked} torch {cuda.torch_version} {lacks}: use the image medha-worker-gpu (docs/images.md), or accelerator none"
        )
    hidden = f"CUDA_VISIBLE_DEVICES is {cuda.visible_devices!r:.60}"
    if not cuda.is_available and cuda.visible_devices is not None and not cuda.devices:
        raise AcceleratorMissing(f"{asked} {hidden}, with which CUDA has no device: unset it")
    if not cuda.is_available:
        fix = next(
            (fix for words, fix in _DRIVER_FIXES if words in cuda.driver_error), "check the node's driver"
        )
        raise AcceleratorMissing(
            f"{asked} CUDA {cuda.cuda_version} does not start ({_short(cuda.driver_error)}): {fix}"
        )
    if cuda.devices < ranks:
        more = "" if cuda.visible_devices is None else f"; {hidden}"
        raise AcceleratorMissing(
            f"{asked} {cuda.devices} of {ranks} devices are there, one for each rank on this host{more}: "
            f"{_fix_of_few(cuda)}"
        )
    assert cuda.capability is not None, f"GPU {index} of {cuda.devices}"
    if not any(_runs(architecture, cuda.capability) for architecture in cuda.architectures):
        major, minor = cuda.capability
        raise AcceleratorMissing(
            f"{asked} GPU {index} has compute capability {major}.{minor}, and torch {cuda.torch_version} has kernels for "
            f"{' '.join(cuda.architectures)}: choose other nodes, or another build of torch"
        )
    if is_slice(cuda.device_name) and replica_ranks > 1:
        raise AcceleratorMissing(
            f"{asked} GPU {index} is a MIG slice ({cuda.device_name:.60}), and NCCL cannot join those of {replica_ranks} ranks: "
            "set parallelism.tensor, stream and kv to 1, or choose nodes with whole GPUs"
        )
    return index


def _fix_of_few(cuda: CudaFacts) -> str:
    if "MIG-" in (cuda.visible_devices or ""):
        return "a process can use one MIG slice only, so set parallelism.tensor to 1"
    return "check the node's device plugin, or lower parallelism.tensor"


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _MOST_QUOTED else f"{words[:_MOST_QUOTED]}..."


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for an architecture, as torch names it, runs on a device.

    Compiled code (`sm`) runs on devices of the same major version and no lower minor one, intermediate code
    (`compute`) on every later device. With the suffix `a` either runs on exactly that device, with `f` on
    its family, as compiled code does.
    """
    found = _ARCHITECTURE.fullmatch(architecture)
    if found is None:
        return False
    kind, major, minor, suffix = found.groups()
    built_for = int(major), int(minor)
    if suffix == "a":
        return capability == built_for
    if kind == "compute" and not suffix:
        return capability >= built_for
    return capability[0] == built_for[0] and capability[1] >= built_for[1]
