"""Changes all replicas of a deployment at once, whatever serves meanwhile."""

from campaign.defective.planting import plant

plant(
    "medha_operator.deployment.plan_deployment",
    "    least = scene.replicas - scene.suspending - unavailable\n",
    "    least = -1\n",
)
