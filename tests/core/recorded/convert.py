"""Convert recorded messages and records to the present names: `python tests/core/recorded/convert.py FILE...`.

A line of `wire_v1.jsonl` holds the header of a frame, as text, and the fields that it is read as. A line of a record of
`medha up --record` holds a header. Names that are current already stay as they are, so a file can be converted again.
The digests of commands in a record are those of its own version: `medha replay` compares them only within one version.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TYPES = {
    "Meet": "Rendezvous",
    "MemoryRanOut": "RankOutOfMemory",
    "StoreLook": "StoreLookup",
    "Publish": "Insert",
}
FIELDS = {
    "deals": "stripings",
    "rendezvous": "address",
    "given_up_share": "demoted_share",
    "givenUpShare": "demotedShare",
    "looked": "looked_up",
    "draws": "proposes",
    "publishes": "inserts",
    "demotions": "offloads",
    "demote_seconds_per_block": "offload_seconds_per_block",
}


def converted(value: Any) -> Any:
    """Return a JSON value with the present names of message types and fields."""
    if isinstance(value, list):
        return [converted(one) for one in value]
    if not isinstance(value, dict):
        return value
    fields = {FIELDS.get(name, name): converted(one) for name, one in value.items()}
    if isinstance(fields.get("frame"), str):
        fields["frame"] = json.dumps(converted(json.loads(fields["frame"])), separators=(",", ":"))
    if isinstance(fields.get("type"), str):
        fields["type"] = TYPES.get(fields["type"], fields["type"])
    return fields


def main() -> None:
    for name in sys.argv[1:]:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
        Path(name).write_text(
            "".join(json.dumps(converted(json.loads(line))) + "\n" for line in lines), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
