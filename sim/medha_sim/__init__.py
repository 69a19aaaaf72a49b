"""The simulator: the controller and router cores under a virtual clock."""
