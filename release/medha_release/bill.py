"""The bill of materials: every package that the installations and images of a version are made of, as CycloneDX."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from medha_release.contents import pinned


def bill_of_materials(version: str, constraints: str, seconds: int) -> str:
    """Return a CycloneDX document of the packages that a text of constraints.txt pins.

    `seconds` is the time of the commit, in Unix time: the same commit gives the same document.
    """
    root = Component(
        name="medha", version=version, type=ComponentType.APPLICATION, bom_ref=f"medha@{version}"
    )
    bom = Bom(
        components=[
            Component(
                name=name,
                version=pin,
                type=ComponentType.LIBRARY,
                bom_ref=f"{name}@{pin}",
                purl=PackageURL("pypi", name=name.lower().replace("_", "-"), version=pin),
            )
            for name, pin in pinned(constraints).items()
        ]
    )
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromtimestamp(seconds, UTC)
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, f"medha {version} {seconds} {constraints}")
    bom.register_dependency(root, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"
