"""The public faults of split serving systems, and the test of each: the data behind docs/faults.md."""
