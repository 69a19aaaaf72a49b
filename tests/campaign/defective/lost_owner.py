"""Children without an owner: nothing takes them away with their replica."""

from campaign.defective.planting import plant

plant("medha_operator.replica.render", '            "ownerReferences": [owner.reference],\n', "")
