"""The operator: reconciles MedhaReplica and MedhaDeployment resources into pods. `kopf run -m medha_operator` runs it.

Rendering and planning are used without kopf, too (`medha render`), so that its handlers are only made where it runs.
"""

import sys

if "kopf" in sys.modules:
    import medha_operator.handlers  # noqa: F401 - kopf finds what it registers
