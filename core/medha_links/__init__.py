"""The ZeroMQ links between processes: key files, encrypted sockets, who is admitted, and what is dropped.

Router, controller and ranks make their sockets here, so that there is one way to make them and none without keys.
What passes over a link is `medha.wire.messages` in the frames of `medha.wire.frames`.
"""
