"""KV management: blocks, pools, prefixes, and the lanes over which a long context is spread."""
