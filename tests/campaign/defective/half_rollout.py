"""Defect: a new revision reaches only the first lane, so that a replica has two revisions."""

from campaign.defective.planting import plant

plant(
    "medha_operator.replica.gang_restarts",
    "if pod.revision != revision]",
    "if pod.revision != revision and pod.lane == 0]",
)
