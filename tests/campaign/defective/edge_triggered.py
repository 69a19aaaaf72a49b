"""Defect: only changes of the spec are reconciled; a replica that is ready is never checked again."""

from campaign.defective.planting import plant

plant(
    "medha_operator.replica.plan",
    "    if observed.is_deleting:\n",
    "    if (\n"
    "        not observed.is_deleting\n"
    "        and observed.generation == observed.status.observed_generation\n"
    "        and any(one.type == 'Ready' and one.status == 'True' for one in observed.status.conditions)\n"
    "    ):\n"
    "        return Plan(lost, again)\n"
    "    if observed.is_deleting:\n",
)
