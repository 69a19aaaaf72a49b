"""The table of kernels by name, and the choice of those that a rank runs: the fastest, or those that guarantee more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from medha.api.determinism import Determinism
from medha.errors import ConfigInvalid
from medha_worker.device import Device
from medha_worker.kernels.batch_invariant import batch_invariant_kernels
from medha_worker.kernels.expert_products import expert_products
from medha_worker.kernels.fast_forms import fast_forms
from medha_worker.kernels.protocol import Kernels, KernelSizes, KernelsUnavailable, TokenRace
from medha_worker.kernels.torch_attention import TorchAttention
from medha_worker.kernels.torch_kv_writer import TorchKVWriter
from medha_worker.kernels.torch_products import TorchProducts
from medha_worker.kernels.torch_race import DenseRace, SparseRace
from medha_worker.kernels.torch_rows import TorchRows

_log = logging.getLogger("medha.kernels")


def torch_kernels(device: Device) -> Kernels:
    """Return the operators in plain torch, which run every model on every device."""
    products, attention = TorchProducts(), TorchAttention(device)
    return Kernels(
        "torch",
        attention,
        TorchKVWriter(device),
        products,
        TorchRows(),
        _race(device),
        expert_products(products, device),
        made_heads=attention,
        pack_rows=fast_forms(device),
    )


def _race(device: Device) -> TokenRace:
    if device.is_host:
        return SparseRace()
    if device.torch_device.type == "cuda" and torch.cuda.is_available():
        try:
            return _triton_race(device)
        except Exception as error:  # noqa: BLE001 - of Triton's import, of a compiler, or of a driver
            _log.warning(
                "tokens are sampled by plain torch, because triton fails (%s: %s)",
                type(error).__name__,
                error,
            )
    return DenseRace()


def _triton_race(device: Device) -> TokenRace:
    """Return the race in Triton, which has run once: at its first run Triton compiles, and may find no C compiler."""
    from medha_worker.kernels.triton.driver_module import use_compiled_driver
    from medha_worker.kernels.triton.triton_race import TritonRace

    use_compiled_driver()
    race = TritonRace()
    race.winners(
        device.place(torch.zeros(1, 1, dtype=torch.float64)), device.place(torch.zeros(1, dtype=torch.int64))
    )
    device.synchronise()
    return race


def _compiled_kernels(sizes: KernelSizes, device: Device) -> Kernels:
    try:
        from medha_worker.kernels.cpu.compiled_kernels import compiled_kernels
    except ImportError as error:
        raise KernelsUnavailable(f"their compiler, llvmlite, cannot be imported ({error})") from error
    return compiled_kernels(sizes, device, torch_kernels(device))


def _flashinfer_kernels(sizes: KernelSizes, device: Device) -> Kernels:
    from medha_worker.kernels.flashinfer.flashinfer_kernels import flashinfer_kernels

    return flashinfer_kernels(sizes, device, torch_kernels(device))


KERNELS: Mapping[str, Callable[[KernelSizes, Device], Kernels]] = MappingProxyType(
    {
        "flashinfer": _flashinfer_kernels,
        "cpu": _compiled_kernels,
        "torch": lambda _sizes, device: torch_kernels(device),
    }
)
"""Functions that make the kernels of each name, the fastest first; `KernelsUnavailable`: they cannot run here."""


def choose_kernels(sizes: KernelSizes, device: Device, determinism: Determinism = "bestEffort") -> Kernels:
    """Return the first kernels of the table that can run this model here; the log says why faster ones cannot.

    Raises:
        ConfigInvalid: `determinism` asks for a guarantee that no kernels give for this model here.
    """
    if determinism == "batchInvariant":
        try:
            return batch_invariant_kernels(sizes, device, torch_kernels(device))
        except KernelsUnavailable as error:
            raise ConfigInvalid(
                f"spec.determinism is batchInvariant, which cannot be guaranteed here, because {error}; "
                "change that, or set spec.determinism to bestEffort"
            ) from error
    for name, make in KERNELS.items():
        try:
            return make(sizes, device)
        except KernelsUnavailable as error:
            # On a CPU that is a choice among equals; on another device the next kernels are many times slower.
            level = logging.INFO if device.is_host or name == "cpu" else logging.WARNING
            _log.log(level, "the %s kernels are not used, because %s", name, error)
    raise AssertionError("plain torch runs everywhere")
