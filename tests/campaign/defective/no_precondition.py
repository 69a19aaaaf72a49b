"""Deletes whatever has the name by now."""

from campaign.defective.planting import plant

plant(
    "medha_operator.kube.client",
    '            "preconditions": {"uid": uid, "resourceVersion": version},\n',
    "",
)
