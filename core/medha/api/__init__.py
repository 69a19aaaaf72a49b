"""The resources that users write, and the meaning of their fields."""
