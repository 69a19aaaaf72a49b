"""The model of one rank: configuration, weights, paged KV, attention and layers. Torch, numpy and safetensors only."""
