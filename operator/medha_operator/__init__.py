"""The operator reconciles MedhaReplica and MedhaDeployment resources into pods.

`kopf run -m medha_operator` runs it. Rendering and planning are also used without kopf (`medha render`), so
the handlers are imported only where kopf is loaded.
"""

import sys

if "kopf" in sys.modules:
    import medha_operator.handlers  # noqa: F401 - kopf finds what it registers
