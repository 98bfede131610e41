"""Who is alive, what is wanted and what happened: one interface, in memory or in Redis."""
