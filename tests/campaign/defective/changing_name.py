"""Defect: a name that changes with every start of the operator."""

from campaign.defective.planting import plant

plant(
    "medha_operator.replica.manifests",
    '    return f"{owner.name}-{revision}"\n',
    '    import os\n\n    return f"{owner.name}-{revision}-{os.getpid()}"\n',
)
