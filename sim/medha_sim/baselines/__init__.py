"""Other systems' schedulers as controllers on the simulator's executor: what Medha is compared with.

Each module's docstring says which parts of the system it models, and which it leaves out. They all speak the
messages of `medha.wire.messages`: `handle(event, now) -> commands`, one `Step` a batch.
"""
