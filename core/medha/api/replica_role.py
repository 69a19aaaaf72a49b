"""Roles of a replica among those of its model (`spec.role`): the phases of a request that it serves."""

from __future__ import annotations

from typing import Literal

ReplicaRole = Literal["both", "prefill", "decode"]
"""`prefill` computes prompts, `decode` computes outputs, `both` does either (docs/roles.md)."""
