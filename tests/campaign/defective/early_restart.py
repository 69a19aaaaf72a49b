"""Defect: pods that have never all started are restarted, so that a long download never completes."""

from campaign.defective.planting import plant

plant(
    "medha_operator.replica.gang_restarts",
    "    ended = [pod for pod in alive if pod.is_failed]\n",
    "    ended = [pod for pod in alive if pod.is_failed or pod.problem is not None]\n",
)
