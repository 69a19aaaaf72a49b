"""The messages between processes, and their frames."""
