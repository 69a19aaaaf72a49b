"""A rank computes on the GPU that its pod was given, or says why it cannot: it never falls back to the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from medha.errors import AcceleratorMissing
from medha_worker.device_choice import CudaFacts, choose_gpu, cuda_facts

GPU = "nvidia.com/gpu"
H100 = CudaFacts(
    torch_version="2.13.0+cu130",
    cuda_version="13.0",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    is_complete=True,
    is_available=True,
    devices=8,
    capability=(9, 0),
    device_name="NVIDIA H100 80GB HBM3",
    driver_error="",
    visible_devices=None,
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx"
)
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
SLICE = replace(H100, devices=1, device_name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
ABSENT = replace(H100, is_available=False, devices=0, capability=None, device_name="", driver_error=NO_DRIVER)
MOST_CHARACTERS = 400
"""Beside them, a termination message says which rank has ended; the operator quotes 500 characters of it."""


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", [GPU, "nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared"])
def test_each_rank_of_a_host_takes_a_gpu_of_its_own(name: str, ranks: int) -> None:
    assert [choose_gpu(name, index, ranks, 4 * ranks, H100) for index in range(ranks)] == [*range(ranks)]


@pytest.mark.parametrize(
    ("name", "ranks", "cuda", "told"),
    [
        ("amd.com/gpu", 1, H100, ["is amd.com/gpu", "NVIDIA's GPUs alone", "name nvidia.com/gpu, or none"]),
        (
            GPU,
            1,
            replace(ABSENT, torch_version="2.13.0+cpu", cuda_version=None, architectures=()),
            ["torch 2.13.0+cpu is built without CUDA", "medha-worker-gpu", "or accelerator none"],
        ),
        (
            GPU,
            1,
            replace(H100, is_complete=False),
            ["torch 2.13.0+cu130 lacks what only a GPU needs, as in the image for CPUs", "medha-worker-gpu"],
        ),
        (
            GPU,
            1,
            ABSENT,
            [
                "Found no NVIDIA driver",
                "the node's driver, its device plugin",
                "spec.resources.runtimeClassName",
            ],
        ),
        # NVML counts devices that CUDA cannot use.
        (
            GPU,
            1,
            replace(ABSENT, devices=1, driver_error=OLD_DRIVER),
            ["CUDA 13.0 does not start", "found version 11040", "update the node's driver"],
        ),
        (
            GPU,
            1,
            replace(ABSENT, driver_error="No CUDA GPUs are available"),
            ["check the node's driver, its device plugin", "or set accelerator none"],
        ),
        (
            GPU,
            8,
            replace(ABSENT, devices=8, driver_error="Error 802: system not yet initialized"),
            ["Error 802", "fabric manager"],
        ),
        (
            GPU,
            1,
            replace(ABSENT, devices=1, driver_error="Error 999"),
            ["(Error 999)", "check the node's driver"],
        ),
        (
            GPU,
            1,
            replace(ABSENT, visible_devices=""),
            ["CUDA_VISIBLE_DEVICES is '', with which CUDA has no device: unset it"],
        ),
        (GPU, 4, replace(H100, devices=1), ["1 of 4 devices are there", "or lower parallelism.tensor"]),
        (
            GPU,
            4,
            replace(H100, devices=2, visible_devices="0,1"),
            ["2 of 4 devices are there", "CUDA_VISIBLE_DEVICES is '0,1'"],
        ),
        (
            GPU,
            2,
            replace(H100, devices=1, visible_devices="MIG-a,MIG-b"),
            ["one MIG slice only", "set parallelism.tensor to 1"],
        ),
        (
            GPU,
            1,
            SLICE,
            [
                "GPU 0 is a MIG slice (NVIDIA H100 80GB HBM3 MIG 1g.10gb)",
                "those of 4 ranks",
                "nodes with whole GPUs",
            ],
        ),
        (
            GPU,
            1,
            replace(H100, capability=(7, 0)),
            ["compute capability 7.0", "has kernels for sm_75 sm_80", "choose other nodes"],
        ),
    ],
)
def test_a_gpu_that_cannot_be_used_is_told_with_its_reason_and_the_fix(
    name: str, ranks: int, cuda: CudaFacts, told: list[str]
) -> None:
    with pytest.raises(AcceleratorMissing) as error:
        choose_gpu(name, 0, ranks, 4 * ranks, cuda)
    for part in ["spec.resources.accelerator is", *told]:
        assert part in str(error.value)
    assert len(str(error.value)) <= MOST_CHARACTERS


def test_the_only_rank_of_a_replica_takes_a_slice_of_a_gpu() -> None:
    """A device plugin may offer slices as `nvidia.com/gpu`, so that the API server cannot know of them."""
    assert choose_gpu(GPU, 0, 1, 1, SLICE) == 0


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 9), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("sm_100",), (12, 0), False),
        (("sm_120",), (12, 1), True),
        (("compute_80",), (9, 0), True),
        (("compute_90",), (8, 9), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
        (("compute_90a",), (10, 0), False),
        (("sm_100f",), (10, 3), True),
        (("compute_100f",), (12, 0), False),
        (("gfx942",), (9, 0), False),
        (("sm_75", "sm_90"), (9, 0), True),
        ((), (9, 0), False),
    ],
)
def test_code_runs_on_the_capabilities_that_it_was_built_for(
    architectures: tuple[str, ...], capability: tuple[int, int], *, runs: bool
) -> None:
    cuda = replace(H100, architectures=architectures, capability=capability)
    if runs:
        assert choose_gpu(GPU, 0, 1, 1, cuda) == 0
    else:
        with pytest.raises(AcceleratorMissing, match="compute capability"):
            choose_gpu(GPU, 0, 1, 1, cuda)


def test_this_process_sees_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = cuda_facts(0)
    assert found.torch_version == torch.__version__
    assert found.cuda_version == torch.version.cuda
    assert found.is_available == torch.cuda.is_available()
    assert found.visible_devices == "0"
    assert bool(found.driver_error) == (not found.is_available), (
        "either CUDA starts, or it says why it does not"
    )
    assert (found.capability is not None) == bool(found.device_name) == found.is_available
