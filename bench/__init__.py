"""Benchmarks, each with its peers in the same run."""
