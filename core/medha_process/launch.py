"""Launch of a replica's parts: writes the settings of each, and says how its process is started and stopped.

`medha up` and the pods launch the same parts, with other settings.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from medha_process.part_settings import ControllerSettings, PartSettings, RankSettings
from medha_process.router_settings import RouterSettings
from medha_process.supervision.supervisor import Part

CONTROLLER = "controller"
"""Name of the controller's part; its settings are in `controller.json`."""

# OpenMP threads spin while they wait for each other. Router and controller share the cores with them, and a
# thread that spins while it waits for a preempted one makes a step take ten times as long. Threads that sleep
# at once (OMP_WAIT_POLICY=PASSIVE) cost prefill a third of its rate. Spinning for a few microseconds avoids
# both (measured).
RANK_ENVIRONMENT = MappingProxyType({"GOMP_SPINCOUNT": "3000"})


def router_part(settings: RouterSettings, directory: Path) -> Part:
    """Write the router's settings to `directory`, and return its part."""
    return _part("router", "medha_router", settings, directory)


def controller_part(settings: ControllerSettings, directory: Path) -> Part:
    """Write the controller's settings to `directory`, and return its part."""
    return _part(CONTROLLER, "medha_worker.controller", settings, directory)


def rank_part(settings: RankSettings, directory: Path) -> Part:
    """Write a rank's settings to `directory`, and return its part."""
    return _part(f"rank {settings.rank}", "medha_worker.rank", settings, directory, RANK_ENVIRONMENT)


def settings_file(part: str, directory: Path) -> Path:
    """Return the path of a part's settings in `directory`."""
    return directory / f"{part.replace(' ', '-')}.json"


def _part(
    name: str,
    module: str,
    settings: PartSettings,
    directory: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Part:
    path = settings_file(name, directory)
    settings.write(path)
    argv = (sys.executable, "-m", module, "--settings", str(path))
    # SIGUSR1 stops any part at once; SIGTERM lets the router and the controller drain first.
    return Part(name, argv, environment, signal.SIGUSR1)
