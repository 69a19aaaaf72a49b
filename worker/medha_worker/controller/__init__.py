"""The process that drives one ReplicaController in real time. No torch."""
