"""Who holds which KV: blocks, pools, prefixes, and the lanes that a long context is spread over."""
