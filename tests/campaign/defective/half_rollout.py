"""A new revision reaches the first lane only: two revisions in one replica."""

from campaign.defective.planting import plant

plant(
    "medha_operator.replica.plan",
    "if pod.revision != revision]",
    "if pod.revision != revision and pod.lane == 0]",
)
