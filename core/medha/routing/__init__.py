"""The decisions of a router: which replica serves which sequence, and when."""
