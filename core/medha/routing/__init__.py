"""Which replica serves which sequence, and when: the decisions of a router."""
