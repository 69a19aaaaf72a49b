"""The process of one rank: it runs its part of every step on one device."""
