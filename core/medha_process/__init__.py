"""The life of processes: how the parts of a replica are launched, supervised and watched, and how they end.

Router, worker, operator and command line share it. It needs no torch.
"""
