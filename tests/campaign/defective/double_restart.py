"""Defect: members of the next gang are taken for members of the broken one."""

from campaign.defective.planting import plant

plant(
    "medha_operator.replica.gang_restarts",
    "if pod.created <= seconds(status.newest_member) or pod.is_failed]",
    "]",
)
