"""Changes all replicas of a deployment at once, whatever serves meanwhile."""

from campaign.defective.planting import plant

plant(
    "medha_operator.deployment",
    "    least = scene.replicas - unavailable\n",
    "    least = -1\n",
)
