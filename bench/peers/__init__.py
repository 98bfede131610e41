"""The same broken handoffs on Genlock and on vLLM's split serving, measured here: see docs/faults.md."""
