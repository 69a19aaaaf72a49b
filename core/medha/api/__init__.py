"""The resources that users write, and what their fields mean."""
