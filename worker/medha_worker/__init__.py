"""The worker: drives the replica controller in real time and runs the 3D-parallel engine."""
