"""Chooses the data plane by the device of the rank: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import logging

from torch.distributed import is_nccl_available

from medha_worker.rank.data_plane import DataPlane, PlaneSite
from medha_worker.rank.gloo_plane import GlooPlane
from medha_worker.rank.nccl_plane import nccl_plane

_log = logging.getLogger("medha.rank")


def choose_plane(site: PlaneSite) -> DataPlane:
    """Form the data plane of a rank; all ranks of a replica have devices of the same kind, and make the same choice.

    Raises:
        PartFailed: another rank did not come.
    """
    if site.device.is_host:
        return GlooPlane(site)
    if not is_nccl_available():
        _log.warning("torch is built without NCCL: ranks exchange tensors through host memory, which is slow")
        return GlooPlane(site)
    return nccl_plane(site)
