"""Manifests for Kubernetes: read, checked, and the pods they make."""
