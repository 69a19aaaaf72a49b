"""The making of a release: its version, its files, and the proof that they are whole. Not installed with Medha."""
