"""The ZeroMQ links between processes: key files, encrypted sockets, admission of peers, and dropped messages.

Router, controller and ranks make their sockets here, so that there is one way to make them and none without
keys. Links carry `medha.wire.messages` in the frames of `medha.wire.frames`.
"""
