"""The ports, folders and exit status on which pods agree with the operator that makes them, and with their router."""

from __future__ import annotations

CONTROL_PORT = 5600
TOKENS_PORT = 5601
PEERS_PORT = 5610
"""Port at which the first rank of a pod gives KV to other replicas; those of the others follow, and then one more for each, for bytes."""
METRICS_PORT = 9400
HEALTH_PORT = 9401
ROUTER_CONTROL_PORT = 5700
ROUTER_TOKENS_PORT = 5701
MODEL_DIRECTORY = "/model"
DRAFT_DIRECTORY = "/draft-model"
KV_FILES_DIRECTORY = "/kv-files"
KV_STORE_DIRECTORY = "/kv-store"
RESTART_REQUESTED = 75
"""Exit status by which a pod asks for a restart of all pods of its replica: `EX_TEMPFAIL` of sysexits.h."""
