"""Pods for workers: the controller owns the replicas of a RayCluster."""
