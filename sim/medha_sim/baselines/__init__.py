"""Baselines for comparison: other systems' schedulers, as controllers on the simulator's executor.

Each module's docstring lists the parts of the system that it models, and those that it leaves out. All use
the messages of `medha.wire.messages`: `handle(event, now) -> commands`, with one `Step` for each batch.
"""
