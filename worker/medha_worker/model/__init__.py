"""The model of one rank: configuration, weights, paged KV, layers, and attention over lanes.

Its only third-party dependencies are torch, numpy and safetensors.
"""
