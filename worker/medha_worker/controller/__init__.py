"""The process that drives one ReplicaController in real time. It does not import torch."""
