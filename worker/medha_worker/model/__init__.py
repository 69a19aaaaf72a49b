"""The model of one rank: configuration, weights, paged KV, attention and layers.

Its only third-party dependencies are torch, numpy and safetensors.
"""
