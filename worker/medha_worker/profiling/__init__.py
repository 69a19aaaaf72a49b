"""Measures steps on this machine and fits a profile to them: `medha profile`."""
