"""Defect: the cache keeps deleted objects, so that objects deleted by others seem to exist."""

from campaign.defective.planting import plant

plant("medha_operator.kube.store", '        if event != "DELETED":\n', "        if True:\n")
