"""Defect: kept revisions are rendered again, so an upgrade that changes the rendering restarts all pods."""

from campaign.defective.planting import plant

plant(
    "medha_operator.replica.plan",
    "    if known is not None:\n        return known, []\n",
    "    if known is not None:\n"
    "        known = replace(known, templates=pod_templates(owner, spec, known.name, settings))\n"
    "        from medha_operator.replica.gang_restarts import end_pods\n"
    "        kept = observed.objects.get(('StatefulSet', lane_name(owner.name, 0)))\n"
    "        if kept is not None and not holds(kept['spec']['template'], known.templates[0]):\n"
    "            return known, end_pods(observed.pods, 'rendered differently')\n"
    "        return known, []\n",
)
