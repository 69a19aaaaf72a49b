"""An operator of kopf alone, which prints the ConfigMaps that its index holds at each event."""

from __future__ import annotations

from typing import Any

import kopf


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.label_selectors["", "v1", "configmaps"] = "watched-by=kopf"


@kopf.index("", "v1", "configmaps")
async def held(name: str, **_: Any) -> dict[str, bool]:
    return {name: True}


@kopf.on.event("", "v1", "configmaps")
async def tell(name: str, held: kopf.Index[str, bool], **_: Any) -> None:
    print(f"{name}: {' '.join(sorted(held))}", flush=True)
