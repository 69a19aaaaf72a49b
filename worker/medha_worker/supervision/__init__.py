"""Running processes that belong together: started, watched, started again when they die, and stopped in order.

`medha up` runs all parts of a replica so, and a pod its ranks and, in the first one, the controller.
"""
