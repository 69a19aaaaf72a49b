"""Restarts pods that have never all started: a download that takes long never ends."""

from campaign.defective.planting import plant

plant(
    "medha_operator.replica.plan",
    "        ended = [pod for pod in alive if pod.is_failed]\n",
    "        ended = [pod for pod in alive if pod.is_failed or pod.trouble is not None]\n",
)
