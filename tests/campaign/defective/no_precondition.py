"""Deletes whatever has the name by now."""

from campaign.defective.planting import plant

plant(
    "medha_operator.cluster",
    '            "preconditions": {"uid": uid, "resourceVersion": version},\n',
    "",
)
