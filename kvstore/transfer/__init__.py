"""Transfer engines: one-sided reads of a peer's pages. See base.py for the contract that all of them pass."""
