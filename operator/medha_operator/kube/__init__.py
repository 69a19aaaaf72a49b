"""The Kubernetes API as the operator uses it: client, watches, stores, work queue, lease."""
