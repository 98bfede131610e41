"""Kubernetes manifests: the chart rendered without a helm binary, and rules that hold for what comes out."""
