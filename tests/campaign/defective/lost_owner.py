"""Defect: children have no owner, so they are not deleted with their replica."""

from campaign.defective.planting import plant

plant("medha_operator.replica.manifests", '            "ownerReferences": [owner.reference],\n', "")
