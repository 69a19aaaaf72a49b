"""The control plane of the campaigns is that of the cluster's tests."""

from cluster.conftest import controlled

__all__ = ["controlled"]
