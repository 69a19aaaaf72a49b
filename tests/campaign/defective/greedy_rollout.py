"""Defect: all replicas of a deployment are changed at once, even if none is left to serve."""

from campaign.defective.planting import plant

plant(
    "medha_operator.deployment.plan_deployment",
    "    least = scene.replicas - scene.suspending - unavailable\n",
    "    least = -1\n",
)
