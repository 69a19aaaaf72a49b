"""The manifests and key files that users write, the meaning of their fields, and the models that manifests name."""
