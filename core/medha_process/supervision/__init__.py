"""Supervision of processes that belong together: start, watch, restart them, and stop them in order.

`medha up` supervises all parts of a replica; a pod supervises its ranks and, in the first pod, the
controller.
"""
