"""Defect: deletes have no precondition, so that they also hit a newer object of the same name."""

from campaign.defective.planting import plant

plant(
    "medha_operator.kube.client",
    '            "preconditions": {"uid": uid, "resourceVersion": version},\n',
    "",
)
