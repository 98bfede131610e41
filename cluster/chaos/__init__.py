"""Chaos on a real cluster: a seeded plan of faults under load, each request judged against the oracle; and the soak."""
